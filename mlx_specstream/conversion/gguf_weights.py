"""The tensors of a GGUF file under mlx-lm's names, one at a time."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from . import gguf_architectures as architectures
from .gguf_blocks import BITS, GROUP_SIZE, Array, repack_blocks, unpermute
from .gguf_metadata import heads
from .safetensors_file import Entry, entry

_AT_A_TIME = 1 << 21  # weights: what is made of them on the way is much larger than they are


def packed_kinds(reader: GGUFReader, expand: bool = False) -> dict[str, str]:
    """The type of each matrix that is repacked, by its name in mlx-lm without ``.weight``.

    Args:
        expand: Repack none.
    """
    return {
        name.removesuffix(".weight"): tensor.tensor_type.name
        for tensor, name in architectures.tensors(reader)
        if tensor.tensor_type.name in BITS and not expand
    }


def layout(reader: GGUFReader, expand: bool = False) -> dict[str, Entry]:
    """What :func:`weights` yields, in its order."""
    packed = packed_kinds(reader, expand)
    result = {}
    for tensor, name in architectures.tensors(reader):
        shape = _shape(tensor)
        module = name.removesuffix(".weight")
        if module in packed:
            *rows, columns = shape
            words, groups = columns * BITS[packed[module]] // 32, columns // GROUP_SIZE
            result[name] = entry("U32", (*rows, words), 4)
            result[f"{module}.scales"] = result[f"{module}.biases"] = entry(
                "F32", (*rows, groups), 4
            )
        elif tensor.tensor_type.name == "F16":
            result[name] = entry("F16", shape, 2)
        else:
            result[name] = entry("F32", shape, 4)
    return result


def weights(reader: GGUFReader, expand: bool = False) -> Iterator[tuple[str, Array]]:
    """Every tensor.

    Yields:
        For a packed (rows, columns) tensor ``name.weight`` uint32 (rows, columns * bits / 32),
        ``name.scales`` and ``name.biases`` float32 (rows, columns / 32); else ``name.weight`` or
        ``name.bias``, in float16 if it is stored so, or float32.
    """
    known, packed = architectures.of(reader), packed_kinds(reader, expand)
    query, key_value = heads(reader)
    turned = {"attn_q": query, "attn_k": key_value} if known.permuted else {}
    for tensor, name in architectures.tensors(reader):
        module = name.removesuffix(".weight")
        data = np.asarray(tensor.data)
        if (count := turned.get(tensor.name.split(".")[-2])) is not None:
            data = unpermute(data, count)
        if module in packed:
            parts = _repacked(data, tensor)
            for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
                yield f"{module}.{part}", value
        else:
            value = data if tensor.tensor_type.name in ("F32", "F16") else _expanded(data, tensor)
            if known.norm_offset and name.endswith("norm.weight"):
                value = value - value.dtype.type(known.norm_offset)
            yield name, value
        del data
        _forget_pages(reader)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(length) for length in tensor.shape[::-1])  # GGUF names the columns first


def _repacked(rows: Array, tensor: ReaderTensor) -> list[Array]:
    *outer, columns = _shape(tensor)
    bits = BITS[tensor.tensor_type.name]
    result = [np.empty((*outer, columns * bits // 32), np.uint32)]
    result += [np.empty((*outer, columns // GROUP_SIZE), np.float32) for _ in range(2)]
    for piece in _pieces(tensor):
        parts = repack_blocks(rows[piece], tensor.tensor_type)
        for whole, part in zip(result, parts, strict=True):
            whole[piece] = part
    return result


def _expanded(rows: Array, tensor: ReaderTensor) -> Array:
    result = np.empty(_shape(tensor), np.float32)
    for piece in _pieces(tensor):
        result[piece] = dequantize(rows[piece], tensor.tensor_type)
    return result


def _pieces(tensor: ReaderTensor) -> Iterator[slice]:
    """Some rows at a time."""
    count = _shape(tensor)[0]
    step = max(1, _AT_A_TIME * count // max(1, int(tensor.n_elements)))
    return (slice(start, start + step) for start in range(0, count, step))


def _forget_pages(reader: GGUFReader) -> None:
    """Let go of the pages of the mapped file that were read: they count as ours until then."""
    mapped = getattr(reader.data, "_mmap", None)
    if isinstance(mapped, mmap.mmap):
        mapped.madvise(mmap.MADV_DONTNEED)
