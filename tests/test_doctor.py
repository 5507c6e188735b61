"""The doctor answers whatever is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_specstream import accelerate, doctor, embedded, shipped
from mlx_specstream.accelerate import Status

ROOT = Path(doctor.__file__).parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path))
    return tmp_path


def run(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlx_specstream.doctor", *options],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_prints_a_plain_table():
    done = run()
    assert done.returncode == 0 and done.stderr == ""
    assert "\x1b" not in done.stdout
    for name in ("mlx", "mlx-lm", "python", *doctor.ROWS):
        assert any(line.startswith(name) for line in done.stdout.splitlines()), name
    assert "unavailable" not in done.stdout


def test_json_is_one_object_with_every_row():
    rows = json.loads(run("--json").stdout)
    assert {"mlx", "mlx-lm", "numpy", "transformers", "tokenizers", "python"} <= rows.keys()
    assert doctor.ROWS.keys() <= rows.keys()
    assert rows["python"].startswith(f"{sys.version_info.major}.")


def test_a_wrong_option_is_a_usage_error():
    done = run("--none")
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_a_failing_row_spoils_no_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(doctor.ROWS, "device", lambda: str(1 / 0))
    rows = doctor.report()
    assert rows["device"].startswith("unavailable (ZeroDivisionError")
    assert rows["cost curve"] == "not calibrated"


def test_missing_packages_are_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_PACKAGES", ("mlx", "no-such-package"))
    assert doctor.versions()["no-such-package"] == "not installed"


def test_openblas_row_says_why_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(accelerate, "_status", Status(False, None, "mlx.core came first", None))
    assert doctor.openblas() == "not loaded: mlx.core came first"
    monkeypatch.setattr(accelerate, "_status", Status(True, "/x.so", "OpenBLAS 0.3", 2))
    assert doctor.openblas() == "loaded, 2 threads: OpenBLAS 0.3 (/x.so)"


@pytest.mark.skipif(sys.platform != "linux", reason="MLX runs a compiler on Linux only")
def test_compiler_row_tells_none_and_a_broken_one(tmp_path: Path):
    none = json.loads(run("--json", PATH="/none", TMPDIR=str(tmp_path)).stdout)
    assert none["compiler"].startswith("no g++")
    program = tmp_path / "g++"
    program.write_text('#!/bin/sh\n[ "$1" = --version ]\n')
    program.chmod(0o755)
    broken = json.loads(run("--json", PATH=str(tmp_path), TMPDIR=str(tmp_path)).stdout)
    assert broken["compiler"].startswith("fails")


def test_streams_and_cost_curves_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "package" / "shipped.py"))
    assert doctor.streams() == "none found"
    for name in ("complete", "without-weights"):
        folder = tmp_path / "weights" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    (tmp_path / "weights" / "complete" / "streams.safetensors").touch()
    assert doctor.streams() == str(tmp_path / "weights" / "complete")

    assert doctor.cost_curve() == "not calibrated"
    curve = embedded.cache_dir() / "cost-curves" / "m4.json"
    curve.parent.mkdir()
    curve.touch()
    assert doctor.cost_curve() == str(curve)
