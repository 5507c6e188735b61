"""Tokenizers rebuilt from a GGUF file's metadata, against those the metadata came from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer
from mlx_lm.utils import load_tokenizer
from tiny_gguf import add_byte_level, add_sentence_piece, finish, repacked, write_family
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlx_specstream.conversion import gguf as conversion
from mlx_specstream.conversion.gguf_tokenizer import merges_from_scores
from mlx_specstream.errors import SpecStreamError

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  leading, trailing   and\r\nwindows\r\n\n lines  ",
    "def f(x: int) -> str:\n    return f'{x!r}'  # a\tcomment",
    "It's 1984; we'll pay 12,345.67 — or 007?",
    "Ça, c'est l'été à Genève; señor Müller",
    "中文字符, русский, 👋🏽 emoji",
    " ",
    "",
]
TRAINING = [Path(__file__).read_text(encoding="utf-8"), *TEXTS[:5]]


def rebuilt(path: Path, writer: gguf.GGUFWriter) -> Tokenizer:
    finish(writer)
    return conversion.tokenizer(gguf.GGUFReader(path))


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


# The expression as Qwen 2 and Llama 3 publish it, written out.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("split", ["qwen2", "llama-bpe"])
def test_byte_level_gives_the_ids_it_was_trained_with(tmp_path: Path, split: str):
    words = QWEN2 if split == "qwen2" else QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    original.decoder = decoders.ByteLevel()
    if split == "qwen2":
        original.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    original.train_from_iterator(TRAINING, trainer)
    merges = [" ".join(merge) for merge in json.loads(original.to_str())["model"]["merges"]]
    vocabulary = original.get_vocab()
    pieces = [piece for piece in sorted(vocabulary, key=vocabulary.get) if len(piece) > 1]
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "qwen2")
    add_byte_level(writer, pieces, merges, split)
    ours = rebuilt(tmp_path / "t.gguf", writer)
    for text in TEXTS:
        encoding = ours.encode(text)
        assert encoding.tokens == original.encode(text).tokens
        assert ours.decode(encoding.ids) == text
    assert ours.encode("a<|end|>").tokens == ["a", "<|end|>"]


@pytest.mark.parametrize("space_prefix", [False, True])
def test_sentence_piece_gives_the_pieces_of_the_library(tmp_path: Path, space_prefix: bool):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text.txt").write_text("\n".join(TRAINING))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "sp"),
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        add_dummy_prefix=space_prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    ids = [i for i in range(original.vocab_size()) if not original.is_byte(i)][3:]
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "gemma3")
    pieces = [original.id_to_piece(i) for i in ids]
    scores = [original.get_score(i) for i in ids]
    add_sentence_piece(writer, pieces, scores, space_prefix=space_prefix)
    ours = rebuilt(tmp_path / "t.gguf", writer)
    for text in [t for t in TEXTS if t]:
        ids = plain_ids(ours, text)
        assert [ours.id_to_token(i) for i in ids] == original.encode(text, out_type=str), text
        assert ours.decode(ids) == text
    assert ours.encode("a").tokens[0] == "<bos>"


def test_defined_pieces_are_found_whole(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "gemma3")
    add_sentence_piece(writer, ["▁a", "a", "▁"], defined=["▁▁", "▁▁▁", "\n\n"])
    ours = rebuilt(tmp_path / "t.gguf", writer)
    assert ours.encode("a   a\n\n a").tokens == ["<bos>", "a", "▁▁▁", "a", "\n\n", "▁a"]
    assert ours.decode(plain_ids(ours, "a   a\n\n a")) == "a   a\n\n a"


def test_merges_worked_example():
    merges = merges_from_scores(["a", "b", "c", "ab", "abc", "bc"], [-9, -9, -9, -1, -2, -3])
    assert merges == [("a", "b"), ("a", "bc"), ("ab", "c"), ("b", "c")]


def test_streamed_text_of_a_sentence_piece_tokenizer(tmp_path: Path):
    write_family(tmp_path / "tiny.gguf", "gemma3")
    tokenizer = load_tokenizer(repacked(tmp_path / "tiny.gguf", tmp_path / "tiny"))
    detokenizer = tokenizer.detokenizer
    assert isinstance(detokenizer, SPMStreamingDetokenizer)
    for token in tokenizer.encode(" the  é\n", add_special_tokens=False):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == " the  é\n"


@pytest.mark.parametrize(("kind", "split"), [("gpt2", "tekken"), ("t5", "default"), ("bert", "x")])
def test_other_tokenizers_are_refused_by_name(tmp_path: Path, kind: str, split: str):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "qwen2")
    add_byte_level(writer, split=split)
    writer.kv_data[0]["tokenizer.ggml.model"].value = kind
    with pytest.raises(SpecStreamError, match=f"has a {kind} tokenizer with {split} splitting"):
        rebuilt(tmp_path / "t.gguf", writer)
