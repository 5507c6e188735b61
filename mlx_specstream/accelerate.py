"""Loads OpenBLAS on Linux, so that MLX's CPU matrix products run 25-80 times faster.

The ``mlx[cpu]`` wheel links the reference BLAS. Symbols of a library that is loaded earlier with
global visibility win over it, so :func:`load_openblas` must run before ``mlx.core`` is imported;
the package's ``__init__`` sees to that. This file therefore imports nothing of MLX.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

# The x86-64 build in the cmeel-openblas wheel is made for one processor family (SKYLAKEX) and
# does not choose its kernels at run time: elsewhere it dies by an illegal instruction.
_SKYLAKEX_FLAGS = frozenset({"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512cd"})
_SONAME = b"libgfortran.so.5"


@dataclass(frozen=True)
class Status:
    """What came of :func:`load_openblas`.

    Attributes:
        loaded: Whether MLX's products run on OpenBLAS.
        library: Path of the loaded library.
        detail: OpenBLAS's own configuration line, or why it is not loaded.
        threads: How many threads it will use.
    """

    loaded: bool
    library: str | None
    detail: str
    threads: int | None


_NOT_TRIED = Status(False, None, "not tried in this process", None)
_status = _NOT_TRIED


def status() -> Status:
    """The outcome of the first :func:`load_openblas` in this process."""
    return _status


def load_openblas() -> Status:
    """Load OpenBLAS (the cmeel-openblas wheel's, else the system's) for MLX to use.

    Never raises: whatever goes wrong is told by the returned status. A second call does nothing.
    """
    global _status
    if _status is _NOT_TRIED:
        try:
            _status = _load()
        except Exception as error:  # noqa: BLE001  a slow BLAS is better than no start
            _status = _skipped(f"{type(error).__name__}: {error}")
    return _status


def _load() -> Status:
    if sys.platform != "linux":
        return _skipped("not needed: only MLX on Linux lacks a fast BLAS")
    if os.environ.get("MLX_SPECSTREAM_NO_OPENBLAS", "0") not in ("", "0"):
        return _skipped("turned off by MLX_SPECSTREAM_NO_OPENBLAS")
    if "mlx.core" in sys.modules:
        return _skipped("mlx.core was imported first; import mlx_specstream before it")
    reasons = []
    for attempt in (_load_wheel, _load_system):
        try:
            return _describe(attempt())
        except OSError as error:
            reasons.append(str(error))
    return _skipped("; ".join(reasons))


def _skipped(reason: str) -> Status:
    return Status(False, None, reason, None)


def _load_wheel() -> ctypes.CDLL:
    """The wheel's OpenBLAS; raises OSError when it is absent or cannot run here."""
    library = _find_in_site_packages("cmeel.prefix/lib/libopenblas.so.0")
    if library is None:
        raise OSError("the cmeel-openblas wheel is not installed")
    if platform.machine() == "x86_64":
        missing = missing_cpu_flags(Path("/proc/cpuinfo").read_text())
        if missing:
            raise OSError(f"cmeel-openblas needs a processor with {', '.join(missing)}")
    try:
        return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if _SONAME.decode() not in str(error):
            raise
    _preload_fortran_runtime()
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _load_system() -> ctypes.CDLL:
    return ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)


def missing_cpu_flags(cpuinfo: str) -> list[str]:
    """Instruction sets that the wheel's OpenBLAS needs and ``/proc/cpuinfo``'s text lacks."""
    lines = (line for line in cpuinfo.splitlines() if line.startswith("flags"))
    flags = next(lines, "flags :").partition(":")[2].split()
    return sorted(_SKYLAKEX_FLAGS.difference(flags))


def _preload_fortran_runtime() -> None:
    """Provide ``libgfortran.so.5`` (OpenBLAS needs it, a bare machine lacks it) from MLX's wheel.

    The copy in ``mlx_cpu.libs`` carries a name made unique by auditwheel, which the dynamic linker
    does not take for ``libgfortran.so.5``. An in-memory copy gets the plain name back, and as a
    library of that name is then loaded, OpenBLAS's need is met.
    """
    quadmath = _find_in_site_packages("mlx_cpu.libs/libquadmath-*.so.*")
    fortran = _find_in_site_packages("mlx_cpu.libs/libgfortran-*.so.5*")
    if fortran is None:
        raise OSError("cmeel-openblas needs libgfortran.so.5, which this machine lacks")
    if quadmath is not None:
        ctypes.CDLL(str(quadmath))
    image = rename_soname(fortran.read_bytes(), fortran.name.encode(), _SONAME)
    memory = os.memfd_create("libgfortran")
    try:
        with open(memory, "wb", closefd=False) as file:
            file.write(image)
        ctypes.CDLL(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)  # what is mapped stays mapped


def rename_soname(image: bytes, old: bytes, new: bytes) -> bytes:
    """An ELF image with the string ``old`` overwritten by ``new``, every offset unchanged.

    ``rename_soname(b"..libx-1a2b.so.5\\0..", b"libx-1a2b.so.5", b"libx.so.5")`` gives
    ``b"..libx.so.5\\0\\0\\0\\0\\0\\0.."``. Raises OSError if ``old`` is absent or too short.
    """
    if image.count(old + b"\0") != 1 or len(new) > len(old):
        raise OSError(f"cannot rename {old.decode()}: unexpected contents")
    return image.replace(old + b"\0", new.ljust(len(old) + 1, b"\0"))


def _describe(library: ctypes.CDLL) -> Status:
    try:
        library.cblas_sgemm  # noqa: B018  a build without it would not help MLX
        config, threads = library.openblas_get_config, library.openblas_get_num_threads
    except AttributeError as error:
        raise OSError(f"{library._name} lacks a symbol: {error}") from None
    config.restype = ctypes.c_char_p
    return Status(True, _mapped_path(library._name), config().decode().strip(), int(threads()))


def _mapped_path(name: str) -> str:
    """Where the linker found ``name`` (a bare file name is looked up in the process's map)."""
    if "/" in name:
        return name
    paths = (
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()
    )
    # The name is a link to, say, libopenblasp-r0.3.21.so; Debian's real name has no "libopenblas.".
    return next((path for path in paths if "/libopenblas" in path), name)


def _find_in_site_packages(pattern: str) -> Path | None:
    found = (match for entry in sys.path if entry for match in sorted(Path(entry).glob(pattern)))
    return next(found, None)
