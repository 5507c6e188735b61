"""How a model's weights are to be stored, as mlx-lm's options say it."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.convert import (
    MODEL_CONVERSION_DTYPES,
    QUANT_RECIPES,
    mixed_quant_predicate_builder,
)
from mlx_lm.utils import dequantize_model, quantize_model

from mlx_specstream.errors import SpecStreamError, UsageError

DTYPES = tuple(MODEL_CONVERSION_DTYPES)
RECIPES = tuple(QUANT_RECIPES)
# What MLX has kernels for: group sizes and bits by mode, the default first.
MODES = {
    "affine": ((64, 32, 128), (4, 2, 3, 5, 6, 8)),
    "mxfp4": ((32,), (4,)),
    "nvfp4": ((16,), (4,)),
    "mxfp8": ((32,), (8,)),
}


@dataclass(frozen=True)
class Storage:
    """What the weights become. Unset, they stay as they are.

    Args:
        quantize: Quantize what is not yet.
        bits: Bits of a weight; by default the mode's first.
        group_size: Weights that share a scale; by default the mode's first.
        mode: One of :data:`MODES`.
        recipe: Which layers get more bits: one of :data:`RECIPES`.
        dtype: Of everything that is not quantized, and of scales.
        dequantize: Expand what is quantized.

    Raises:
        UsageError: A combination that MLX does not have.
    """

    quantize: bool = False
    bits: int | None = None
    group_size: int | None = None
    mode: str = "affine"
    recipe: str | None = None
    dtype: str | None = None
    dequantize: bool = False

    def __post_init__(self) -> None:
        if self.quantize and self.dequantize:
            raise UsageError("choose either -q or -d, not both")
        chosen = (self.bits, self.group_size, self.recipe, None if self.mode == "affine" else 1)
        if not self.quantize and any(value is not None for value in chosen):
            raise UsageError("--q-bits, --q-group-size, --q-mode and --quant-predicate need -q")
        group_sizes, bits = MODES[self.mode]
        if self.group_size not in (None, *group_sizes) or self.bits not in (None, *bits):
            sizes, counts = (" or ".join(map(str, sorted(n))) for n in (group_sizes, bits))
            raise UsageError(f"--q-mode {self.mode} takes groups of {sizes} and {counts} bits")
        if self.recipe and self.mode != "affine":
            raise UsageError("--quant-predicate works with --q-mode affine only")


def apply(
    storage: Storage, model: nn.Module, config: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any], dict[str, mx.array]]:
    """Change a lazily loaded model; nothing is computed yet.

    Args:
        config: The model's own; the changed one is returned.

    Returns:
        The model, its configuration, and the weights that quantization is about to round, by the
        name of their quantized form: to be looked at before that hides what is wrong in them.

    Raises:
        SpecStreamError: There is nothing to quantize or dequantize.
    """
    # The order and the source of the default dtype are mlx-lm's.
    dtype: str = storage.dtype or config.get("torch_dtype") or ""
    dtype = dtype or (config.get("text_config") or {}).get("dtype") or ""
    if dtype in DTYPES:
        _cast(model, getattr(mx, dtype))
    before = dict(model.named_modules())
    quantized = any(_is_quantized(module) for module in before.values())
    if storage.dequantize:
        if not quantized:
            raise SpecStreamError("the model is not quantized: there is nothing to dequantize")
        config = {
            key: value
            for key, value in config.items()
            if key not in ("quantization", "quantization_config")
        }
        return dequantize_model(model), config, {}
    if not storage.quantize:
        return model, config, {}
    predicate = None
    if storage.recipe:
        group_size = storage.group_size or MODES["affine"][0][0]
        try:
            predicate = mixed_quant_predicate_builder(storage.recipe, model, group_size)
        except ValueError as error:
            raise SpecStreamError(f"--quant-predicate {storage.recipe}: {error}") from error
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what the last line says too
        model, config = quantize_model(
            model,
            config,
            storage.group_size,
            storage.bits,
            mode=storage.mode,
            quant_predicate=predicate,
        )
    rounded = {
        f"{name}.weight": before[name].weight
        for name, module in model.named_modules()
        if _is_quantized(module) and not _is_quantized(before[name])
    }
    if not rounded:
        problem = "it is already" if quantized else "no matrix divides into such groups"
        raise SpecStreamError(f"nothing to quantize: {problem} (-d expands a quantized model)")
    return model, config, rounded


def _cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Change what is floating, but what the model wants to keep as it is."""
    may = getattr(model, "cast_predicate", lambda name: True)

    def cast(name: str, array: mx.array) -> mx.array:
        return (
            array.astype(dtype) if may(name) and mx.issubdtype(array.dtype, mx.floating) else array
        )

    model.update(tree_map_with_path(cast, model.parameters()))


def _is_quantized(module: nn.Module) -> bool:
    return "scales" in module
