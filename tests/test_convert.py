"""Converting checkpoints: the result is mlx-lm's own to the byte, and loads."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm import convert as mlx_lm_convert
from mlx_lm import utils as mlx_lm_utils
from tiny_checkpoint import INDEX, all_weights, convert, same_bits, write_checkpoint

import mlx_specstream
from mlx_specstream.conversion import weights as weights_module


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_those_of_the_checkpoint(tmp_path, monkeypatch, shards: int, dtype: str):
    values = write_checkpoint(tmp_path / "hf", shards=shards, dtype=dtype)
    convert(monkeypatch, "--hf-path", tmp_path / "hf", "--mlx-path", tmp_path / "mlx")

    model, tokenizer = mlx_lm_utils.load(str(tmp_path / "mlx"))
    loaded = dict(tree_flatten(model.parameters()))
    assert loaded.keys() == values.keys()
    for name, array in loaded.items():
        assert array.dtype == getattr(mx, dtype)
        np.testing.assert_array_equal(np.array(array.astype(mx.float32)), values[name])
    assert tokenizer.encode("w7 w99 w3") == [7, 99, 3]
    assert tokenizer.eos_token_ids == {2, 5}

    ours, _ = mlx_specstream.load(tmp_path / "mlx")
    for name, array in tree_flatten(ours.parameters()):
        np.testing.assert_array_equal(np.array(array.astype(mx.float32)), values[name])


@pytest.mark.parametrize(
    ("flags", "keywords"),
    [
        ([], {}),
        (["--dtype", "float16"], {"dtype": "float16"}),
        (["-q", "--q-group-size", 64], {"quantize": True, "q_group_size": 64}),
        *(
            (
                ["-q", "--q-bits", bits, "--q-group-size", 32],
                {"quantize": True, "q_bits": bits, "q_group_size": 32},
            )
            for bits in (2, 3, 4, 5, 6, 8)
        ),
        *(
            (["-q", "--q-mode", mode], {"quantize": True, "q_mode": mode})
            for mode in ("mxfp4", "nvfp4", "mxfp8")
        ),
        *(
            (
                ["-q", "--q-group-size", 32, "--quant-predicate", recipe],
                {"quantize": True, "q_group_size": 32, "quant_predicate": recipe},
            )
            for recipe in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_result_is_mlx_lms_own(tmp_path: Path, monkeypatch, flags: list, keywords: dict):
    write_checkpoint(tmp_path / "hf", shards=2, dtype="bfloat16", num_hidden_layers=9)
    convert(monkeypatch, "--hf-path", tmp_path / "hf", "--mlx-path", tmp_path / "ours", *flags)
    mlx_lm_convert(str(tmp_path / "hf"), str(tmp_path / "theirs"), **keywords)
    assert_same_folders(tmp_path / "ours", tmp_path / "theirs")


def test_dequantizing_is_mlx_lms_own(tmp_path: Path, monkeypatch):
    write_checkpoint(tmp_path / "hf")
    for target in ("small", "ours"):
        source = {"small": "hf", "ours": "small"}[target]
        flag = {"small": "-q", "ours": "-d"}[target]
        convert(monkeypatch, "--hf-path", tmp_path / source, "--mlx-path", tmp_path / target, flag)
    mlx_lm_convert(str(tmp_path / "small"), str(tmp_path / "theirs"), dequantize=True)
    assert_same_folders(tmp_path / "ours", tmp_path / "theirs")
    assert "quantization" not in json.loads((tmp_path / "ours/config.json").read_text())


def test_quantized_model_loads_with_ours(tmp_path: Path, monkeypatch):
    write_checkpoint(tmp_path / "hf")
    convert(monkeypatch, "--hf-path", tmp_path / "hf", "--mlx-path", tmp_path / "mlx", "-q")
    model, _ = mlx_specstream.load(tmp_path / "mlx", dequantize=False)
    reference, _ = mlx_lm_utils.load_model(tmp_path / "mlx")
    prompt = mx.array([[1, 7, 42, 8]])
    np.testing.assert_array_equal(np.array(model(prompt)), np.array(reference(prompt)))


def test_large_models_are_cut_into_numbered_files(tmp_path: Path, monkeypatch):
    values = write_checkpoint(tmp_path / "hf")
    shards = []

    def small_shards(arrays: dict) -> list:
        names = list(arrays)
        shards.extend({n: arrays[n] for n in names[i : i + 10]} for i in range(0, len(names), 10))
        return list(shards)

    monkeypatch.setattr(weights_module, "make_shards", small_shards)
    convert(monkeypatch, "--hf-path", tmp_path / "hf", "--mlx-path", tmp_path / "mlx")
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert sorted(path.name for path in (tmp_path / "mlx").glob("*.safetensors")) == names
    index = json.loads((tmp_path / "mlx" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in values.values())
    for name, file in index["weight_map"].items():
        held = mx.load(str(tmp_path / "mlx" / file))
        np.testing.assert_array_equal(np.array(held[name]), values[name])
    mlx_lm_utils.load_model(tmp_path / "mlx")


@pytest.mark.parametrize("flags", [[], ["-q"], ["--dtype", "float16"]], ids=str)
def test_memory_stays_far_below_the_models_size(tmp_path: Path, monkeypatch, flags: list):
    layers = {"num_hidden_layers": 60, "hidden_size": 128, "intermediate_size": 256}
    values = write_checkpoint(tmp_path / "hf", shards=2, **layers)
    size = sum(value.nbytes for value in values.values())
    largest = max(value.nbytes for value in values.values())
    assert size > 200 * largest
    del values
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(monkeypatch, "--hf-path", tmp_path / "hf", "--mlx-path", tmp_path / "mlx", *flags)
    assert mx.get_peak_memory() - before < min(8 * largest, size / 20)


def assert_same_folders(ours: Path, expected: Path) -> None:
    """Same files; same bytes in all but the weights, whose order in a file is free."""
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in ours.iterdir()) == names
    for name in names:
        if not name.endswith(".safetensors"):
            assert (ours / name).read_bytes() == (expected / name).read_bytes(), name
    weights, reference = all_weights(ours), all_weights(expected)
    assert weights.keys() == reference.keys()
    for name, array in weights.items():
        assert same_bits(array, reference[name]), name
