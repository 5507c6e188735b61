"""How large a model is: from its folder, or estimated from its number of parameters."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecStreamError, UsageError

GROUP = 64  # weights that share a scale and a bias of 16 bits each
KV_BYTES = 2  # of a value in the cache: 16 bits
# Layers, key-value heads and head size of well-known models, by parameters in 10^9.
SHAPES = {
    0.135: (30, 3, 64),  # SmolLM2-135M
    0.36: (32, 5, 64),  # SmolLM2-360M
    1.24: (16, 8, 64),  # Llama-3.2-1B
    1.71: (24, 32, 64),  # SmolLM2-1.7B
    3.21: (28, 8, 128),  # Llama-3.2-3B
    8.03: (32, 8, 128),  # Llama-3.1-8B
    14.8: (40, 8, 128),  # Qwen3-14B
    32.8: (64, 8, 128),  # Qwen3-32B
    70.6: (80, 8, 128),  # Llama-3.3-70B
}


@dataclass(frozen=True)
class ModelSize:
    """What memory and bandwidth a model takes.

    Args:
        name: For people.
        weights: Bytes of its weights, scales and biases of groups included.
        kv_per_token: Bytes of a token's keys and values.
        stated: What was assumed, for people; "" if nothing was.
    """

    name: str
    weights: float
    kv_per_token: int
    stated: str


def weight_bytes(params: float, bits: int) -> float:
    """Bytes of weights at some bits each, with a 16-bit scale and bias for every group of 64.

    Args:
        params: Number of weights.
        bits: Of a weight; from 16 on there are no groups.
    """
    return params * (bits if bits >= 16 else bits + 32 / GROUP) / 8


def kv_bytes(layers: int, kv_heads: int, head_dim: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * layers * kv_heads * head_dim * KV_BYTES


def of_params(
    text: str,
    bits: int,
    layers: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> ModelSize:
    """A model of some parameters; what is not given is that of the model nearest in size.

    Args:
        text: Parameters, such as ``"8B"`` or ``"135M"``.
        bits: Of a weight.
        layers: Number of layers.
        kv_heads: Heads of keys and values.
        head_dim: Size of a head.

    Raises:
        UsageError: If the parameters cannot be read.
    """
    params = parameters(text)
    nearest = min(SHAPES, key=lambda size: max(size * 1e9 / params, params / (size * 1e9)))
    given = (layers, kv_heads, head_dim)
    shape = [own or usual for own, usual in zip(given, SHAPES[nearest], strict=True)]
    stated = ""
    if None in given:
        stated = "{} layers, {} key-value heads of {}".format(*shape)
        stated += f", where not given as in a model of {nearest:g}B"
    name = f"{text} parameters, {bits}-bit"
    return ModelSize(name, weight_bytes(params, bits), kv_bytes(*shape), stated)


def parameters(text: str) -> float:
    """``"8B"`` as a number.

    Raises:
        UsageError: If it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([MB])", text.strip().upper())
    number = float(found[1]) * {"M": 1e6, "B": 1e9}[found[2]] if found else 0.0
    if not number:
        raise UsageError(f"--params takes a number of parameters like 8B or 135M, not '{text}'")
    return number


def of_folder(folder: Path, bits: int | None) -> ModelSize:
    """A model from its folder, without loading it.

    Args:
        folder: As mlx-lm writes it.
        bits: To hold its weights in, or None for as they are.

    Raises:
        SpecStreamError: If it is not a model's folder.
    """
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise ValueError("it has no weights (model*.safetensors)")
        tensors = [tensor for file in files for tensor in headers(file)]
        own = (config.get("quantization") or {}).get("bits")
        if bits is None:
            weights, form = float(sum(nbytes for *_, nbytes in tensors)), "as it is"
        else:
            params = sum(weights_in(name, shape, dtype, own) for name, shape, dtype, _ in tensors)
            weights, form = weight_bytes(params, bits), f"{bits}-bit"
    except OSError as error:
        place = error.filename or folder
        raise SpecStreamError(f"cannot read {place}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise SpecStreamError(f"{folder} is not a model's folder: {error}") from error
    return ModelSize(f"{folder.name}, {form}", weights, kv_bytes(layers, kv_heads, head_dim), "")


def headers(file: Path) -> list[tuple[str, list[int], str, int]]:
    """Name, shape, dtype and bytes of every tensor of a safetensors file.

    Raises:
        ValueError: If it is not such a file.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 0 < length <= file.stat().st_size:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    return [
        (name, t["shape"], t["dtype"], t["data_offsets"][1] - t["data_offsets"][0])
        for name, t in header.items()
    ]


def weights_in(name: str, shape: list[int], dtype: str, bits: int | None) -> int:
    """How many weights a tensor holds; none if it only scales others."""
    if name.endswith((".scales", ".biases")):
        return 0
    count = 1
    for size in shape:
        count *= size
    return count * 32 // bits if dtype == "U32" and bits else count
