"""Vector exponentials: their values, their gradients, and where they are used."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from tiny import TINY, target_of

from mlx_specstream.target import vector_math
from mlx_specstream.target.target import shadow


@pytest.fixture(autouse=True)
def wanted_on_every_system(monkeypatch):
    monkeypatch.setattr(vector_math, "is_wanted", lambda: True)


def normal(*shape: int, seed: int = 0) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def test_exp_is_exact_to_float32_over_its_whole_range():
    x = np.linspace(-87.0, 88.0, 100_001).astype(np.float32)
    ours = np.array(vector_math.exp(mx.array(x))).astype(np.float64)
    assert np.abs(ours / np.exp(x.astype(np.float64)) - 1).max() < 2e-7


def test_exp_of_the_ends_is_zero_one_and_finite():
    ends = vector_math.exp(mx.array([-mx.inf, -200.0, 0.0, 200.0]))
    assert ends.tolist()[:3] == [0.0, 0.0, 1.0]
    assert np.isfinite(ends[3].item())


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (vector_math.swiglu, lambda gate, x: nn.silu(gate) * x),
        (lambda a, b: vector_math.softmax(a) * b, lambda a, b: mx.softmax(a, axis=-1) * b),
        (
            lambda a, b: vector_math.logsumexp(a)[..., None] * b,
            lambda a, b: mx.logsumexp(a, axis=-1, keepdims=True) * b,
        ),
    ],
)
def test_values_and_gradients_are_those_of_mlx(ours, theirs):
    a, b = 3 * normal(5, 33), normal(5, 33, seed=1)

    def results(function):
        value = mx.value_and_grad(lambda a, b: mx.sum(function(a, b) ** 2), argnums=(0, 1))
        return [np.array(x) for x in (function(a, b), *value(a, b)[1])]

    for mine, expected in zip(results(ours), results(theirs), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("mask", [None, "causal", "bool", "added"])
def test_attention_is_mlx_lms(mask):
    q, k, v = normal(2, 6, 5, 16), normal(2, 3, 9, 16, seed=1), normal(2, 3, 9, 16, seed=2)
    seen = mx.array(np.tril(np.ones((5, 9), dtype=bool), 4))
    masks = {"bool": seen, "added": mx.where(seen, 0.0, -1e9)}
    mask = masks.get(mask, mask)
    mine = vector_math.attention(q, k, v, None, 0.25, mask)
    expected = scaled_dot_product_attention(q, k, v, None, 0.25, mask)
    np.testing.assert_allclose(np.array(mine), np.array(expected), atol=1e-5)


def test_gradients_of_attention_are_mlx_lms():
    inputs = normal(2, 6, 5, 16), normal(2, 3, 9, 16, seed=1), normal(2, 3, 9, 16, seed=2)

    def gradients(function):
        def loss(q, k, v):
            return mx.sum(function(q, k, v, None, 0.25, None) ** 2)

        return mx.grad(loss, argnums=(0, 1, 2))(*inputs)

    mine = gradients(vector_math.attention)
    expected = gradients(scaled_dot_product_attention)
    for ours, theirs in zip(mine, expected, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", list(TINY))
def test_a_layer_computes_the_same_and_the_original_stays(name):
    block = target_of(name).family.layers[0]
    before = {part: type(module) for part, module in block.children().items()}
    twin = shadow(block)
    assert {part: type(module) for part, module in block.children().items()} == before
    changed = {part for part, kind in before.items() if type(twin[part]) is not kind}
    # Gemma 2 caps the scores in an attention of its own; Gemma and OPT have other activations,
    # and experts have theirs deeper inside.
    assert ("self_attn" in changed) == (name != "gemma2")
    others = ("gemma", "opt", "mixtral", "qwen3_moe")
    assert ("mlp" in changed) != name.startswith(others)
    x, mask = normal(1, 7, 64), mx.array(np.tri(7, dtype=bool))
    np.testing.assert_allclose(
        np.array(twin(x, mask, None)), np.array(block(x, mask, None)), atol=1e-4
    )


@pytest.mark.parametrize("rows", [2, 5, 16])
def test_a_row_is_computed_alike_whatever_rows_come_with_it(rows):
    q, k, v = normal(1, 6, rows, 16), normal(1, 3, 64, 16, seed=1), normal(1, 3, 64, 16, seed=2)
    gate, x = normal(1, rows, 96), normal(1, rows, 96, seed=1)
    together = vector_math.attention(q, k, v, None, 0.25, None), vector_math.swiglu(gate, x)
    for row in range(rows):
        alone = vector_math.attention(q[:, :, row : row + 1], k, v, None, 0.25, None)
        np.testing.assert_allclose(
            np.array(together[0][:, :, row]), np.array(alone[:, :, 0]), atol=1e-6
        )
        alone = vector_math.swiglu(gate[:, row], x[:, row])
        assert mx.array_equal(together[1][:, row], alone)
