"""``python -m mlx_specstream.train``, killed again and again, ends as if it had not been."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_specstream.training.corpus import Corpus

WORDS = [
    "river",
    "stone",
    "cloud",
    "letter",
    "garden",
    "window",
    "music",
    "winter",
    "bread",
    "story",
]


def command(model: Path, prompts: Path, out: Path) -> list[str]:
    numbers = {
        "steps": 24, "validate-every": 6, "texts": 2, "anchors": 4, "held-out": 3, "layers": 2,
        "rank": 4, "start-rank": 4, "correction-rank": 4, "draft-vocab": 64, "max-tokens": 12,
    }  # fmt: skip
    return [
        sys.executable, "-m", "mlx_specstream.train", "--model", str(model),
        "--prompts", str(prompts), "--out", str(out), "--temps", "0,0.8",
        "--cache", str(out.with_name(out.name + "-trunk")),
        *(part for name, value in numbers.items() for part in (f"--{name}", str(value))),
    ]  # fmt: skip


def whole_files(out: Path) -> None:
    """Whatever has a final name is complete."""
    for file in out.rglob("*.safetensors"):
        if "checkpoint.new" not in file.parts and not file.name.startswith("."):
            load_file(file)
    for file in out.rglob("*.json"):
        if "checkpoint.new" not in file.parts:
            json.loads(file.read_text())
    if (out / "corpus.npz").exists():
        Corpus.load(out / "corpus.npz")


@pytest.mark.parametrize("seed", [1])
def test_a_run_killed_at_any_moment_ends_where_an_unbroken_one_does(
    tiny_model: Path, tmp_path: Path, seed: int
):
    chance = random.Random(seed)
    prompts = tmp_path / "prompts.txt"
    lines = {" ".join(chance.sample(WORDS, 5)) for _ in range(16)}
    prompts.write_text("\n".join(sorted(lines)) + "\n")
    quiet = dict(os.environ, OPENBLAS_NUM_THREADS="1", MLX_SPECSTREAM_CACHE=str(tmp_path / "c"))

    began = time.perf_counter()
    whole = tmp_path / "whole"
    subprocess.run(command(tiny_model, prompts, whole), env=quiet, check=True, capture_output=True)
    took = time.perf_counter() - began

    broken, kills = tmp_path / "broken", 0
    while True:
        run = subprocess.Popen(
            command(tiny_model, prompts, broken),
            env=quiet,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        try:
            # At first while it answers, then ever later.
            _, said = run.communicate(timeout=took * chance.uniform(0.3, 0.6 + 0.2 * kills))
        except subprocess.TimeoutExpired:
            run.kill()
            run.communicate()
            kills += 1
            if broken.exists():
                whole_files(broken)
            continue
        assert run.returncode == 0, said.decode()
        break
    assert kills >= 1
    ours, theirs = (
        load_file(broken / "streams.safetensors"),
        load_file(whole / "streams.safetensors"),
    )
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)
    one, other = Corpus.load(broken / "corpus.npz"), Corpus.load(whole / "corpus.npz")
    assert [t.digest for t in one] == [t.digest for t in other]
