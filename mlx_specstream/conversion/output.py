"""A folder that appears whole, by a rename, or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import SpecStreamError
from ..writing import sync


@contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target`` to write to; it becomes ``target`` at the end.

    A process that is killed leaves the hidden folder, and the next run removes it: whoever works
    in one holds a lock on it, which the kernel frees when the process dies.

    Raises:
        SpecStreamError: ``target`` is there and not empty, another process is making it, or it
            cannot be written.
    """
    try:
        refuse_existing(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        work = Path(tempfile.mkdtemp(dir=target.parent, prefix=_prefix(target)))
        lock = os.open(work, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield work
            work.chmod(0o755)  # mkdtemp makes it private
            for path in (*work.rglob("*"), work):
                sync(path)
            refuse_existing(target)  # hours may have passed
            os.replace(work, target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise SpecStreamError(f"cannot write {target}: {error.strerror or error}") from error


def refuse_existing(target: Path) -> None:
    """Refuse to write over anything.

    Raises:
        SpecStreamError: ``target`` is a file, or a folder with something in it.
    """
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise SpecStreamError(f"{target} exists already: remove it, or choose another --mlx-path")


def _prefix(target: Path) -> str:
    return f".{target.name}.converting-"


def _remove_abandoned(target: Path) -> None:
    for left in target.parent.iterdir():
        if not left.name.startswith(_prefix(target)):
            continue
        lock = os.open(left, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
        except BlockingIOError as error:
            raise SpecStreamError(f"another process is converting into {target}") from error
        finally:
            os.close(lock)
