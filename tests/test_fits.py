"""What fits a Mac: the published figures, the sizes of models, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import TINY

from mlx_specstream import SpecStreamError
from mlx_specstream.benchmarking import simulate_command
from mlx_specstream.benchmarking.chips import DATA, chips, published, published_curve, usable
from mlx_specstream.benchmarking.fits import SCRATCH, fits_of, need_of, predicted_speedups
from mlx_specstream.benchmarking.model_size import (
    SHAPES,
    kv_bytes,
    of_folder,
    of_params,
    parameters,
    weight_bytes,
)
from mlx_specstream.benchmarking.recording import RecordedPrompt, Recording

GIB = 2**30


def recording() -> Recording:
    """Answers that lookups know by heart."""
    count = 40
    lookup = [min(15, count - n) for n in range(count)]
    prompt = RecordedPrompt("a", "k", 9, list(range(count)), lookup, [0] * count, [])
    return Recording("m", 0.0, 0, "ngram", 0, None, True, 0.0, 0.05, [prompt])


# Published figures ------------------------------------------------------------------------------


def test_every_figure_has_an_address_and_makes_sense():
    known = chips()
    assert len({chip.name for chip in known}) == len(known) >= 20
    for chip in known:
        assert chip.source.startswith("https://"), chip.name
        assert 60e9 < chip.bandwidth < 900e9
        assert list(chip.memory) == sorted(chip.memory)
        assert chip.curve is None or chip.curve in published()
    for name, curve in published().items():
        assert curve.source.startswith("https://"), name
        assert curve.costs[1] == 1.0
        assert all(0.9 < cost <= rows for rows, cost in curve.costs.items())
        assert curve.curve(recording()).seconds(4) >= 1.0
    assert [name for name, curve in published().items() if curve.approximate] == ["m1-m2"]
    with pytest.raises(SpecStreamError, match="m4-pro"):
        published_curve("m17")


def test_the_figures_that_everybody_knows():
    by_name = {chip.name: chip for chip in chips()}
    assert by_name["M1"].bandwidth == 68.25e9
    assert by_name["M2 Ultra"].memory == (64, 128, 192)
    assert by_name["M4 Max, 40-core GPU"].bandwidth == 546e9
    assert by_name["M4 Pro"].curve == "m4-pro"


def test_usable_memory_is_two_thirds_and_then_three_quarters():
    assert usable(16) == pytest.approx(16 * GIB * 2 / 3, rel=1e-3)
    assert usable(36) == pytest.approx(36 * GIB * 2 / 3, rel=1e-3)
    assert usable(48) == 36 * GIB


def test_the_figures_go_into_the_wheel():
    project = Path(__file__).parents[1] / "pyproject.toml"
    if not project.is_file():
        pytest.skip("not in a repository")
    assert 'mlx_specstream = ["benchmarking/*.json"]' in project.read_text()
    assert DATA.parent.name == "benchmarking"


# Sizes of models --------------------------------------------------------------------------------


def test_weights_count_the_scales_of_their_groups():
    assert weight_bytes(8e9, 4) == 8e9 * 4.5 / 8
    assert weight_bytes(8e9, 8) == 8e9 * 8.5 / 8
    assert weight_bytes(8e9, 16) == 16e9
    assert kv_bytes(32, 8, 128) == 131072  # Llama-3.1-8B: 128 KiB a token


@pytest.mark.parametrize(("text", "number"), [("8B", 8e9), ("1.7b", 1.7e9), ("135M", 135e6)])
def test_parameters_are_read(text, number):
    assert parameters(text) == number


@pytest.mark.parametrize("text", ["", "8", "B", "0B", "-1B", "8BB", "1e9", "eight"])
def test_what_is_no_number_of_parameters_is_refused(text):
    with pytest.raises(SpecStreamError, match="8B"):
        parameters(text)


def test_shapes_are_those_of_the_nearest_model_unless_given():
    model = of_params("7B", 4)
    assert model.kv_per_token == kv_bytes(*SHAPES[8.03])
    assert "32 layers, 8 key-value heads of 128" in model.stated
    assert of_params("7B", 4, 10, 2, 64).kv_per_token == kv_bytes(10, 2, 64)
    assert of_params("7B", 4, 10, 2, 64).stated == ""
    assert of_params("7B", 4, layers=10).kv_per_token == kv_bytes(10, 8, 128)


@pytest.fixture
def tiny_folder(tmp_path):
    """A tiny model's folder, quantized to 4 bits in groups of 32."""
    model = TINY["quantized"]()
    arrays = dict(tree_flatten(model.parameters()))
    folder = tmp_path / "tiny"
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "quantization": {"bits": 4, "group_size": 32},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder, arrays


def test_a_folder_is_measured_without_loading_it(tiny_folder):
    folder, arrays = tiny_folder
    model = of_folder(folder, None)
    assert model.weights == sum(array.nbytes for array in arrays.values())
    assert model.kv_per_token == kv_bytes(3, 2, 16)
    plain = dict(tree_flatten(TINY["grouped"]().parameters()))
    count = sum(array.size for array in plain.values())
    assert of_folder(folder, 16).weights == 2 * count
    assert of_folder(folder, 8).weights == weight_bytes(count, 8)


def test_what_is_no_model_folder_is_refused_in_one_line(tmp_path, tiny_folder):
    folder, _ = tiny_folder
    empty = tmp_path / "empty"
    empty.mkdir()
    for place in (tmp_path / "absent", empty):
        with pytest.raises(SpecStreamError, match="cannot read"):
            of_folder(place, None)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(SpecStreamError, match="not a model's folder"):
        of_folder(folder, None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecStreamError, match="no weights"):
        of_folder(folder, None)
    for wrong in ("[]", "{}", "{", '{"num_hidden_layers": "many"}'):
        (folder / "config.json").write_text(wrong)
        with pytest.raises(SpecStreamError, match="not a model's folder"):
            of_folder(folder, None)


# What fits --------------------------------------------------------------------------------------


def test_an_8b_model_by_hand():
    model = of_params("8B", 4)
    need = need_of(model, 4096, recording())
    assert need.weights == 4.5e9
    assert need.kv == 4096 * 131072
    assert need.streams == pytest.approx(0.05 * 4.5e9)
    assert need.total == pytest.approx(4.5e9 + 4096 * 131072 + 0.225e9 + SCRATCH)
    found = {(fit.chip, fit.memory): fit for fit in fits_of(need, {"m4-pro": 1.5})}
    assert not found["M1", 8].fits  # 5.76e9 of 5.73e9
    assert found["M1", 16].fits
    pro = found["M4 Pro", 24]
    assert pro.ceiling == pytest.approx(273e9 / (4.5e9 + 4096 * 131072))
    assert pro.plain == pytest.approx((0.6 * pro.ceiling, 0.85 * pro.ceiling))
    assert pro.streams == pytest.approx((1.5 * pro.plain[0], 1.5 * pro.plain[1]))
    assert found["M4", 16].speedup is found["M4", 16].streams is None


def test_longer_contexts_are_slower_and_larger():
    model = of_params("8B", 4)
    short, long = (need_of(model, context, None) for context in (1000, 100_000))
    assert long.total > short.total + 12e9
    assert fits_of(long, {})[0].ceiling < fits_of(short, {})[0].ceiling
    assert short.streams == 0


def test_speedups_are_predicted_where_costs_are_published():
    speedups = predicted_speedups(recording())
    assert set(speedups) == {"m1-m2", "m3-max", "m4-pro", "m5-max"}
    assert speedups["m1-m2"] == pytest.approx(1.0)
    assert speedups["m5-max"] > 1.5


def test_the_command(tmp_path, capsys, tiny_folder):
    recording().save(tmp_path / "r.json")
    with_recording = ["--recording", str(tmp_path / "r.json")]
    out = ["--json", str(tmp_path / "f.json")]
    simulate_command.main("fits", ["--params", "70B", *with_recording, *out])
    told = capsys.readouterr().out
    assert "PREDICTION, not a measurement" in told
    assert "iogpu.wired_limit_mb" in told
    assert "expect less" not in told
    assert "60% to 85% of the ceiling" in told
    content = json.loads((tmp_path / "f.json").read_text())
    by_place = {(fit["chip"], fit["memory"]): fit for fit in content["fits"]}
    assert not by_place["M4 Pro", 48]["fits"]  # 70 B at 4.5 bits are 39 GB
    assert by_place["M4 Pro", 64]["fits"]
    assert content["bytes"]["weights"] == 70e9 * 4.5 / 8

    simulate_command.main("fits", ["--model", str(tiny_folder[0]), *with_recording, *out])
    assert all(fit["fits"] for fit in json.loads((tmp_path / "f.json").read_text())["fits"])
    told = capsys.readouterr().out
    assert "tiny, as it is" in told
    assert "expect less" in told

    shape = ["--layers", "4", "--hidden", "64", "--heads", "4", "--kv-heads", "2"]
    simulate_command.main("fits", ["--params", "8B", "--bits", "16", *shape, *with_recording, *out])
    content = json.loads((tmp_path / "f.json").read_text())
    assert content["bytes"]["kv"] == 4096 * kv_bytes(4, 2, 16)
    assert content["bytes"]["weights"] == 16e9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --model or --params"),
        (["--params", "8B", "--model", "x"], "either --model or --params"),
        (["--params", "many"], "8B"),
        (["--params", "8B", "--bits", "0"], "whole number"),
        (["--params", "8B", "--bits", "64"], "64"),
        (["--params", "8B", "--hidden", "4096"], "need each other"),
        (["--params", "8B", "--hidden", "10", "--heads", "3"], "divide"),
        (["--model", "x", "--layers", "3"], "shape"),
        (["--model", "x"], "cannot read x"),
        (["--params", "8B", "--recording", "absent"], "cannot read absent"),
    ],
)
def test_wrong_options_end_in_one_line(arguments, words):
    with pytest.raises(SpecStreamError, match=words):
        simulate_command.main("fits", arguments)
