"""Training streams: corpus, trunk cache, the arithmetic of training, the trainer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import HALF, build, decoded, filled, run_tree, target_of, text_of

from mlx_specstream import Sampling, SpecStreamError
from mlx_specstream.streams import StreamsConfig, make_streams, randomise
from mlx_specstream.streams.files import identify, load_streams
from mlx_specstream.target import Target, TreeLayout
from mlx_specstream.training.corpus import Corpus, Text, answers, from_answers
from mlx_specstream.training.evaluate import evaluate
from mlx_specstream.training.forward import stream_hidden
from mlx_specstream.training.trainer import (
    Plan,
    Trainer,
    draft_vocabulary,
    planned_steps,
    split,
)
from mlx_specstream.training.trunk import TrunkCache

PROMPT, LAYERS = 8, 2
KINDS = [("linear", "fused"), ("attention", "fused"), ("attention", "deferred")]


def corpus_of(name: str = "grouped", count: int = 24, hash_of: str = "h") -> Corpus:
    """Prompts with a tiny target's own answers of various lengths."""
    texts = []
    for seed in range(count):
        prompt = text_of(PROMPT, seed=seed)
        said = decoded(target_of(name), prompt, 9 + seed, "none", Sampling(temp=0.5), seed=seed)
        texts.append(Text(np.array([*prompt, *said], dtype=np.int32), PROMPT, f"kind{seed % 3}"))
    return Corpus(tuple(texts), hash_of)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return corpus_of()


def config_of(method: str, mode: str, corpus: Corpus, size: int = 60) -> StreamsConfig:
    return StreamsConfig(
        method=method,
        mode=mode,
        layers=LAYERS,
        rank=4,
        correction_rank=4,
        draft_vocab=draft_vocabulary(corpus, size),
    )


def trainer_of(folder: Path, corpus: Corpus, kind=KINDS[0], name="grouped", **plan) -> Trainer:
    target = target_of(name)
    trunk = TrunkCache(folder / "trunk", target, corpus, LAYERS if kind[0] == "attention" else 0)
    trunk.build()
    heads = make_streams(config_of(*kind, corpus), target)
    settings = {"steps": 12, "texts": 3, "anchors": 6, "validate_every": 4, "held_out": 4,
                "warm_up": 3, "learning_rate": 5e-3} | plan  # fmt: skip
    return Trainer(heads, trunk, Plan(**settings), folder / "out", identify(target))


def weights_of(heads) -> dict[str, np.ndarray]:
    return {name: np.array(value) for name, value in tree_flatten(heads.parameters())}


# Corpus -----------------------------------------------------------------------------------------


def test_a_corpus_comes_back_as_it_was(corpus, tmp_path):
    corpus.save(tmp_path / "c.npz")
    again = Corpus.load(tmp_path / "c.npz")
    assert again.tokenizer == corpus.tokenizer
    for ours, theirs in zip(corpus, again, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours[1:] == theirs[1:]
    assert not list(tmp_path.glob(".c.npz*"))


@pytest.mark.parametrize("keep", [0, 30, 0.5, 0.99])
def test_a_damaged_corpus_is_refused(corpus, tmp_path, keep):
    path = tmp_path / "c.npz"
    corpus.save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    with pytest.raises(SpecStreamError, match="not a corpus"):
        Corpus.load(path)


def test_merged_corpora_hold_every_text_once(corpus):
    first, second = Corpus(corpus.texts[:10], "h"), Corpus(corpus.texts[6:], "h")
    merged = Corpus.merged([first, second])
    assert [t.tokens.tolist() for t in merged] == [t.tokens.tolist() for t in corpus]
    with pytest.raises(SpecStreamError, match="different tokenizers"):
        Corpus.merged([first, Corpus(second.texts, "other")])


def test_anchors_have_a_next_token_in_the_answer_and_one_after_it(corpus):
    text = corpus.texts[0]
    assert text.anchors[0] == PROMPT - 1
    assert text.anchors[-1] + 2 == len(text.tokens) - 1
    assert next(iter(answers(corpus))) == text.tokens[PROMPT - 3 :].tolist()


class Words:
    """A tokenizer of single letters with a chat template."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - 96 for c in text]

    def apply_chat_template(self, messages: list, add_generation_prompt: bool) -> list[int]:
        return [50, *self.encode(messages[0]["content"]), 51]


@pytest.mark.parametrize("packed", [False, True])
def test_answers_as_text_become_ids(tmp_path, packed):
    rows = [
        {"prompt": "ab", "answer": "cde", "category": "x"},
        {"prompt": "ab", "answer": "again"},
        {"prompt": "b", "answer": ""},
        {"prompt": "c", "answer": "abcdefgh"},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(text) if packed else text)
    made = from_answers(path, Words(), "h", cut_at=8)
    assert [t.tokens.tolist() for t in made] == [
        [50, 1, 2, 51, 3, 4, 5, 0],
        [50, 3, 51, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert [t.answer for t in made] == [4, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no answer of at least two tokens"),
        ('{"prompt": "a"}\n', "line 1: a prompt and an answer"),
        ("[1]\n", "line 1 is not an object"),
        ("{\n", "cannot read"),
    ],
)
def test_an_unusable_file_of_answers_is_refused(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(SpecStreamError, match=message):
        from_answers(path, Words(), "h")
    with pytest.raises(SpecStreamError, match="no file"):
        from_answers(tmp_path / "absent.jsonl", Words(), "h")


# Trunk cache ------------------------------------------------------------------------------------


def test_the_trunk_cache_holds_what_the_target_computes(corpus, tmp_path):
    trunk = TrunkCache(tmp_path, target_of("grouped"), corpus, LAYERS)
    trunk.build()
    for number in (0, 11, 23):
        here, there = trunk.compute(corpus.texts[number]), trunk.read(number)
        for name in ("final", "entering", "kv"):
            ours, theirs = np.array(getattr(here, name)), np.array(getattr(there, name))
            assert ours.shape == theirs.shape
            assert np.abs(ours - theirs).max() < 4e-3 * np.abs(ours).max()  # float16 on disk
    on_disk = sum(file.stat().st_size for file in trunk.folder.iterdir())
    assert trunk.nbytes() <= on_disk <= 1.3 * trunk.nbytes()  # and safetensors' headers


def test_a_stopped_cache_goes_on_where_it_was(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_specstream.training.trunk.SHARD", 7)
    trunk = TrunkCache(tmp_path, target_of("grouped"), corpus, 0)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trunk.build(stop)
    left = trunk.missing()
    assert 0 < len(left) < trunk.shards
    seen = []
    trunk.build(lambda done, total: seen.append(total))
    assert trunk.missing() == []
    parts = [corpus.texts[n * 7 : (n + 1) * 7] for n in left]
    assert seen[-1] == sum(len(text.tokens) for part in parts for text in part)


def test_a_corpus_that_grows_keeps_its_shards(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_specstream.training.trunk.SHARD", 8)
    target = target_of("grouped")
    TrunkCache(tmp_path, target, Corpus(corpus.texts[:20], "h"), 0).build()
    grown = TrunkCache(tmp_path, target, corpus, 0)
    assert grown.missing() == [2]  # 16 texts fill two shards; the rest is a shard of its own
    other = Target.of(build(seed=1))
    assert TrunkCache(tmp_path, other, corpus, 0).missing() == [0, 1, 2]
    assert TrunkCache(tmp_path, target, corpus, 1).missing() == [0, 1, 2]


def test_a_cache_that_does_not_fit_the_disk_is_refused(corpus, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(SpecStreamError, match="GB are free"):
        TrunkCache(tmp_path, target_of("grouped"), corpus, 0).build()


def test_a_corpus_that_grows_never_holds_out_what_was_trained_with(corpus):
    for seed in range(20):
        _, trained = split(Corpus(corpus.texts[:14], "h"), 4, seed)
        held_out, rest = split(corpus, 4, seed)
        assert not set(trained) & set(held_out)
        assert sorted(held_out + rest) == list(range(len(corpus)))


# The arithmetic ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize(
    "name", ["grouped", "sliding", "smollm3", "bfloat16", "opt", "gemma3_text", "phi3", "mixtral"]
)
def test_streams_in_training_are_those_of_decoding(name, kind, corpus, tmp_path):
    target = target_of(name)
    text = corpus.texts[-1]
    trunk = TrunkCache(tmp_path, target, corpus, LAYERS if kind[0] == "attention" else 0)
    heads = randomise(make_streams(config_of(*kind, corpus), target), 3)
    anchors = np.array([PROMPT - 1, PROMPT + 3, PROMPT + 11])
    states = trunk.compute(text)
    ours = stream_hidden(heads, states, text.anchors.start, text.tokens, anchors)
    for row, anchor in enumerate(anchors.tolist()):
        cache = filled(target, text.tokens[:anchor].tolist())
        output = run_tree(heads, cache, text.tokens[anchor : anchor + 1].tolist(), TreeLayout([-1]))
        cache.commit([0])
        cache.reserve(cache.length + 8)
        seen = heads.observed(output, mx.array(0))
        root = mx.array(int(text.tokens[anchor + 1]))
        length = mx.array(cache.length)
        theirs, _ = heads.draft_hidden(seen, root, cache.kv, length, 128)
        tolerance = 0.1 if name in HALF else 1e-4
        assert np.abs(np.array((ours[row] - theirs).astype(mx.float32))).max() < tolerance


# The trainer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("name", ["grouped", "quantized", "qwen3_moe"])
def test_training_lowers_the_loss_and_leaves_the_target_alone(name, kind, corpus, tmp_path):
    target = target_of(name)
    before = {n: np.array(v) for n, v in tree_flatten(target.model.parameters())}
    trainer = trainer_of(tmp_path, corpus, kind, name, steps=40, validate_every=20, patience=9)
    losses = [trainer.step() for _ in range(40)]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3
    after = dict(tree_flatten(target.model.parameters()))
    assert all(np.array_equal(before[n], np.array(after[n])) for n in before)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[1]], ids="-".join)
def test_a_resumed_run_ends_where_an_unbroken_one_does(kind, corpus, tmp_path):
    whole = trainer_of(tmp_path / "a", corpus, kind)
    whole.run()
    first = trainer_of(tmp_path / "b", corpus, kind)
    for _ in range(8):
        first.step()
    first.checkpoint()
    first.step()  # lost: the run is killed before the next checkpoint
    second = trainer_of(tmp_path / "b", corpus, kind)
    assert second.resume()
    assert second.progress.step == 8
    while second.progress.step < 12:
        second.step()
    ours, theirs = weights_of(whole.heads), weights_of(second.heads)
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_kill_between_the_renames_of_a_checkpoint_loses_nothing(corpus, tmp_path):
    trainer = trainer_of(tmp_path, corpus)
    trainer.step()
    trainer.checkpoint()
    out = tmp_path / "out"
    (out / "checkpoint").rename(out / "checkpoint.old")
    (out / "checkpoint.new").mkdir()
    assert planned_steps(out) == 12
    assert trainer_of(tmp_path, corpus).resume()


def test_a_checkpoint_of_other_settings_is_not_taken(corpus, tmp_path):
    trainer = trainer_of(tmp_path, corpus)
    trainer.step()
    trainer.checkpoint()
    with pytest.raises(SpecStreamError, match="other settings"):
        trainer_of(tmp_path, corpus, texts=2).resume()


def test_the_best_streams_are_written_as_a_folder_that_loads(corpus, tmp_path):
    trainer = trainer_of(tmp_path, corpus)
    seen = []
    trainer.run(validated=seen.append)
    assert len(seen) == 3
    heads = load_streams(tmp_path / "out", target_of("grouped"))
    assert heads.config.method == "linear"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["training"]["best"] == max(q.tokens_per_pass["top-4"] for q in seen)
    again = evaluate(heads, trainer.trunk, trainer.valid)
    assert again.tokens_per_pass["top-4"] == pytest.approx(config["training"]["best"])


def test_no_progress_ends_the_run(corpus, tmp_path):
    trainer = trainer_of(tmp_path, corpus, steps=400, learning_rate=1e-12, patience=2)
    assert trainer.run().step == 4 * 3


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(corpus, tmp_path):
    trainer = trainer_of(tmp_path, corpus)
    trainer.step()
    trainer.checkpoint()
    trainer.heads.bias = trainer.heads.bias + mx.nan
    with pytest.raises(SpecStreamError, match="the loss is nan at step 1"):
        trainer.run()
    assert trainer_of(tmp_path, corpus).resume()


def test_too_small_a_corpus_is_refused(corpus, tmp_path):
    small = Corpus(corpus.texts[:4], "h")
    with pytest.raises(SpecStreamError, match="too few"):
        trainer_of(tmp_path, small)
