"""The tokenizer that a GGUF file carries, as ``tokenizer.json`` and its configuration.

Two kinds: byte-level BPE with the merges listed ("gpt2"), and SentencePiece's BPE with scores
("llama"), whose merges follow from the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gguf import GGUFReader
from gguf.constants import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from mlx_specstream.errors import SpecStreamError

from .gguf_metadata import integer, value

_SPACE = "▁"
# How Llama 3 and Qwen 2 cut text into words; they differ in how many digits stay together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    "smollm": "digits",
    "gpt-2": "gpt-2",
    "qwen2": _WORDS % "",
    "llama-bpe": _WORDS % "{1,3}",
}


def tokenizer(reader: GGUFReader) -> Tokenizer:
    """The tokenizer kept in the metadata.

    Raises:
        SpecStreamError: The metadata asks for another kind of tokenizer.
    """
    kind = value(reader, "tokenizer.ggml.model", "none")
    split = value(reader, "tokenizer.ggml.pre", "none")
    tokens = value(reader, "tokenizer.ggml.tokens")
    if kind == "gpt2" and split in _SPLITS:
        result = _byte_level(reader, tokens, split)
    elif kind == "llama":
        result = _sentence_piece(reader, tokens)
    else:
        raise SpecStreamError(
            f"the GGUF file has a {kind} tokenizer with {split} splitting; "
            f"only llama, and gpt2 with {', '.join(_SPLITS)}, are supported"
        )
    _add_tokens(reader, result, tokens, sentence_piece=kind == "llama")
    if value(reader, "tokenizer.ggml.add_bos_token", kind == "llama"):
        first = value(reader, "tokenizer.ggml.bos_token_id")
        result.post_processor = processors.TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    return result


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    """The ``tokenizer_config.json`` beside it, with the special tokens and chat template."""
    tokens = value(reader, "tokenizer.ggml.tokens")
    result: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": integer(reader, "context_length"),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        index = value(reader, f"tokenizer.ggml.{theirs}_token_id", None)
        if index is not None:
            result[f"{ours}_token"] = tokens[index]
    template = value(reader, "tokenizer.chat_template", None)
    return result if template is None else result | {"chat_template": template}


def merges_from_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The pairs that SentencePiece would join, the first to be joined first.

    SentencePiece joins the two neighbours whose joint piece has the highest score, so every way
    to cut a piece into two pieces is a merge of that piece's rank. For pieces ``a b c ab abc`` of
    which ``ab`` scores -1 and ``abc`` -2 that is ``(a, b), (ab, c)``.
    """
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _byte_level(reader: GGUFReader, tokens: list[str], split: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in value(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    result = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == "llama-bpe"))
    by_regex = split not in ("smollm", "gpt-2")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not by_regex)
    first = (
        {
            "smollm": [pre_tokenizers.Digits(individual_digits=True)],
            "gpt-2": [],
        }.get(split)
        if not by_regex
        else [pre_tokenizers.Split(Regex(_SPLITS[split]), "isolated")]
    )
    result.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level]) if first else byte_level
    if split == "qwen2":
        result.normalizer = normalizers.NFC()
    result.decoder = decoders.ByteLevel()
    return result


def _sentence_piece(reader: GGUFReader, tokens: list[str]) -> Tokenizer:
    scores = value(reader, "tokenizer.ggml.scores")
    types = value(reader, "tokenizer.ggml.token_type")
    unknown = value(reader, "tokenizer.ggml.unknown_token_id", None)
    plain = [i for i, kind in enumerate(types) if kind == TokenType.NORMAL]
    merges = merges_from_scores([tokens[i] for i in plain], [scores[i] for i in plain])
    result = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _begins_with_space(reader):
        result.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        decode.append(decoders.Strip(" ", 1, 0))
    else:
        result.normalizer = spaces
    result.decoder = decoders.Sequence(decode)
    return result


def _begins_with_space(reader: GGUFReader) -> bool:
    return bool(value(reader, "tokenizer.ggml.add_space_prefix", True))


def _add_tokens(
    reader: GGUFReader, result: Tokenizer, tokens: list[str], sentence_piece: bool
) -> None:
    # A piece like "▁▁" that is to be found whole is found where spaces have become "▁", that is
    # after normalization; not where that would put a further space before it.
    normalized = sentence_piece and not _begins_with_space(reader)
    added = []
    for token, kind in zip(tokens, value(reader, "tokenizer.ggml.token_type"), strict=True):
        if kind == TokenType.CONTROL:
            added.append(AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            added.append(AddedToken(token, special=False, normalized=normalized))
    result.add_tokens(added)
