"""Safetensors files, read by their header and written one tensor at a time.

``mx.save_safetensors`` holds all of a file's tensors at once; here one is enough, so that a model
that does not fit into memory can be converted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlx_specstream.errors import SpecStreamError

Array = npt.NDArray[Any]
Entry = tuple[str, tuple[int, ...], int]  # dtype as the header names it, shape, bytes

_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "complex64": "C64",
}
_SIZES = {name: getattr(mx, dtype).size for dtype, name in _NAMES.items() if dtype != "bool"}
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def dtype_name(dtype: mx.Dtype | np.dtype) -> str:
    """A dtype as the header names it, like ``F32``."""
    return _NAMES[str(dtype).removeprefix("mlx.core.")]


def raw(array: mx.array) -> Array:
    """An array's bits as NumPy holds them, which has no bfloat16: unsigned numbers of its size."""
    return np.asarray(array.view(_BITS[array.dtype.size]))


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Every tensor's ``dtype``, ``shape`` and ``data_offsets``.

    Raises:
        SpecStreamError: The file is shorter than its header says, or no safetensors file.
    """
    problem = f"{path} is truncated or no safetensors file: download or copy it again"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if 8 + length > size:  # before it is read: the number may be anything
                raise SpecStreamError(problem)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 0
        for tensor in header.values():
            start, end_of_it = tensor["data_offsets"]
            item = _SIZES.get(tensor["dtype"])  # None: a type that only its model's reader knows
            if item is not None and end_of_it - start != math.prod(tensor["shape"]) * item:
                raise ValueError("a tensor's size is not that of its shape")
            end = max(end, end_of_it)
    except OSError as error:
        raise SpecStreamError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise SpecStreamError(problem) from error
    if 8 + length + end > size:
        raise SpecStreamError(problem)
    return header


def write(
    path: Path,
    layout: Mapping[str, Entry],
    arrays: Iterable[tuple[str, Array]],
) -> None:
    """Write a file; only the array at hand is in memory.

    Args:
        path: Where to.
        layout: An entry for each tensor.
        arrays: The tensors, in the layout's order, of the layout's shape and size.

    Raises:
        OSError: The file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name, (dtype, shape, size) in layout.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    expected = iter(layout.items())
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays:
            asked, (_, shape, size) = next(expected)
            if (name, array.shape, array.nbytes) != (asked, shape, size):
                raise ValueError(f"{name} {array.shape} where {asked} {shape} was expected")
            if array.size:
                file.write(np.ascontiguousarray(array).data.cast("B"))
    if missing := next(expected, None):
        raise ValueError(f"{missing[0]} was not given")


def entry(dtype: str, shape: tuple[int, ...], item_size: int) -> Entry:
    """A tensor's entry of :func:`write`'s layout."""
    return dtype, shape, math.prod(shape) * item_size
