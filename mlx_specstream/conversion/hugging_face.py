"""A checkpoint folder as Hugging Face has it into one as mlx-lm has it."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_specstream.errors import SpecStreamError

from . import quantization, source, weights


def convert(
    checkpoint: Path,
    folder: Path,
    storage: quantization.Storage,
    progress: Callable[[int, int], None],
    *,
    hub_id: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Write ``folder`` from a checkpoint, one tensor in memory at a time.

    Args:
        checkpoint: Folder with ``config.json``, ``model*.safetensors`` and a tokenizer.
        folder: An existing, empty folder.
        storage: What the weights become.
        progress: Called with the bytes written and all that will be.
        hub_id: Where the checkpoint came from, for the model card.
        trust_remote_code: Run Python files of the checkpoint's.

    Returns:
        A line on the result: parameters, size, bits a weight.

    Raises:
        SpecStreamError: The checkpoint is incomplete, damaged or not supported.
        OSError: The folder cannot be written.
    """
    source.check(checkpoint, trust_remote_code)
    model, tokenizer, config = _load(checkpoint, trust_remote_code)
    if warning := source.check_tokenizer(tokenizer, model):
        print(f"warning: {warning}", file=sys.stderr)
    model, config, rounded = quantization.apply(storage, model, config)
    total = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    done = 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    has_vision = "vision_tower" in getattr(model, "model", {})
    parameters, size = weights.save(folder, model, rounded, report)
    # mlx-lm before 0.32 has no such models and no such argument.
    options = {"keep_vision_config": True} if has_vision else {}
    mlx_lm_utils.save_config(config, folder / "config.json", **options)
    tokenizer.save_pretrained(folder)
    for pattern in ("*.py", "generation_config.json"):
        for file in checkpoint.glob(pattern):
            shutil.copy(file, folder)
    _write_card(folder, hub_id)
    per_weight = 8 * size / max(1, parameters)
    return f"{parameters / 1e6:,.1f} M parameters, {size / 1e6:,.1f} MB, {per_weight:.2f} bits each"


def _load(
    checkpoint: Path, trust_remote_code: bool
) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    takes = inspect.signature(mlx_lm_utils.load_model).parameters
    # mlx-lm before 0.32 runs a checkpoint's Python files unasked; `source.check` has asked.
    options = {"trust_remote_code": trust_remote_code} if "trust_remote_code" in takes else {}
    try:
        model, config = mlx_lm_utils.load_model(checkpoint, lazy=True, **options)
    except Exception as error:  # whatever a checkpoint that is not what it says makes mlx-lm raise
        raise SpecStreamError(f"cannot load {checkpoint}: {_short(error)}") from error
    try:
        tokenizer = mlx_lm_utils.load_tokenizer(
            checkpoint,
            {"trust_remote_code": trust_remote_code},
            eos_token_ids=config.get("eos_token_id"),
        )
    except Exception as error:  # likewise, of tokenizers and transformers
        raise SpecStreamError(f"{checkpoint} has no usable tokenizer: {_short(error)}") from error
    return model, tokenizer, config


def _short(error: Exception) -> str:
    """An error's message, without the list of a thousand names that mlx-lm may add."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else f"{text[:200]}…"


def _write_card(folder: Path, hub_id: str | None) -> None:
    """``README.md``: the source's own card says the licence; where there is none, a bare one."""
    try:
        mlx_lm_utils.create_model_card(folder, hub_id)
    except Exception:  # noqa: BLE001  no card on the hub, or no hub: no reason to lose the model
        mlx_lm_utils.create_model_card(folder, None)
