"""The same model in several forms: expanded to 32 or 16 bits, or packed in 8 or 4."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import options
from ..errors import UsageError
from ..target import Target
from ..training.report_memory import parameter_bytes

BITS = (4, 8, 16, 32)
EXPANDED = {16: "bfloat16", 32: "float32"}
GROUPS = (64, 32)  # values that share a scale: the first that divides a matrix's width


def bits_from(text: str) -> list[int]:
    """``--bits``: ``"4,16"`` as numbers, each once.

    Raises:
        UsageError: If one of them is no form.
    """
    values = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not set(values) <= set(BITS):
        raise UsageError(f"--bits takes some of {', '.join(map(str, BITS))}, not '{text}'")
    return list(dict.fromkeys(values))


def load_form(args: argparse.Namespace, bits: int | None) -> tuple[nn.Module, Any]:
    """The model that the options name, in one form, and its tokenizer.

    A checkpoint that is packed in that many bits keeps its own values; any other is expanded
    and packed as ``mlx_lm.convert`` would.

    Args:
        args: The command line, with ``options.add_model_options``.
        bits: The form; None is the form that the options ask for.

    Raises:
        SpecStreamError: If the model cannot be loaded.
    """
    if bits is None:
        return options.load_from(args)
    if bits in EXPANDED:
        return options.load_from(with_form(args, EXPANDED[bits], True))
    model, tokenizer = options.load_from(with_form(args, None, False))
    packed = packed_bits(model)
    if packed == bits:
        return model, tokenizer
    if packed is not None:
        del model  # two at a time may not fit
        model, tokenizer = options.load_from(with_form(args, None, True))
    pack(model, bits)
    return model, tokenizer


def with_form(args: argparse.Namespace, dtype: str | None, dequantize: bool) -> argparse.Namespace:
    """The options with another form."""
    return argparse.Namespace(**vars(args) | {"dtype": dtype, "dequantize": dequantize})


def pack(model: Any, bits: int) -> None:
    """Quantize every matrix of a model, in place."""

    def how(path: str, module: nn.Module) -> bool | dict[str, int]:
        if not hasattr(module, "to_quantized"):
            return False
        width = module.weight.shape[-1]
        group = next((size for size in GROUPS if width % size == 0), None)
        return {"group_size": group, "bits": bits} if group else False

    nn.quantize(model, class_predicate=how)
    mx.eval(model.parameters())
    loaded = getattr(model, "_specstream_loaded", None)
    if loaded is not None:
        model._specstream_loaded = replace(
            loaded, bits=bits, dequantized=False, nbytes=parameter_bytes(model)
        )


def held_bits(model: nn.Module) -> int:
    """Bits that a value of the matrices takes in memory, without its share of the scales."""
    return packed_bits(model) or 8 * Target.of(model).dtype.size


def packed_bits(model: nn.Module) -> int | None:
    """Bits of the first quantized matrix; None if there is none."""
    packed = (m.bits for _, m in model.named_modules() if isinstance(m, nn.QuantizedLinear))
    return next(packed, None)
