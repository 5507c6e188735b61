"""Loading a target: a local mlx-lm folder, a hub id, or the embedded default model."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from . import embedded
from .errors import SpecStreamError, UsageError
from .target.families import adapter_for, model_classes

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    """How a model was loaded: for first lines and bug reports.

    Args:
        name: Folder name or hub id.
        bits: Bits of the checkpoint's quantization, or None.
        dequantized: Whether quantized matrices were expanded.
        dtype: What it computes in.
        nbytes: Bytes of its weights in memory.
    """

    name: str
    bits: int | None
    dequantized: bool
    dtype: str
    nbytes: int

    def __str__(self) -> str:
        form = f"{self.bits}-bit" if self.bits else self.dtype
        if self.bits and self.dequantized:
            form += f" as {self.dtype}"
        return f"{self.name} · {form} · {self.nbytes / 1e6:,.0f} MB"


def load(
    path_or_hf_repo: str | Path | None = None,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    dtype: str | None = None,
    dequantize: bool | None = None,
    progress: bool = True,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Load a model and its tokenizer.

    Args:
        path_or_hf_repo: A folder as mlx-lm writes it, a hub id, or None for the embedded
            default model.
        tokenizer_config: Extra arguments for the tokenizer.
        adapter_path: LoRA adapters as mlx-lm trains them.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"``; by default float32 on the CPU and
            the checkpoint's own elsewhere.
        dequantize: Expand quantized matrices to ``dtype``: more memory, and in float32 the same
            values and text. By default only on the CPU, where that is faster, and if it fits.
        progress: Show progress on stderr when the default model is made.

    Returns:
        The mlx-lm model and tokenizer, as ``mlx_lm.load`` returns them.

    Raises:
        SpecStreamError: If anything is missing, damaged or not supported.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype '{dtype}' is not one of {', '.join(DTYPES)}")
    if path_or_hf_repo is None:
        folder = embedded.default_model_path(progress)
    else:
        folder = resolve(str(path_or_hf_repo))
    config = check_folder(folder)
    on_cpu = mx.default_device() == mx.cpu
    if adapter_for(config).sparse and on_cpu and dtype not in (None, "float32"):
        raise SpecStreamError(
            f"MLX computes mixtures of experts on the CPU in float32 only, not in {dtype}"
        )
    try:
        model, config = mlx_lm_utils.load_model(folder, lazy=True, get_model_classes=model_classes)
        if adapter_path is not None:
            model = mlx_lm_utils.load_adapters(model, adapter_path)
            model.eval()
    except Exception as error:  # whatever a damaged file makes mlx-lm raise
        raise SpecStreamError(
            f"cannot load {adapter_path or folder}: {_first_line(error)}"
        ) from error

    compute = DTYPES[dtype] if dtype else (mx.float32 if on_cpu else None)
    bits = (config.get("quantization") or {}).get("bits")
    if dequantize is None:
        # With OpenBLAS or without, in any dtype: MLX's quantized CPU kernels are the slower ones.
        dequantize = bool(bits) and on_cpu and _fits(expanded_bytes(model))
    if dequantize and bits:
        if compute is not None:
            model.set_dtype(mx.float32)  # else scales are rounded before the values made of them
        model = mlx_lm_utils.dequantize_model(model)
    if compute is not None:
        model.set_dtype(compute)
    try:
        mx.eval(model.parameters())
        tokenizer = mlx_lm_utils.load_tokenizer(
            folder, tokenizer_config, eos_token_ids=config.get("eos_token_id")
        )
    except Exception as error:  # likewise, of tokenizers and transformers
        raise SpecStreamError(f"cannot load {folder}: {_first_line(error)}") from error
    # Long prompts are refused in our words: no warning of transformers' before that.
    known = getattr(tokenizer, "deprecation_warnings", {})
    known["sequence-length-is-longer-than-the-specified-maximum"] = True
    arrays = [array for _, array in tree_flatten(model.parameters())]
    computes_in = str(compute or arrays[-1].dtype).removeprefix("mlx.core.")
    model._specstream_loaded = LoadedModel(
        name=str(path_or_hf_repo or embedded.NAME),
        bits=bits,
        dequantized=bool(dequantize and bits),
        dtype=computes_in,
        nbytes=sum(array.nbytes for array in arrays),
    )
    return model, tokenizer


def description(model: nn.Module) -> str:
    """One line on how a model was loaded."""
    return str(getattr(model, "_specstream_loaded", type(model).__name__))


def resolve(name: str) -> Path:
    """A model's folder: as given, or fetched from the hub.

    Raises:
        SpecStreamError: If there is no such folder and the hub has no such model either.
    """
    path = Path(os.path.expanduser(name))  # Path.expanduser raises where there is no such user
    if path.exists():
        return path
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local:
        raise SpecStreamError(f"there is no model folder {name} (and it is not a hub id like a/b)")
    try:
        return Path(mlx_lm_utils._download(name))
    except Exception as error:
        raise SpecStreamError(
            f"'{name}' is no folder here and could not be fetched from the hub: "
            f"{_first_line(error)}"
        ) from error


def check_folder(folder: Path) -> dict[str, Any]:
    """Read a model folder's configuration and refuse what cannot load, before it is loaded.

    Returns:
        The configuration.

    Raises:
        SpecStreamError: If ``config.json`` is missing or unusable, the architecture is not
            supported, or weight files are missing.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SpecStreamError(f"{folder} is not a model folder: it has no config.json") from error
    except (OSError, ValueError) as error:
        raise SpecStreamError(f"cannot read {path}: {_first_line(error)}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise SpecStreamError(f"{path} names no model_type")
    adapter_for(config)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            needed = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise SpecStreamError(f"cannot read {index}: {_first_line(error)}") from error
        missing = sorted(name for name in needed if not (folder / name).exists())
        if missing:
            raise SpecStreamError(
                f"{folder} lacks {len(missing)} of {len(needed)} weight files ({missing[0]}): "
                "download or copy them again"
            )
    elif not list(folder.glob("model*.safetensors")):
        raise SpecStreamError(f"{folder} has no weights (model*.safetensors)")
    return config


def expanded_bytes(model: nn.Module) -> int:
    """Bytes of a model's weights if its quantized matrices were float32."""
    total = 0
    for _, module in model.named_modules():
        bits = getattr(module, "bits", None)
        for name, array in module.items():
            if isinstance(array, mx.array) and name not in ("scales", "biases"):
                total += array.size * (32 // bits if bits and name == "weight" else 1) * 4
    return total


def _fits(nbytes: int) -> bool:
    """Whether that much is comfortably available (half of this machine's memory)."""
    if sys.platform == "win32":
        return False
    return nbytes < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _first_line(error: Exception) -> str:
    """The first line of an error's message, for people; what it lists is on the next."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return " ".join(lines[:2]).rstrip(",") if lines[0].endswith(":") else lines[0]
