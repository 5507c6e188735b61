"""Shapes of trees: by length, widths or paths, and the best one for measured hit rates."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tiny import decoded, streams_of, target_of, text_of

from mlx_specstream.decode.plan import Branch, TreePlan, best_paths
from mlx_specstream.decode.proposers import StreamProposer
from mlx_specstream.errors import SpecStreamError, UsageError
from mlx_specstream.streams import StreamsConfig


def paths_of(branch: Branch) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(branch.parents, branch.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return paths


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("streams:2", [(0,), (0, 0)]),
        ("streams:2x1", [(0,), (0, 0), (1,), (1, 0)]),
        ("streams:0.0", [(0,), (0, 0)]),
        ("streams:1.0+0.0.0", [(0,), (0, 0), (0, 0, 0), (1,), (1, 0)]),
        ("streams:0.1+0.0+2", [(0,), (0, 0), (0, 1), (2,)]),
    ],
)
def test_a_branch_is_read_by_length_widths_or_paths(text, paths):
    (branch,) = TreePlan.parse(text).branches
    assert paths_of(branch) == paths
    assert TreePlan.parse(str(branch)).branches == (branch,)


@pytest.mark.parametrize(
    "text",
    ["none", "ngram|table:4,streams:3", "streams:3", "a:3x2x2", "a:4,b:0.0.0+1.0", "a:0+1+2"],
)
def test_a_tree_is_written_as_it_is_read(text):
    assert str(TreePlan.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["streams:", "streams:0", "streams:2x0", "streams:0..1", "streams:+1", ":2", "a b:2",
             "streams:1.", "streams:-1", "streams:999x999x999", "streams:1000"]
)  # fmt: skip
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="tree"):
        TreePlan.parse(text)


def value(nodes, rates) -> float:
    """Tokens that a tree commits beyond the target's own: each node's path right, by chance."""
    return sum(np.prod([rates[d][k] for d, k in enumerate(node)]) for node in nodes)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_best_paths_are_the_best_of_all_trees(seed, size):
    rates = np.sort(np.random.default_rng(seed).uniform(0, 0.6, (3, 3)), axis=1)[:, ::-1]
    every = [p for n in (1, 2, 3) for p in itertools.product(range(3), repeat=n)]
    trees = [
        set(tree)
        for tree in itertools.combinations(every, size)
        if all(len(node) == 1 or node[:-1] in tree for node in tree)
    ]
    found = best_paths(rates, size)
    assert set(found) in trees
    assert value(found, rates) == pytest.approx(max(value(tree, rates) for tree in trees))


def test_rates_of_nothing_still_make_a_tree():
    branch = Branch.of_paths("streams", best_paths([[0.0, 0.0], [0.0, 0.0]], 4))
    assert len(branch) == 4


@pytest.mark.parametrize("rates", [(), ((0.5,),), ((2.0,),) * 3, (("x",),) * 3, 7])
def test_rates_that_are_none_are_refused(rates):
    with pytest.raises(SpecStreamError, match="rates"):
        StreamsConfig("linear", 3, rates=rates)


@pytest.mark.parametrize("kind", ["linear", "deferred", "fused"])
def test_a_tree_by_paths_is_lossless(kind):
    target, prompt = target_of("grouped"), text_of(12)
    plain = decoded(target, prompt, 30, "none")
    proposer = StreamProposer(streams_of("grouped", kind))
    assert decoded(target, prompt, 30, "streams:0.0.1+0.1+2", proposers=(proposer,)) == plain
