"""What a GGUF file says about itself, by key."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFReader

from mlx_specstream.errors import SpecStreamError

_REQUIRED = object()


def value(reader: GGUFReader, key: str, default: Any = _REQUIRED) -> Any:
    """A key's contents.

    Raises:
        SpecStreamError: The key is absent and has no default.
    """
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise SpecStreamError(f"the GGUF file lacks {key}")
    return default


def architecture(reader: GGUFReader) -> str:
    """``llama``, ``qwen2``, …: also the first part of the keys that describe its shape."""
    return str(value(reader, "general.architecture", "none"))


def of_model(reader: GGUFReader, key: str, default: Any = _REQUIRED) -> Any:
    """A key of the architecture's own: ``embedding_length`` is ``llama.embedding_length``."""
    return value(reader, f"{architecture(reader)}.{key}", default)


def integer(reader: GGUFReader, key: str) -> int:
    """A count of the architecture's own."""
    return int(of_model(reader, key))


def decimal(reader: GGUFReader, key: str, default: float) -> float:
    """The shortest decimal that is the stored float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(of_model(reader, key, default))))


def heads(reader: GGUFReader) -> tuple[int, int]:
    """Query heads and key-value heads."""
    query = integer(reader, "attention.head_count")
    return query, int(of_model(reader, "attention.head_count_kv", query))


def head_dim(reader: GGUFReader) -> int:
    """Length of a head's vectors."""
    even = integer(reader, "embedding_length") // heads(reader)[0]
    return int(of_model(reader, "attention.key_length", even))
