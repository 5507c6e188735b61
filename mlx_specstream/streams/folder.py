"""A streams folder as a whole: trained heads, an n-gram table, or both.

The heads are ``config.json`` and ``streams.safetensors`` (``files.py``); the table is
``ngram_table.safetensors``, which says itself for which vocabulary and tokenizer it was counted.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..errors import SpecStreamError
from ..target import Target
from .files import CONFIG_FILE, OtherWeights, load_streams, tokenizer_hash
from .heads import StreamHeads
from .ngram_table import NgramTable

TABLE_FILE = "ngram_table.safetensors"


@dataclass(frozen=True)
class StreamSet:
    """What is added to a target.

    Args:
        heads: Stream heads, or None.
        table: An n-gram table of the target's text, or None.
        name: Where it came from, for people.
    """

    heads: StreamHeads | None = None
    table: NgramTable | None = None
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes it adds to the target."""
        heads = 0 if self.heads is None else self.heads.memory_bytes()
        return heads + (0 if self.table is None else self.table.nbytes)


def load_folder(
    folder: str | Path,
    target: Target,
    tokenizer: Any = None,
    other_weights: Callable[[OtherWeights], None] = OtherWeights.warn,
) -> StreamSet:
    """Read what a streams folder holds, to decode with; arguments as for ``files.load_streams``.

    Raises:
        SpecStreamError: If it holds nothing, or something damaged or made for another target.
    """
    folder = Path(folder)
    has_table = (folder / TABLE_FILE).exists()
    table = load_table(folder, target, tokenizer) if has_table else None
    if has_table and not (folder / CONFIG_FILE).exists():
        return StreamSet(table=table, name=folder.name)
    heads = load_streams(folder, target, tokenizer, other_weights).compact()
    return StreamSet(heads, table, folder.name)


def save_table(folder: str | Path, table: NgramTable, vocab_size: int, tokenizer: str) -> None:
    """Write a table into a streams folder: the whole file or nothing.

    Args:
        folder: Made if missing.
        table: The table.
        vocab_size: Of the target.
        tokenizer: Hash of the tokenizer (``files.tokenizer_hash``).

    Raises:
        SpecStreamError: If it cannot be written.
    """
    folder = Path(folder)
    metadata = {"format": "mlx", "vocab_size": str(vocab_size), "tokenizer": tokenizer}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as work:
            file = Path(work) / TABLE_FILE
            arrays = {"marks": table.marks, "chains": table.chains}
            mx.save_safetensors(str(file), arrays, metadata=metadata)
            os.replace(file, folder / TABLE_FILE)
    except (OSError, RuntimeError) as error:
        raise SpecStreamError(f"cannot write the table to {folder}: {error}") from error


def load_table(folder: Path, target: Target, tokenizer: Any = None) -> NgramTable:
    """Read a table for a target.

    Raises:
        SpecStreamError: If it is missing, damaged, or was counted with another tokenizer.
    """
    path = folder / TABLE_FILE
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
        arrays, metadata = loaded
        table = NgramTable(arrays["marks"], arrays["chains"])
        mx.eval(table.marks, table.chains)
        if table.chains.ndim != 3 or table.marks.shape != table.chains.shape[:2]:
            raise ValueError("its arrays do not fit each other")
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise SpecStreamError(f"cannot read {path}: {error}; copy the folder again") from error
    ours = "" if tokenizer is None else tokenizer_hash(tokenizer)
    theirs = metadata.get("tokenizer", "")
    if metadata.get("vocab_size") != str(target.vocab_size):
        raise SpecStreamError(f"{path} was counted for another vocabulary")
    if ours and theirs and ours != theirs:
        raise SpecStreamError(f"{path} was counted with another tokenizer")
    return table
