"""Loading OpenBLAS: in time, only where it can run, and never in the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_specstream import accelerate

PACKAGE = Path(accelerate.__file__).parent
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="OpenBLAS is for Linux only")
needs_openblas = pytest.mark.skipif(
    not accelerate.status().loaded, reason=f"OpenBLAS: {accelerate.status().detail}"
)

PRODUCT = """
import time
import mlx.core as mx, numpy as np
a, b = mx.random.normal((128, 2048)), mx.random.normal((2048, 2048))
mx.eval(a @ b.T)
seconds = []
for _ in range(3):
    start = time.perf_counter()
    c = a @ b.T
    mx.eval(c)
    seconds.append(time.perf_counter() - start)
exact = np.array(a).astype(np.float64) @ np.array(b).astype(np.float64).T
result = {"seconds": min(seconds), "error": float(abs(np.array(c) - exact).max())}
"""


def in_fresh_python(code: str, **environment: str) -> Any:
    """Run ``code`` next to accelerate.py (so without the package); returns its ``result``."""
    environment = {**os.environ, "MLX_SPECSTREAM_NO_OPENBLAS": "0", **environment}
    script = f"{code}\nimport json; print(json.dumps(result))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=PACKAGE,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


LOAD = "import dataclasses, accelerate\nresult = dataclasses.asdict(accelerate.load_openblas())"


@needs_openblas
def test_loaded_first_it_makes_products_faster_and_they_are_right():
    fast = in_fresh_python(f"import accelerate; accelerate.load_openblas()\n{PRODUCT}")
    slow = in_fresh_python(PRODUCT)
    assert fast["seconds"] < slow["seconds"] / 4
    assert fast["error"] < 1e-3


@needs_openblas
def test_status_tells_what_was_loaded():
    status = in_fresh_python(LOAD)
    assert status["loaded"] and Path(status["library"]).is_file()
    assert "OpenBLAS" in status["detail"] and status["threads"] >= 1


@needs_openblas
def test_openblas_threads_can_be_chosen():
    assert in_fresh_python(LOAD, OPENBLAS_NUM_THREADS="1")["threads"] == 1


@linux_only
def test_after_mlx_core_it_does_nothing_and_says_so():
    status = in_fresh_python(f"import mlx.core\n{LOAD}")
    assert not status["loaded"] and "mlx.core was imported first" in status["detail"]


@linux_only
def test_it_can_be_turned_off():
    status = in_fresh_python(LOAD, MLX_SPECSTREAM_NO_OPENBLAS="1")
    assert not status["loaded"] and "MLX_SPECSTREAM_NO_OPENBLAS" in status["detail"]


def test_elsewhere_it_is_not_needed():
    status = in_fresh_python(f"import sys; sys.platform = 'darwin'\n{LOAD}")
    assert not status["loaded"] and "not needed" in status["detail"]


def test_a_second_call_changes_nothing():
    first = accelerate.status()
    assert accelerate.load_openblas() is first is accelerate.status()


@linux_only
def test_it_does_not_import_mlx_or_numpy():
    code = f"{LOAD}\nimport sys\nresult = [m for m in ('mlx', 'numpy') if m in sys.modules]"
    assert in_fresh_python(code) == []


@linux_only
def test_without_any_openblas_it_tells_both_reasons(tmp_path: Path):
    # An unreadable stand-in hides a library that the system may have.
    (tmp_path / "libopenblas.so.0").write_text("")
    code = f"import accelerate\naccelerate._find_in_site_packages = lambda pattern: None\n{LOAD}"
    status = in_fresh_python(code, LD_LIBRARY_PATH=str(tmp_path))
    assert not status["loaded"]
    assert "cmeel-openblas wheel is not installed" in status["detail"]
    assert "libopenblas.so.0" in status["detail"]


@linux_only
def test_an_unexpected_failure_is_a_reason_not_an_error():
    code = f"import accelerate\naccelerate._load = lambda: 1 / 0\n{LOAD}"
    status = in_fresh_python(code)
    assert not status["loaded"] and "ZeroDivisionError" in status["detail"]


@needs_openblas
def test_an_unfit_processor_gets_the_systems_library(tmp_path: Path):
    """The wheel's own library stands in for the system's; its Fortran runtime is loaded first."""
    loaded = in_fresh_python(LOAD)["library"]
    (tmp_path / "libopenblas.so.0").symlink_to(loaded)
    code = (
        "import accelerate\n"
        "accelerate.missing_cpu_flags = lambda cpuinfo: ['avx512f']\n"
        "accelerate._preload_fortran_runtime()\n"
    )
    status = in_fresh_python(code + LOAD, LD_LIBRARY_PATH=str(tmp_path))
    assert status["loaded"] and "libopenblas" in status["library"]


def test_missing_cpu_flags():
    fit = "processor : 0\nflags\t\t: fpu sse2 avx512f avx512dq avx512cd avx512bw avx512vl\n"
    assert accelerate.missing_cpu_flags(fit) == []
    assert accelerate.missing_cpu_flags("flags\t\t: fpu avx2 avx512f avx512bw") == [
        "avx512cd",
        "avx512dq",
        "avx512vl",
    ]
    assert len(accelerate.missing_cpu_flags("")) == 5


def test_rename_soname_keeps_every_offset():
    image = b"\x7fELF..libx-1a2b.so.5\0..rest"
    renamed = accelerate.rename_soname(image, b"libx-1a2b.so.5", b"libx.so.5")
    assert renamed == b"\x7fELF..libx.so.5\0\0\0\0\0\0..rest" and len(renamed) == len(image)
    with pytest.raises(OSError, match="unexpected"):
        accelerate.rename_soname(image, b"liby.so.5", b"y.so")
