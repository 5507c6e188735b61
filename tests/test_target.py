"""The tree pass against mlx-lm's own forward, for every tiny model."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes
from tiny import BASE, TINY, build, filled, run_tree, target_of, text_of

from mlx_specstream.errors import SpecStreamError
from mlx_specstream.target import Target, TreeLayout

TREES = {
    "pairs": (-1, 0, 1, 0, 3),
    "bushy": (-1, 0, 0, 0, 1, 1, 2, 4),
    "deep_branch": (-1, 0, 1, 2, 0, 4, 5, 6, 2, 8),
    # Ancestors leave the sliding window of 8, and sit at rows that are not their depths.
    "past_the_window": (-1, 0, 0, 0, 3, 4, 5, 6, 7, 8, 9, 10, 11),
}
TOLERANCE = 1e-4


def reference(target: Target, tokens: list[int]) -> np.ndarray:
    """mlx-lm's logits at every token."""
    return np.array(target.model(mx.array([tokens]))[0])


def logits_of(target: Target, cache, tokens: list[int], layout: TreeLayout) -> np.ndarray:
    return np.array(target.logits(run_tree(target, cache, tokens, layout).hidden))


def assert_close(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert np.abs(ours - theirs).max() < TOLERANCE
    assert (ours.argmax(-1) == theirs.argmax(-1)).all()


def snapshot(cache) -> tuple:
    return cache.length, [np.array(array[:, :, : cache.length]) for array in cache.kv]


def assert_unchanged(cache, before: tuple) -> None:
    assert cache.length == before[0]
    for array, old in zip(cache.kv, before[1], strict=True):
        assert (np.array(array[:, :, : cache.length]) == old).all()


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("prefix", [0, 13])
def test_a_chain_pass_gives_the_logits_of_mlx_lm(name, prefix):
    target, tokens = target_of(name), text_of(37)
    cache = filled(target, tokens[:prefix])
    chain = TreeLayout.chain(len(tokens) - prefix - 1)
    ours = logits_of(target, cache, tokens[prefix:], chain)
    assert_close(ours, reference(target, tokens)[prefix:])


@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("name", TINY)
def test_a_tree_pass_gives_each_row_the_logits_of_its_own_path(name, shape):
    target, prefix, layout = target_of(name), text_of(21), TreeLayout(TREES[shape])
    tokens = text_of(len(layout), seed=3)
    ours = logits_of(target, filled(target, prefix), tokens, layout)
    for row in range(len(layout)):
        path = [tokens[node] for node in layout.paths[row][: layout.depth[row] + 1]]
        assert_close(ours[row], reference(target, prefix + path)[-1])


@pytest.mark.parametrize("step", [1, 3, 8, 512])
@pytest.mark.parametrize("name", TINY)
def test_prefill_in_steps_equals_one_forward(name, step):
    target, tokens = target_of(name), text_of(24)
    cache = target.make_cache()
    target.prefill(tokens[:-1], cache, step=step)
    assert cache.length == 23
    ours = logits_of(target, cache, tokens[-1:], TreeLayout.chain(0))
    assert_close(ours[-1], reference(target, tokens)[-1])


@pytest.mark.parametrize("name", TINY)
def test_committing_a_later_branch_keeps_exactly_its_rows(name):
    target, prefix, layout = target_of(name), text_of(21), TreeLayout(TREES["deep_branch"])
    tokens, path = text_of(len(layout), seed=3), [0, 4, 5, 6, 7]
    cache = filled(target, prefix)
    run_tree(target, cache, tokens, layout)
    cache.commit(path)
    assert cache.length == len(prefix) + len(path)
    rest = text_of(11, seed=4)
    ours = logits_of(target, cache, rest, TreeLayout.chain(len(rest) - 1))
    text = prefix + [tokens[row] for row in path] + rest
    assert_close(ours, reference(target, text)[-len(rest) :])


@pytest.mark.parametrize("name", ["sliding", "gemma3_text"])
def test_a_sliding_window_forgets_across_several_wraps(name):
    target, tokens = target_of(name), text_of(75)
    cache = filled(target, tokens[:3])
    layout = TreeLayout([-1, 0, 1, 0, 3])
    expected = reference(target, tokens)
    for first in range(3, 72, 3):
        # The branch that is right comes second, so that its rows have to move.
        rows = [tokens[first], 1, 2, *tokens[first + 1 : first + 3]]
        ours = logits_of(target, cache, rows, layout)
        assert_close(ours[[0, 3, 4]], expected[first : first + 3])
        cache.commit([0, 3, 4])


def test_only_sliding_layers_look_through_a_window():
    assert target_of("sliding").windows == [8, None, 8, 8]
    assert target_of("grouped").windows == [None] * 3
    assert target_of("gemma3_text").windows == target_of("gemma3").windows == [8, 8, None, 8]


def test_an_aborted_pass_leaves_the_cache_as_it_was():
    target = target_of("grouped")
    cache = filled(target, text_of(21))
    before = snapshot(cache)
    run_tree(target, cache, text_of(8), TreeLayout.chain(7))
    cache.abort()
    assert_unchanged(cache, before)
    with pytest.raises(ValueError, match="rows"):
        cache.commit([0])  # nothing is pending any more


def test_an_exception_within_a_pass_leaves_the_cache_as_it_was(monkeypatch):
    target, tokens = target_of("grouped"), text_of(30)
    cache = filled(target, tokens[:21])
    before = snapshot(cache)
    layers = type(target.blocks[2])

    def fail(block, hidden, mask, view):
        view.update_and_fetch(mx.ones((1, 2, 9, 16)), mx.ones((1, 2, 9, 16)))
        raise RuntimeError("in the middle")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="in the middle"):
        patch.setattr(layers, "__call__", fail)
        run_tree(target, cache, tokens[21:], TreeLayout.chain(8))
    assert_unchanged(cache, before)
    ours = logits_of(target, cache, tokens[21:], TreeLayout.chain(8))
    assert_close(ours, reference(target, tokens)[21:])


@pytest.mark.parametrize("path", [[0, 9], [-1], [1, 0], [0, 0], [8]])
def test_a_path_that_the_pass_does_not_have_is_refused(path):
    target, tokens = target_of("grouped"), text_of(29)
    cache = filled(target, tokens[:21])
    before = snapshot(cache)
    run_tree(target, cache, tokens[21:], TreeLayout.chain(7))
    with pytest.raises(ValueError, match="cannot commit"):
        cache.commit(path)
    assert_unchanged(cache, before)


def test_the_cache_grows_by_steps_and_keeps_its_rows():
    target, tokens = target_of("grouped"), text_of(80)
    cache = filled(target, tokens[:7], step=8)
    assert cache.capacity == 8
    for first in range(7, 79, 4):
        run_tree(target, cache, tokens[first : first + 4], TreeLayout.chain(3))
        cache.commit([0, 1, 2, 3])
    assert cache.length == 79 and cache.capacity == 80
    ours = logits_of(target, cache, tokens[79:], TreeLayout.chain(0))
    assert_close(ours[-1], reference(target, tokens)[-1])


def test_truncating_goes_back_in_time():
    target, tokens = target_of("sliding"), text_of(40)
    cache = filled(target, tokens[:20] + text_of(20, seed=9))
    cache.truncate(20)
    ours = logits_of(target, cache, tokens[20:], TreeLayout.chain(19))
    assert_close(ours, reference(target, tokens)[20:])
    with pytest.raises(ValueError, match="cannot keep 21"):
        cache.truncate(21)


@pytest.mark.parametrize(("limit", "most"), [(None, 64), (40, 40), (100, 64)])
def test_more_tokens_than_positions_are_refused_before_any_is_computed(limit, most):
    target = Target.of(build(max_position_embeddings=64))
    cache = target.make_cache(limit=limit)
    with pytest.raises(SpecStreamError, match=f"{most + 1} tokens but the context holds {most}"):
        target.prefill(text_of(most + 1), cache)
    assert cache.length == 0
    target.prefill(text_of(most), cache)
    assert cache.length == most


@pytest.mark.parametrize("name", TINY)
def test_the_model_is_left_as_it_was_and_no_weight_is_copied(name):
    model = TINY[name]()
    tokens = mx.array([text_of(12)])
    names = {key: id(value) for key, value in tree_flatten(model.parameters())}
    ropes = [layer.self_attn.get("rope") for layer in model.layers]
    before = np.array(model(tokens))
    gc.collect()
    memory = mx.get_active_memory()
    target = Target.of(model)
    assert mx.get_active_memory() - memory < 4096
    assert Target.of(model) is target
    cache = filled(target, text_of(9))
    run_tree(target, cache, text_of(5), TreeLayout(TREES["pairs"]))
    assert {key: id(value) for key, value in tree_flatten(model.parameters())} == names
    assert [layer.self_attn.get("rope") for layer in model.layers] == ropes
    assert (np.array(model(tokens)) == before).all()


@pytest.mark.parametrize(
    ("model_type", "extra"),
    [
        ("starcoder2", {"norm_epsilon": 1e-5}),
        (
            "mamba",
            {"state_size": 4, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
            | {"time_step_rank": 4},
        ),
    ],
)
def test_an_architecture_without_an_adapter_is_refused_by_name(model_type, extra):
    config = {**BASE, "model_type": model_type, **extra}
    model_class, args_class = _get_classes(config)
    with pytest.raises(SpecStreamError, match=f"'{model_type}' is not supported.*llama"):
        Target.of(model_class(args_class.from_dict(config)))


def test_a_rope_that_depends_on_the_texts_length_is_refused():
    try:
        model = build(rope_scaling={"type": "dynamic", "factor": 2.0})
    except ValueError:
        pytest.skip("this mlx-lm refuses it itself")
    with pytest.raises(SpecStreamError, match="dynamic NTK"):
        Target.of(model)


def test_layouts_know_depth_paths_and_ancestors():
    layout = TreeLayout([-1, 0, 1, 0, 3, 3])
    assert layout.depth.tolist() == [0, 1, 2, 1, 2, 2] and layout.max_depth == 2
    assert layout.paths.tolist() == [
        [0, 0, 0], [0, 1, 1], [0, 1, 2], [0, 3, 3], [0, 3, 4], [0, 3, 5],
    ]  # fmt: skip
    assert np.flatnonzero(layout.rows.visible[4]).tolist() == [0, 3, 4]
    assert not layout.is_chain and not layout.rows.consecutive
    assert TreeLayout.chain(3).is_chain and TreeLayout.chain(3).rows.consecutive


@pytest.mark.parametrize("parents", [[], [0], [-1, 1], [-1, 2, 0], [-1, -1]])
def test_what_is_not_a_tree_is_refused(parents):
    with pytest.raises(ValueError, match=r"root|parent"):
        TreeLayout(parents)
