"""Linear maps of streams in fewer bits, for targets that are themselves packed."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

GROUP = 32  # weights that share a scale; inputs must be a multiple


def plain(weight: mx.array) -> nn.Linear:
    """A map ``x @ weight.T``; ``weight`` is ``(outputs, inputs)``."""
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = weight
    linear.freeze()
    return linear


def packed(linear: nn.Module, bits: int = 8) -> nn.Module:
    """The same map in ``bits`` bits a weight, or as it is where its inputs do not make groups."""
    if isinstance(linear, nn.QuantizedLinear):
        weight = mx.dequantize(
            linear.weight,
            linear.scales,
            linear.get("biases"),
            linear.group_size,
            linear.bits,
            mode=linear.mode,
        )
    else:
        weight = linear.weight
    if weight.shape[1] % GROUP:
        return linear
    result = nn.QuantizedLinear.from_linear(plain(weight), GROUP, bits)
    mx.eval(result.parameters())
    result.freeze()
    return result
