"""Streams: what they compute and what they propose."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import VOCAB, decoded, filled, run_tree, streams_of, target_of, text_of

from mlx_specstream.decode.plan import Branch
from mlx_specstream.decode.processors import Sampling
from mlx_specstream.decode.proposers import Context, StreamProposer
from mlx_specstream.errors import SpecStreamError
from mlx_specstream.streams import StreamsConfig, make_streams, randomise
from mlx_specstream.target import TreeLayout
from mlx_specstream.target.cache import extent

KINDS = ("linear", "fused", "deferred")
SHAPE = TreeLayout([-1, 0, 1, 2, 0, 4, 1])
SOME = ("grouped", "biases", "sliding", "smollm3", "quantized")
DRAFT = (50, 3, 77, 12, 99, 31, 8, 64)


def config(method: str = "linear", **changes) -> StreamsConfig:
    shape = {"gamma": 3, "layers": 2, "rank": 4, "start_rank": 8, "correction_rank": 8} | changes
    return StreamsConfig(method, **shape)


def drafted(streams, cache, output, row: int, root: int) -> np.ndarray:
    """The streams' hidden states after a pass whose path to ``row`` has been committed."""
    needed = cache.length + streams.scratch_rows
    cache.reserve(needed)
    hidden, _ = streams.draft_hidden(
        streams.observed(output, mx.array(row)),
        mx.array(root),
        cache.kv,
        mx.array(cache.length),
        extent(needed, cache.capacity),
    )
    return np.array(hidden)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("kind", KINDS)
def test_streams_leave_the_main_rows_as_they_are(name, kind):
    target, prefix, tokens = target_of(name), text_of(21), text_of(len(SHAPE), seed=2)
    plain = run_tree(target, filled(target, prefix), tokens, SHAPE)
    carried = run_tree(streams_of(name, kind), filled(target, prefix), tokens, SHAPE)
    assert np.abs(np.array(plain.hidden) - np.array(carried.hidden)).max() < 1e-5
    rows = slice(0, len(prefix) + len(SHAPE))
    for mine, theirs in zip(carried.kv, plain.kv, strict=True):
        assert np.abs(np.array(mine[:, :, rows]) - np.array(theirs[:, :, rows])).max() < 1e-4


@pytest.mark.parametrize("name", SOME)
def test_fused_streams_of_a_node_equal_deferred_streams_after_committing_its_path(name):
    target, prefix, tokens = target_of(name), text_of(21), text_of(len(SHAPE), seed=2)
    fused, deferred = streams_of(name, "fused"), streams_of(name, "deferred", seed=2)
    blind = mx.concatenate([fused.start_a, mx.zeros_like(fused.start_a)], axis=1)
    deferred.update({**fused.parameters(), "start_a": blind})  # the newest token counts for nothing
    output = run_tree(fused, filled(target, prefix), tokens, SHAPE)
    differences = []
    for row in range(len(SHAPE)):
        expected = target.family.norm(output.streams[row][None])[0]
        cache = filled(target, prefix)
        after = run_tree(deferred, cache, tokens, SHAPE)
        cache.commit(SHAPE.paths[row][: SHAPE.depth[row] + 1].tolist())
        ours = drafted(deferred, cache, after, row, root=7)
        differences.append(np.abs(ours - np.array(expected)).max())
        assert np.abs(np.diff(ours, axis=0)).max() > 0.1  # the streams do differ
    assert max(differences) < 1e-4
    streams_of.cache_clear()  # the deferred ones have been changed


@pytest.mark.parametrize("name", SOME)
def test_linear_streams_of_a_node_equal_those_after_committing_its_path(name):
    target, prefix, tokens = target_of(name), text_of(21), text_of(len(SHAPE), seed=2)
    streams = streams_of(name, "linear")
    cache = filled(target, prefix)
    output = run_tree(streams, cache, tokens, SHAPE)
    for row in range(len(SHAPE)):
        path = [tokens[node] for node in SHAPE.paths[row][: SHAPE.depth[row] + 1]]
        fresh = filled(target, prefix)
        alone = run_tree(streams, fresh, path, TreeLayout.chain(len(path) - 1))
        expected = drafted(streams, fresh, alone, len(path) - 1, root=7)
        assert np.abs(drafted(streams, cache, output, row, 7) - expected).max() < 1e-4


def test_the_newest_token_moves_deferred_streams_only():
    target, prefix = target_of("grouped"), text_of(21)
    for kind in KINDS:
        streams, cache = streams_of("grouped", kind), filled(target, prefix)
        output = run_tree(streams, cache, [1], TreeLayout.chain(0))
        cache.commit([0])
        moved = drafted(streams, cache, output, 0, 5) != drafted(streams, cache, output, 0, 6)
        assert moved.any() == (kind == "deferred")


@pytest.mark.parametrize("name", ["grouped", "untied", "quantized"])
def test_untrained_linear_heads_propose_what_the_head_says_of_the_hidden_state(name):
    target = target_of(name)
    streams = make_streams(config(), target)
    cache = filled(target, text_of(21))
    output = run_tree(streams, cache, [1], TreeLayout.chain(0))
    hidden = mx.array(drafted(streams, cache, output, 0, root=3))
    said = np.array(target.logits(output.hidden))[0]
    assert np.abs(np.array(streams.draft_logits(hidden)) - said).max() < 1e-4
    proposed = propose(streams, output, root=3, parents=(-1, 0, 1), ranks=(0, 0, 0))
    assert proposed == [int(said.argmax())] * 3


@pytest.mark.parametrize("name", ["grouped", "quantized"])
def test_linear_heads_are_exactly_what_the_medusa_layout_says(name):
    streams, cache = streams_of(name, "linear"), filled(target_of(name), text_of(21))
    output = run_tree(streams, cache, [1, 2, 3], TreeLayout.chain(2))
    h = np.array(output.hidden, dtype=np.float64)[2]
    weight, bias = (np.array(p, dtype=np.float64) for p in (streams.weight, streams.bias))
    inner = weight @ h + bias
    expected = h + inner / (1 + np.exp(-inner))  # SiLU
    assert np.abs(drafted(streams, cache, output, 2, root=3) - expected).max() < 1e-4


def propose(streams, output, root: int, parents, ranks, sampling=None, noise=None) -> list[int]:
    branch = Branch("streams", tuple(parents), tuple(ranks))
    history = mx.array([0, root, 0, 0], dtype=mx.int32)
    context = Context(streams.target, history, mx.array(1), [], 64, sampling or Sampling(), noise)
    proposer = StreamProposer(streams)
    memory = (mx.array(True), streams.observed(output, mx.array(0)))
    made = proposer.propose(branch, memory, context)
    assert made.valid.tolist() == [True] * len(branch)
    return made.tokens.tolist()


def by_hand(streams, scores: np.ndarray, root: int, noise=None, temp=1.0) -> list[int]:
    """Proposals of a tree 2x2, the plain way: over the whole vocabulary, then restricted."""
    embed = np.array(streams.target.family.embed(mx.arange(VOCAB))[0], dtype=np.float64)
    a, b = (np.array(m, dtype=np.float64) for m in (streams.correction_a, streams.correction_b))
    allowed = np.array(streams.config.draft_vocab or range(VOCAB))
    tokens: list[int] = []

    def best(depth: int, above: int) -> np.ndarray:
        total = scores[depth] + (embed[above] @ a) @ (embed @ b).T
        total = total / temp + (0 if noise is None else noise[depth])
        return allowed[np.argsort(-total[allowed])][:2]

    for first in best(0, root):
        tokens += [int(first), *(int(token) for token in best(1, first))]
    return tokens


@pytest.mark.parametrize("name", ["grouped", "untied", "quantized", "quantized_untied"])
@pytest.mark.parametrize("draft", [None, DRAFT])
@pytest.mark.parametrize("sampled", [False, True])
def test_proposals_are_the_best_of_the_draft_vocabulary_with_correction_and_noise(
    name, draft, sampled
):
    target = target_of(name)
    streams = randomise(make_streams(config(draft_vocab=draft), target), seed=4, scale=0.2)
    output = run_tree(target, filled(target, text_of(21)), [1], TreeLayout.chain(0))
    hidden = streams.draft_hidden(streams.observed(output, mx.array(0)), *[None] * 4)[0]
    scores = np.array(target.logits(hidden), dtype=np.float64)
    # As strong as the scores, so that it decides.
    strength = float(scores.std())
    noise = strength * mx.random.gumbel((3, VOCAB), key=mx.random.key(6)) if sampled else None
    temp = 0.7 if sampled else 1.0
    ours = propose(
        streams, output, 9, (-1, 0, 0, -1, 3, 3), (0, 0, 1, 1, 0, 1), Sampling(temp), noise
    )
    shaken = None if noise is None else np.array(noise, dtype=np.float64)
    assert ours == by_hand(streams, scores, 9, shaken, temp)
    if draft:
        assert set(ours) <= set(draft)


@pytest.mark.parametrize("name", ["grouped", "untied", "quantized", "quantized_untied"])
def test_the_draft_head_is_some_rows_of_the_targets(name):
    target = target_of(name)
    streams = make_streams(config(draft_vocab=DRAFT), target)
    hidden = mx.random.normal((3, 64), key=mx.random.key(3))
    whole = np.array(target.logits(hidden))
    assert np.abs(np.array(streams.draft_logits(hidden)) - whole[:, DRAFT]).max() < 1e-4
    assert [streams.draft_token(mx.array(i)).item() for i in range(len(DRAFT))] == list(DRAFT)


@pytest.mark.parametrize("draft", [None, DRAFT])
def test_the_correction_is_exactly_the_low_rank_product(draft):
    target = target_of("quantized")
    streams = randomise(make_streams(config(draft_vocab=draft), target), seed=4)
    embed = np.array(target.family.embed(mx.arange(VOCAB))[0], dtype=np.float64)
    a, b = (np.array(m, dtype=np.float64) for m in (streams.correction_a, streams.correction_b))
    above = [4, 9, 4]
    expected = (embed[above] @ a) @ (embed[list(draft or range(VOCAB))] @ b).T
    ours = np.array(streams.correction(mx.array(above)))
    assert ours.shape == expected.shape and np.abs(ours - expected).max() < 1e-5
    without = make_streams(config(correction_rank=0), target)
    assert without.correction(mx.array(above)).tolist() == [[0.0]]


def test_a_tree_wider_than_the_draft_vocabulary_proposes_only_what_is_in_it():
    target = target_of("grouped")
    streams = randomise(make_streams(config(draft_vocab=(7, 11)), target), seed=4)
    output = run_tree(target, filled(target, text_of(9)), [1], TreeLayout.chain(0))
    proposed = propose(streams, output, 9, (-1,) * 5, range(5))
    assert set(proposed) == {7, 11}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_the_adapters_hold_the_text_stays(kind):
    target, prompt = target_of("biases"), text_of(19)
    plain = decoded(target, prompt, 30)
    for seed in (11, 12):
        proposer = StreamProposer(streams_of("biases", kind, seed))
        assert decoded(target, prompt, 30, "streams:2x2x1", proposers=(proposer,)) == plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", [None, DRAFT])
def test_memory_bytes_counts_parameters_draft_head_and_correction_keys(kind, draft):
    target = target_of("grouped")
    shape = config(
        "linear" if kind == "linear" else "attention",
        mode="deferred" if kind == "deferred" else "fused",
        draft_vocab=draft,
    )
    streams = make_streams(shape, target)
    parameters = sum(value.size for _, value in tree_flatten(streams.parameters()))
    own = {
        "linear": 3 * 64 * 64 + 3 * 64,
        # Per layer q k v o, gate up down, each (inputs + outputs) * rank.
        "fused": 3 * 64 + 3 * 8 * (64 + 64) + 2 * 4 * (128 + 96 + 96 + 128 + 3 * 160),
    }
    own["deferred"] = own["fused"] + 3 * 8 * 64  # the start also reads the newest token
    assert parameters == own[kind] + 2 * 64 * 8
    candidates = len(draft) if draft else VOCAB
    head = len(DRAFT) * 64 if draft else 0
    assert streams.memory_bytes() == 4 * (parameters + head + candidates * 8)


def test_more_layers_than_the_target_has_are_refused():
    with pytest.raises(SpecStreamError, match="9 layers do not fit a target of 3"):
        make_streams(config("attention", layers=9), target_of("grouped"))


@pytest.mark.parametrize("ids", [(), (5, VOCAB), (-1, 4)])
def test_a_draft_vocabulary_outside_the_targets_is_refused(ids):
    with pytest.raises(SpecStreamError, match="draft vocabulary does not fit"):
        make_streams(config(draft_vocab=ids), target_of("grouped"))


@pytest.mark.parametrize(
    "bad", [{"method": "magic"}, {"mode": "later"}, {"gamma": 0}, {"rank": 0}, {"layers": "2"}]
)
def test_a_senseless_configuration_is_refused(bad):
    with pytest.raises(SpecStreamError, match=next(iter(bad))):
        StreamsConfig(**bad)
