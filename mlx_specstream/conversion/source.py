"""A checkpoint folder's faults, found before anything is converted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlx_specstream.errors import SpecStreamError

from .safetensors_file import read_header

_INDEX = "model.safetensors.index.json"


def check(folder: Path, trust_remote_code: bool = False) -> None:
    """Refuse a folder that cannot be converted whole.

    Args:
        trust_remote_code: Accept a model whose definition is a Python file in the folder.

    Raises:
        SpecStreamError: ``config.json`` is unusable or names no model_type, a weight file is
            missing or shorter than its header says, or the index names what is not there.
    """
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise SpecStreamError(f"{folder / 'config.json'} names no model_type")
    if config.get("model_file") and not trust_remote_code:
        raise SpecStreamError(
            f"{folder} wants its own {config['model_file']} to be run: "
            "look at it, then use --trust-remote-code"
        )
    files = {path.name: path for path in sorted(folder.glob("model*.safetensors"))}
    weight_map = _weight_map(folder)
    missing = sorted((set(weight_map.values()) | _numbered(files)) - set(files))
    if missing:
        raise SpecStreamError(
            f"{folder} lacks {len(missing)} weight file(s) ({missing[0]}): "
            "download or copy them again"
        )
    if not files:
        raise SpecStreamError(f"{folder} has no weights (model*.safetensors)")
    held = {name: read_header(path).keys() for name, path in files.items()}
    for tensor, file in weight_map.items():
        if tensor not in held[file]:
            raise SpecStreamError(f"{folder / _INDEX} names {tensor} in {file}, which lacks it")


def check_tokenizer(tokenizer: TokenizerWrapper, model: nn.Module) -> str | None:
    """Whether the model has an embedding for every token.

    Only the base vocabulary must fit: some models add markers beyond it that they never embed
    (Gemma 3's image token in its text models).

    Returns:
        A warning, if some added tokens have no embedding.

    Raises:
        SpecStreamError: The base vocabulary is larger than the embedding.
    """
    rows = max(
        (
            module.weight.shape[0]
            for _, module in model.named_modules()
            if isinstance(module, (nn.Embedding, nn.QuantizedEmbedding))
        ),
        default=None,
    )
    if rows is None:
        return None
    if tokenizer.vocab_size > rows:
        raise SpecStreamError(
            f"the tokenizer does not match the model: it has {tokenizer.vocab_size} tokens, "
            f"the embedding {rows} rows"
        )
    beyond = sum(index >= rows for index in tokenizer.get_vocab().values())
    return f"{beyond} added token(s) of the tokenizer have no embedding" if beyond else None


def read_json(path: Path) -> Any:
    """A JSON file's content.

    Raises:
        SpecStreamError: It is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SpecStreamError(f"{path.parent} is no model folder: it has no {path.name}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise SpecStreamError(f"cannot read {path}: {error}") from error


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says; empty without one."""
    path = folder / _INDEX
    if not path.exists():
        return {}
    index = read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise SpecStreamError(f"{path} has no weight_map of tensors and files")
    return weight_map


def _numbered(files: dict[str, Path]) -> set[str]:
    """Every file that those like ``model-00001-of-00003.safetensors`` speak of."""
    names = set()
    for name in files:
        if match := re.fullmatch(r"(model.*-)(\d+)-of-(\d{1,5})\.safetensors", name):
            start, digits, count = match[1], len(match[2]), match[3]
            names |= {
                f"{start}{i:0{digits}}-of-{count}.safetensors" for i in range(1, int(count) + 1)
            }
    return names
