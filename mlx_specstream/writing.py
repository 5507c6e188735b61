"""Files that are written whole or not at all, and known to be writable before the work begins."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import SpecStreamError


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written after all the measuring; its folder is made.

    Raises:
        SpecStreamError: If it could not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
    except OSError as error:
        raise SpecStreamError(f"cannot write {path}: {error.strerror or error}") from error


def sync(path: Path) -> None:
    """Have a file or folder on the disk: what is renamed after it is there after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path to write to; the file takes its place at the end, or stays as it was.

    Raises:
        SpecStreamError: If it cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as work:
            yield Path(work) / path.name
            os.replace(Path(work) / path.name, path)
    except OSError as error:
        raise SpecStreamError(f"cannot write {path}: {error.strerror or error}") from error
