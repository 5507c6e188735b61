"""A model's weights into files as mlx-lm lays them out, computed and written one by one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map
from mlx_lm.utils import get_total_parameters, make_shards

from mlx_specstream.errors import SpecStreamError

from .safetensors_file import Array, dtype_name, raw, write

_AT_A_TIME = 1 << 22  # numbers looked at


def save(
    folder: Path,
    model: nn.Module,
    rounded: dict[str, mx.array],
    progress: Callable[[int], None],
) -> tuple[int, int]:
    """Write ``model*.safetensors`` and their index. The model is empty afterwards.

    Memory holds one tensor with what it is computed from, and no more: the arrays of a lazily
    loaded model read their part of the checkpoint when they are computed, and are let go when
    they are written.

    Args:
        folder: An existing folder.
        model: A lazily loaded model.
        rounded: What quantized weights are computed from, by their name (emptied too).
        progress: Called with the bytes just written.

    Returns:
        Parameters of the model, and bytes of its tensors.

    Raises:
        SpecStreamError: A weight holds a value that is not a finite number.
        OSError: A file cannot be written.
    """
    arrays = dict(tree_flatten(model.parameters()))
    size, parameters = sum(array.nbytes for array in arrays.values()), get_total_parameters(model)
    shards = [
        {
            name: (dtype_name(array.dtype), array.shape, array.nbytes)
            for name, array in shard.items()
        }
        for shard in make_shards(arrays)
    ]
    # From here on `arrays` and `rounded` hold the only references.
    model.update(tree_map(lambda _: mx.array([]), model.parameters()))

    def computed(shard: dict) -> Iterator[tuple[str, Array]]:
        for name in shard:
            if (source := rounded.pop(name, None)) is not None:
                _check(name, source)
            array = arrays.pop(name)
            _check(name, array)
            yield name, raw(array)
            progress(array.nbytes)
            del array, source
            mx.clear_cache()

    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        write(folder / file, shard, computed(shard))
        weight_map |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": size, "total_parameters": parameters},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=4))
    return parameters, size


def _check(name: str, array: mx.array) -> None:
    """Compute an array; refuse it if anything in it is not a finite number."""
    mx.eval(array)
    if not mx.issubdtype(array.dtype, mx.floating):
        return
    flat = array.reshape(-1)
    for start in range(0, flat.size, _AT_A_TIME):  # at once it would take more than the array
        if not mx.all(mx.isfinite(flat[start : start + _AT_A_TIME])).item():
            raise SpecStreamError(
                f"{name} holds values that are not finite numbers (NaN or too large)"
            )
