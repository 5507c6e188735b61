"""What a GGUF file says about scaled positions, as ``rope_scaling`` of a configuration."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader

from mlx_specstream.errors import SpecStreamError

from .gguf_metadata import decimal, head_dim, of_model

TENSOR = "rope_freqs.weight"
# Every Llama from 3.1 on; the file holds only what follows from these and the factor.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def scaling(reader: GGUFReader) -> dict[str, Any]:
    """``{"rope_scaling": …}``, or nothing where positions are not scaled.

    Raises:
        SpecStreamError: They are scaled in a way that is not known here.
    """
    kind = of_model(reader, "rope.scaling.type", "none")
    factors = [np.asarray(tensor.data) for tensor in reader.tensors if tensor.name == TENSOR]
    if kind == "linear" and not factors:
        factor = decimal(reader, "rope.scaling.factor", 1.0)
        return {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": factor}}
    if kind != "none":
        raise SpecStreamError(f"the GGUF file scales its rope ({kind}), which is not supported")
    if not factors:
        return {}
    found = _LLAMA3 | {"factor": float(factors[0].max())}
    expected = llama3_factors(found, decimal(reader, "rope.freq_base", 10000.0), head_dim(reader))
    if factors[0].shape != expected.shape or not np.allclose(factors[0], expected, rtol=1e-4):
        raise SpecStreamError(
            "the GGUF file scales its rope in an unknown way, not as Llama 3 does"
        )
    return {"rope_scaling": found}


def llama3_factors(config: dict[str, Any], base: float, dims: int) -> npt.NDArray[np.float64]:
    """By how much Llama 3 lengthens each wave: 1 for short ones, ``factor`` for long ones.

    Returns:
        (dims / 2,), from the shortest wave to the longest.
    """
    wavelengths = 2 * math.pi * base ** (np.arange(0, dims, 2) / dims)
    turns = config["original_max_position_embeddings"] / wavelengths
    low, high = config["low_freq_factor"], config["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / config["factor"] + smooth)
