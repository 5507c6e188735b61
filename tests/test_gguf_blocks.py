"""GGUF's blocks repacked into MLX's groups: no value changes."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from tiny_gguf import random_blocks

from mlx_specstream.conversion.gguf_blocks import BITS, GROUP_SIZE, repack_blocks, unpermute


@pytest.mark.parametrize("kind", [Kind[name] for name in BITS])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_repacked_blocks_dequantize_to_exactly_the_same_values(kind: Kind, magnitude: float):
    blocks = random_blocks(kind, 24, 512, magnitude)
    packed, scales, biases = repack_blocks(blocks, kind)
    assert packed.dtype == np.uint32 and scales.dtype == biases.dtype == np.float32
    values = mx.dequantize(
        *map(mx.array, (packed, scales, biases)), group_size=GROUP_SIZE, bits=BITS[kind.name]
    )
    np.testing.assert_array_equal(np.array(values), gguf.quants.dequantize(blocks, kind))


def test_unpermute_worked_example():
    rows = np.array([0, 3, 1, 4, 2, 5])[:, None]
    assert unpermute(rows, 1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_unpermuted_rows_give_the_scores_that_interleaved_rope_gives_in_gguf_order():
    rng = np.random.default_rng(1)
    heads, head_dim, hidden, length = 3, 16, 32, 7
    q, k = (rng.normal(size=(heads * head_dim, hidden)).astype(np.float32) for _ in range(2))
    x = mx.array(rng.normal(size=(length, hidden)).astype(np.float32))

    def scores(q: np.ndarray, k: np.ndarray, traditional: bool) -> np.ndarray:
        def rotated(weight: np.ndarray) -> mx.array:
            rows = (x @ mx.array(weight).T).reshape(1, length, heads, head_dim)
            return mx.fast.rope(
                rows.transpose(0, 2, 1, 3),
                head_dim,
                traditional=traditional,
                base=100000.0,
                scale=1.0,
                offset=5,
            )

        return np.array(rotated(q) @ rotated(k).swapaxes(-1, -2))

    # llama.cpp's rope for this architecture turns neighbouring rows, mlx-lm's turns halves.
    in_gguf = scores(q, k, traditional=True)
    ours = scores(unpermute(q, heads), unpermute(k, heads), False)
    np.testing.assert_allclose(ours, in_gguf, rtol=1e-4, atol=1e-3)
