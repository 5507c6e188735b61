"""The command around a conversion: killed, run twice at once, from the hub, to the hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils
from tiny_checkpoint import all_weights, convert, refusal, write_checkpoint

from mlx_specstream.conversion import weights

ROOT = Path(__file__).parent.parent
# A conversion that stops in the middle of the weights, for ever.
STUCK = """
import sys, time
from mlx_specstream.conversion import command, weights
check, seen = weights._check, []
def slow(name, array):
    check(name, array)
    seen.append(name)
    if len(seen) == 5:
        print("halfway", flush=True)
        time.sleep(100)
weights._check = slow
command.main()
"""


@pytest.fixture
def stuck(tmp_path: Path):
    """A process that is halfway into converting ``hf`` into ``out/mlx``."""
    write_checkpoint(tmp_path / "hf")
    options = ("--hf-path", tmp_path / "hf", "--mlx-path", tmp_path / "out" / "mlx")
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "halfway\n"
        yield process
    finally:
        process.kill()
        process.wait()


def test_killed_conversion_leaves_nothing_that_looks_finished(
    tmp_path: Path, stuck, monkeypatch, capsys
):
    out = tmp_path / "out"
    options = ("--hf-path", tmp_path / "hf", "--mlx-path", out / "mlx")
    # While it runs nobody else may convert into the same folder, or remove what it has.
    line = refusal(monkeypatch, capsys, *options)
    assert line == f"another process is converting into {out / 'mlx'}"
    assert stuck.poll() is None

    stuck.send_signal(signal.SIGKILL)
    stuck.wait()
    (left,) = out.iterdir()
    assert left.name.startswith(".mlx.converting-")
    assert not (left / "config.json").exists()

    convert(monkeypatch, *options)
    assert [path.name for path in out.iterdir()] == ["mlx"]
    mlx_lm_utils.load_model(out / "mlx")


def test_interrupted_conversion_cleans_up(tmp_path: Path, stuck):
    stuck.send_signal(signal.SIGINT)
    assert stuck.wait() == 130
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_appeared_meanwhile_is_kept(tmp_path: Path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "hf")
    target = tmp_path / "out" / "mlx"
    save = weights.save

    def someone_else(*arguments: object):
        target.mkdir()
        (target / "mine.txt").write_text("mine")
        return save(*arguments)

    monkeypatch.setattr(weights, "save", someone_else)
    with pytest.raises(SystemExit):
        convert(monkeypatch, "--hf-path", tmp_path / "hf", "--mlx-path", target)
    assert "exists already" in capsys.readouterr().err
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    assert [path.name for path in target.parent.iterdir()] == ["mlx"]


def test_the_script_runs(tmp_path: Path):
    write_checkpoint(tmp_path / "hf")
    options = ["--hf-path", "hf", "--mlx-path", "mlx", "-q", "--q-bits", "8"]
    result = subprocess.run(
        [sys.executable, ROOT / "scripts" / "convert.py", *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{tmp_path}/mlx: 0.1 M parameters, 0.2 MB, ")
    assert (tmp_path / "mlx" / "model.safetensors").stat().st_mode & 0o777 == 0o644
    assert (tmp_path / "mlx").stat().st_mode & 0o777 == 0o755


def test_progress_is_shown_on_a_terminal(tmp_path: Path, write_tiny_gguf, monkeypatch, capsys):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    convert(monkeypatch, "--gguf", tmp_path / "tiny.gguf", "--mlx-path", tmp_path / "mlx")
    out, err = capsys.readouterr()
    assert "Reading GGUF" in err and "Converting" in err
    assert out.count("\n") == 1


@pytest.fixture
def hub(tmp_path: Path, monkeypatch) -> list[tuple]:
    """A hub that has the model ``someone/tiny`` and takes uploads; what it was asked."""
    write_checkpoint(tmp_path / "hub")
    calls: list[tuple] = []

    class Api:
        def create_repo(self, repo_id: str, exist_ok: bool):
            calls.append(("create", repo_id, exist_ok))

        def upload_large_folder(self, folder_path: str, repo_id: str, repo_type: str):
            if repo_id.startswith("nobody/"):
                raise ConnectionError("403 Forbidden\nand much more")
            names = sorted(path.name for path in Path(folder_path).iterdir())
            calls.append(("upload", repo_id, repo_type, names))

    def card(name: str):
        calls.append(("card", name))
        return huggingface_hub.ModelCard("---\nlicense: mit\n---\nwords")

    load_card = huggingface_hub.ModelCard.load
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(
        huggingface_hub.ModelCard,
        "load",
        lambda name: card(name) if name == "someone/tiny" else load_card(name),
    )
    download = mlx_lm_utils._download

    def fake(name: object, *arguments: object, **keywords: object) -> Path:
        return (
            tmp_path / "hub" if name == "someone/tiny" else download(name, *arguments, **keywords)
        )

    monkeypatch.setattr(mlx_lm_utils, "_download", fake)
    return calls


def test_from_the_hub_and_to_the_hub(tmp_path: Path, hub: list, monkeypatch):
    target = tmp_path / "mlx"
    options = ("--mlx-path", target, "-q", "--upload-repo", "me/tiny-4bit")
    convert(monkeypatch, "--hf-path", "someone/tiny", *options)
    names = sorted(path.name for path in target.iterdir())
    assert hub == [
        ("card", "someone/tiny"),
        ("create", "me/tiny-4bit", True),
        ("upload", "me/tiny-4bit", "model", names),
    ]
    card = (target / "README.md").read_text()
    for line in ("license: mit", "base_model: someone/tiny", 'load("me/tiny-4bit")'):
        assert line in card
    assert "model.safetensors" in names and "tokenizer.json" in names


def test_an_upload_that_fails_keeps_the_folder(tmp_path: Path, hub: list, monkeypatch, capsys):
    target = tmp_path / "mlx"
    with pytest.raises(SystemExit) as end:
        convert(
            monkeypatch,
            "--hf-path",
            "someone/tiny",
            "--mlx-path",
            target,
            "--upload-repo",
            "nobody/x",
        )
    assert end.value.code == 1
    expected = f"error: {target} is complete, but nobody/x did not take it: 403 Forbidden\n"
    assert capsys.readouterr().err == expected
    mlx_lm_utils.load_model(target)


def test_gguf_goes_through_the_same_door(tmp_path: Path, write_tiny_gguf, monkeypatch):
    exact = write_tiny_gguf(tmp_path / "tiny.gguf")
    convert(monkeypatch, "--gguf", tmp_path / "tiny.gguf", "--mlx-path", tmp_path / "as-it-is")
    folder = tmp_path / "as-it-is"
    plain = mlx_lm_utils.dequantize_model(mlx_lm_utils.load_model(folder)[0])
    for name, array in tree_flatten(plain.parameters()):
        np.testing.assert_array_equal(np.array(array), exact[name], err_msg=name)
    assert not list(folder.glob(".*"))

    convert(monkeypatch, "--gguf", tmp_path / "tiny.gguf", "--mlx-path", tmp_path / "full", "-d")
    for name, array in all_weights(tmp_path / "full").items():
        np.testing.assert_array_equal(np.array(array), exact[name], err_msg=name)

    flags = ("-q", "--q-bits", 4, "--q-group-size", 64, "--dtype", "float16")
    convert(monkeypatch, "--gguf", tmp_path / "tiny.gguf", "--mlx-path", tmp_path / "anew", *flags)
    found = all_weights(tmp_path / "anew")
    for name, value in exact.items():
        module = name.removesuffix(".weight")
        if f"{module}.scales" in found:
            half = mx.array(value).astype(mx.float16)
            expected = mx.quantize(half, group_size=64, bits=4)
            parts = [found[f"{module}.{part}"] for part in ("weight", "scales", "biases")]
            assert all(mx.array_equal(a, b) for a, b in zip(parts, expected, strict=True))
    assert len(found) == 3 * 13 + 7  # down_proj has 96 columns
