"""``python -m mlx_specstream.benchmark calibrate``: what it shows and says."""

from __future__ import annotations

import pytest

from mlx_specstream.benchmarking import calibrate_command
from mlx_specstream.calibration import machine_of, place_of
from mlx_specstream.decode.costs import CostCurve

CURVE = CostCurve.from_ratios({1: 1.0, 2: 1.5, 8: 3.0}, 0.01)


@pytest.fixture
def calibrate(tiny_model, tmp_path, monkeypatch):
    """Runs the command with a cache of its own; told how a measured curve is kept."""
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path / "cache"))

    def run(keep) -> None:
        def costs_of(decoder, *_, **__) -> CostCurve:
            place = place_of(machine_of(decoder))
            keep(place)
            return CURVE

        monkeypatch.setattr(calibrate_command, "costs_of", costs_of)
        out = str(tmp_path / "mine.json")
        calibrate_command.main(["--model", str(tiny_model), "--streams", "none", "--out", out])

    return run


def kept(place) -> None:
    place.parent.mkdir(parents=True)
    CURVE.save(place)


def older(place) -> None:
    place.parent.mkdir(parents=True)
    CostCurve.from_ratios({1: 1.0}, 0.02).save(place)


def damaged(place) -> None:
    place.parent.mkdir(parents=True)
    place.write_text("{")


def test_it_shows_the_curve_and_where_it_is_kept(calibrate, tmp_path, capsys):
    calibrate(kept)
    told = capsys.readouterr().out
    assert "10.0  1.00" in told and "15.0  1.50" in told
    assert "".join(told.split()).endswith(".json") and "kept in " in told
    assert CostCurve.load(tmp_path / "mine.json").points == CURVE.points


@pytest.mark.parametrize("keep", [lambda place: None, older, damaged], ids=["no", "old", "bad"])
def test_it_does_not_say_kept_where_the_curve_is_not(calibrate, capsys, keep):
    calibrate(keep)
    told = capsys.readouterr().out
    assert "not kept: the cache cannot be written" in told
    assert "kept in" not in told
