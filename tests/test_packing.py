"""Streams on a packed target: fewer bits, nearly the same proposals, exactly the same text."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import build, decoded, filled, run_tree, streams_of, text_of

from mlx_specstream.decode.proposers import StreamProposer
from mlx_specstream.streams import StreamsConfig, make_streams, randomise
from mlx_specstream.streams.files import identify, load_streams, save_streams
from mlx_specstream.streams.folder import load_folder
from mlx_specstream.streams.packing import packed, plain
from mlx_specstream.target import Target, TreeLayout

KINDS = ["linear", "fused", "deferred"]


def heads_of(target: Target, kind: str, scale: float = 0.05):
    method = "linear" if kind == "linear" else "attention"
    mode = "deferred" if kind == "deferred" else "fused"
    config = StreamsConfig(method, 3, mode, 2, 32, 32, 32, tuple(range(90, 9, -1)))
    return randomise(make_streams(config, target), 3, scale)


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.of(build(quantize=True))


def scores_of(streams, target: Target) -> np.ndarray:
    cache, layout = filled(target, text_of(21)), TreeLayout.chain(1)
    output = run_tree(streams, cache, [5, 6], layout)
    cache.commit([0, 1])
    cache.reserve(cache.length + streams.scratch_rows)
    seen = streams.observed(output, mx.array(1))
    length = mx.array(cache.length, dtype=mx.int32)
    hidden, _ = streams.draft_hidden(seen, mx.array(7), output.kv, length, cache.capacity)
    return np.array(streams.draft_logits(hidden) + streams.correction(mx.array([7, 8, 9])))


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_map_is_nearly_the_map(bits):
    weight = mx.random.normal((48, 64), key=mx.random.key(1))
    x = mx.random.normal((3, 64), key=mx.random.key(2))
    ours, exact = packed(plain(weight), bits)(x), x @ weight.T
    error = mx.abs(ours - exact).max().item() / mx.abs(exact).max().item()
    assert 0 < error < 2.0 ** (1 - bits)
    odd = plain(weight[:, :40])  # 40 inputs make no groups of 32
    assert packed(odd, bits) is odd


@pytest.mark.parametrize("kind", KINDS)
def test_packed_streams_say_nearly_the_same_in_far_less_memory(kind, target):
    streams = heads_of(target, kind)
    before, memory = scores_of(streams, target), streams.memory_bytes()
    streams.compact()
    after = scores_of(streams, target)
    assert not np.array_equal(before, after)
    assert np.corrcoef(before.ravel(), after.ravel())[0, 1] > 0.98
    assert streams.memory_bytes() < 0.5 * memory


@pytest.mark.parametrize("kind", KINDS)
def test_packed_streams_are_lossless(kind, target):
    plain_text = decoded(target, text_of(12), 24, "none")
    proposer = StreamProposer(heads_of(target, kind, scale=0.1).compact())
    assert decoded(target, text_of(12), 24, "streams:2x2x1", proposers=(proposer,)) == plain_text


@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_an_unpacked_target_stay_as_they_are(kind):
    streams = streams_of("grouped", kind)
    before = dict(tree_flatten(streams.parameters()))
    after = dict(tree_flatten(streams.compact().parameters()))
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_packed_for_decoding_and_whole_for_training(kind, target, tmp_path):
    streams = heads_of(target, kind)
    save_streams(tmp_path, streams, identify(target), dtype=mx.float16)
    whole, small = load_streams(tmp_path, target), load_folder(tmp_path, target).heads
    names = [name for name, _ in tree_flatten(streams.parameters())]
    assert [name for name, _ in tree_flatten(whole.parameters())] == names
    assert all(v.dtype == target.dtype for _, v in tree_flatten(whole.parameters()))
    assert small.memory_bytes() < 0.5 * whole.memory_bytes()
