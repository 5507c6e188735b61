"""Training streams: the arithmetic of training, and the trainer."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from texts import PROMPT, corpus_of
from tiny import HALF, filled, run_tree, target_of

from mlx_specstream import SpecStreamError
from mlx_specstream.streams import StreamsConfig, make_streams, randomise
from mlx_specstream.streams.files import identify, load_streams
from mlx_specstream.target import TreeLayout
from mlx_specstream.training.checkpoint import planned_steps
from mlx_specstream.training.corpus import Corpus
from mlx_specstream.training.evaluate import evaluate
from mlx_specstream.training.forward import stream_hidden
from mlx_specstream.training.plan import Plan, draft_vocabulary, split
from mlx_specstream.training.trainer import Trainer
from mlx_specstream.training.trunk import TrunkCache

LAYERS = 2
KINDS = [("linear", "fused"), ("attention", "fused"), ("attention", "deferred")]


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


def test_a_corpus_that_grows_never_holds_out_what_was_trained_with(corpus):
    for seed in range(20):
        _, trained = split(Corpus(corpus.texts[:14], "h"), 4, seed)
        held_out, rest = split(corpus, 4, seed)
        assert not set(trained) & set(held_out)
        assert sorted(held_out + rest) == list(range(len(corpus)))
