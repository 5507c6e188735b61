"""GGUF's blocks of quantized weights as MLX's groups, value for value.

A weight of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K or Q5_K is ``scale * q + bias``, with one scale and
one bias for 32 weights: MLX affine quantization with group size 32, in another byte order.
Re-quantizing would lose accuracy; repacking loses nothing. The other K-quants scale 16 weights at
a time, which MLX has no groups for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

Array = npt.NDArray[Any]

GROUP_SIZE = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8, "Q4_K": 4, "Q5_K": 5}
# What is taken off a stored number where the block holds no minimum of its own.
_OFFSET = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}


def unpermute(rows: Array, heads: int) -> Array:
    """Rows of a q or k projection from GGUF's order back to the order mlx-lm's rope expects.

    llama.cpp's converter interleaves the two halves of each head. For one head of size 6, rows
    that GGUF stores as ``[0 3 1 4 2 5]`` come back as ``[0 1 2 3 4 5]``. A quantized row stays
    whole, so this serves raw blocks as well as plain numbers.

    Args:
        rows: (heads * head_dim, anything).
    """
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def repack_blocks(rows: Array, kind: GGMLQuantizationType) -> tuple[Array, Array, Array]:
    """GGUF blocks as MLX affine groups of 32.

    Args:
        rows: uint8 (rows, bytes), whole blocks of ``kind``, one of :data:`BITS`.

    Returns:
        ``weight`` uint32 (rows, columns * bits / 32), the first element in the lowest bits, and
        ``scales`` and ``biases`` (rows, columns / 32). Those are float32: 128 * scale can exceed
        float16, and the CPU kernels are 8 times faster with them than with bfloat16.
    """
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, GGML_QUANT_SIZES[kind][1])
    scales, biases, numbers = (
        _super_blocks(blocks, kind) if kind.name.endswith("_K") else _blocks(blocks, kind)
    )
    packed = _pack(numbers.reshape(len(rows), -1), BITS[kind.name])
    return packed.view(np.uint32), np.ascontiguousarray(scales), np.ascontiguousarray(biases)


def _blocks(blocks: Array, kind: GGMLQuantizationType) -> tuple[Array, Array, Array]:
    """Blocks of 32: scale, perhaps a minimum, perhaps a fifth bit of each number, the numbers."""
    bits = BITS[kind.name]
    head = 2 if kind.name in _OFFSET else 4
    floats = np.ascontiguousarray(blocks[..., :head]).view(np.float16).astype(np.float32)
    scales, body = floats[..., 0], blocks[..., head:]
    if bits == 8:
        numbers = body ^ np.uint8(128)  # int8 q as uint8 q + 128
    else:
        low = body[..., -16:]  # byte i holds elements i and i + 16
        numbers = np.concatenate([low & 15, low >> 4], axis=-1)
        if bits == 5:
            numbers |= np.unpackbits(body[..., :4], axis=-1, bitorder="little") << 4
    biases = -_OFFSET[kind.name] * scales if kind.name in _OFFSET else floats[..., 1]
    return scales, biases, numbers


def _super_blocks(blocks: Array, kind: GGMLQuantizationType) -> tuple[Array, Array, Array]:
    """Blocks of 8 * 32: scale of the scales and of the minima, 8 six-bit pairs, the numbers."""
    rows = len(blocks)
    floats = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)
    first, second, rest = (blocks[..., i : i + 4] for i in (4, 8, 12))
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6) << 4], axis=-1)
    minima = np.concatenate([second & 63, (rest >> 4) | (second >> 6) << 4], axis=-1)
    low = blocks[..., -128:].reshape(rows, -1, 4, 32)  # byte (i, j): elements j of groups 2i, 2i+1
    numbers = np.stack([low & 15, low >> 4], axis=-2).reshape(rows, -1, 8, 32)
    if BITS[kind.name] == 5:
        high = blocks[..., 16:48]  # bit i of byte j: the fifth bit of element j of group i
        fifth = np.unpackbits(high[..., None], axis=-1, bitorder="little").swapaxes(-1, -2)
        numbers = numbers | fifth << 4
    # Products of a float16 and six bits: exact in float32.
    scales = (floats[..., :1] * scales).reshape(rows, -1)
    return scales, -(floats[..., 1:] * minima).reshape(rows, -1), numbers


def _pack(numbers: Array, bits: int) -> Array:
    """uint8 (rows, columns) of ``bits`` each as bytes, the first number in the lowest bits."""
    if bits == 4:
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
    elif bits == 5:
        each = np.unpackbits(numbers[..., None], axis=-1, count=5, bitorder="little")
        numbers = np.packbits(each.reshape(len(numbers), -1), axis=-1, bitorder="little")
    return np.ascontiguousarray(numbers)
