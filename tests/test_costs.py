"""Cost curves: what is read off them, how they are kept, and how they are measured."""

from __future__ import annotations

import json

import pytest
from tiny import target_of

from mlx_specstream import SpecStreamError, calibration
from mlx_specstream.decode import calibrate
from mlx_specstream.decode.calibrate import Wanted, measure, trees_of, wanted
from mlx_specstream.decode.costs import CostCurve, Point
from mlx_specstream.decode.loop import Decoder
from mlx_specstream.decode.plan import TreePlan
from mlx_specstream.decode.proposers import NgramLookup

POINTS = [
    Point(1, 100, False, 10.0), Point(5, 100, False, 12.0), Point(9, 100, False, 16.0),
    Point(5, 100, True, 15.0), Point(1, 1100, False, 11.0), Point(9, 1100, False, 21.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "context", "streams", "seconds"),
    [
        (1, 100, False, 10.0),
        (3, 100, False, 11.0),  # between two rows
        (11, 100, False, 18.0),  # beyond the last, as before
        (1, 600, False, 10.5),  # between two contexts
        (9, 1100, False, 21.0),
        (5, 100, True, 15.0),
        (9, 100, True, 19.0),  # streams add the same to every tree, as far as is known
        (1, 0, False, 10.0),  # nearer than the nearest
    ],
)
def test_costs_between_those_measured_lie_on_a_line(rows, context, streams, seconds):
    assert CostCurve(POINTS).seconds(rows, context, streams) == pytest.approx(seconds)


def test_a_tree_costs_what_its_rows_and_streams_do():
    curve = CostCurve(POINTS)
    assert curve.of(TreePlan.parse("ngram:4"), 100) == pytest.approx(12.0)
    assert curve.of(TreePlan.parse("ngram:2,streams:2"), 100) == pytest.approx(15.0)
    assert curve.ratio(TreePlan.parse("ngram:8"), 100) == pytest.approx(1.6)


def test_one_row_measured_far_off_moves_all_rows():
    curve = CostCurve([*POINTS[:4], Point(1, 1100, False, 14.0)])
    assert curve.seconds(9, 1100) == pytest.approx(20.0)


def test_streams_measured_to_be_free_are_free_and_never_a_gain():
    curve = CostCurve([*POINTS[:3], Point(5, 100, True, 11.0)])
    assert curve.seconds(5, 100, True) == curve.seconds(5, 100)


def test_rows_that_nobody_measured_are_taken_to_cost_a_pass_each():
    curve = CostCurve([Point(1, 10, False, 2.0)])
    assert curve.ratio(TreePlan.parse("ngram:3")) == 4.0


def test_no_tree_is_cheaper_than_a_plain_pass():
    curve = CostCurve([Point(1, 10, False, 2.0), Point(4, 10, False, 1.0)])
    assert curve.ratio(TreePlan.parse("ngram:3")) == 1.0


def test_streams_that_nobody_measured_are_taken_to_be_free():
    curve = CostCurve(POINTS[:3])
    assert curve.seconds(5, 100, True) == curve.seconds(5, 100)


def test_published_ratios_make_a_curve():
    curve = CostCurve.from_ratios({1: 1.0, 4: 1.3}, 0.02, streams=0.2, source="a paper")
    assert curve.seconds(4) == pytest.approx(0.026)
    assert curve.seconds(4, streams=True) == pytest.approx(0.030)
    assert curve.about == {"source": "a paper"}


@pytest.mark.parametrize(
    "points", [[], [Point(2, 1, False, 1.0)], [Point(1, 1, True, 1.0)], [Point(1, 1, False, 0.0)]]
)
def test_points_that_say_too_little_are_refused(points):
    with pytest.raises(ValueError, match="cost"):
        CostCurve(points)


def test_a_curve_is_kept_in_a_file(tmp_path):
    file = tmp_path / "curve.json"
    CostCurve(POINTS, {"device": "test"}).save(file)
    again = CostCurve.load(file)
    assert (again.points, again.about) == (sorted(POINTS), {"device": "test"})


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"points": []}', '{"points": [{}], "about": {}}',
             '{"points": [{"rows": 1, "context": 1, "streams": false, "seconds": "x"}], '
             '"about": {}}']
)  # fmt: skip
def test_a_file_that_is_no_curve_is_refused_in_a_line(tmp_path, text):
    (tmp_path / "curve.json").write_text(text)
    with pytest.raises(SpecStreamError, match="is not a cost curve"):
        CostCurve.load(tmp_path / "curve.json")


# Measuring --------------------------------------------------------------------------------------


def place_of(decoder: Decoder):
    return calibration.place_of(calibration.machine_of(decoder))


def decoder_of(name: str = "grouped") -> Decoder:
    return Decoder(target_of(name), [NgramLookup(2, 4)])


def test_the_most_telling_passes_come_first_and_none_is_beyond_the_context():
    every = wanted(streams=True)
    assert every[:4] == [
        Wanted(1, 100, False), Wanted(2, 100, False), Wanted(8, 100, False), Wanted(8, 100, True)
    ]  # fmt: skip
    assert len(set(every)) == len(every)
    assert {w.rows for w in every if not w.streams and w.context == 100} == set(range(1, 17))
    assert {w.context for w in wanted(streams=False, most_context=512)} == {100}
    assert {w.context for w in wanted(streams=False, most_context=60)} == {30}
    assert wanted(streams=True, most_context=4) == [Wanted(1, 2, False)]


def test_each_pass_to_measure_gets_a_tree_of_its_rows():
    rates = ((0.5, 0.2), (0.4, 0.1))
    for want, plan in trees_of(wanted(streams=True), "ngram", rates):
        assert len(plan.layout) == want.rows
        assert ("streams" in plan.proposers) == want.streams
    assert [want.rows for want, _ in trees_of(wanted(streams=False), "", None)] == [1, 1]


def test_a_budget_that_is_spent_still_gives_a_curve():
    decoder = decoder_of()
    plans = trees_of(wanted(streams=False), "ngram", None)
    points = measure(decoder, plans, budget=0.0)
    assert len(points) == calibrate.NEEDED
    CostCurve(points)
    seen = []
    more = measure(decoder, plans[:5], points, progress=seen.append)
    assert more[: len(points)] == points
    assert len(more) == 5
    assert more[len(points) :] == seen


def test_where_the_second_row_costs_as_much_as_the_first_nobody_waits_for_more(monkeypatch):
    slow = {1: 1.0, 2: 1.9}
    monkeypatch.setattr(
        calibrate, "seconds_of_pass", lambda decoder, plan, context: slow[len(plan.layout)]
    )
    points = measure(decoder_of(), trees_of(wanted(streams=False), "ngram", None))
    assert [point.rows for point in points] == [1, 2]


def test_a_pass_that_was_disturbed_is_put_right_by_a_later_start(monkeypatch):
    plans = trees_of(wanted(streams=False), "ngram", None)
    disturbed = [Point(*want, 5.0 if want.rows > 1 else 1.0) for want, _ in plans]
    monkeypatch.setattr(calibrate, "seconds_of_pass", lambda decoder, plan, context: 2.0)
    points = measure(decoder_of(), plans, disturbed, budget=0.5)
    assert {point.seconds for point in points if point.rows == 1} == {1.0}  # the shorter one stays
    assert {point.seconds for point in points if point.rows > 1} == {2.0}


def test_what_is_missing_is_added_by_later_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path))
    decoder = decoder_of()
    first = calibration.costs_of(decoder, budget=0.0)
    (file,) = (tmp_path / "cost-curves").glob("*.json")
    kept = json.loads(file.read_text())
    assert len(kept["points"]) == calibrate.NEEDED
    assert kept["about"]["mlx"]
    whole = calibration.costs_of(decoder)
    assert len(whole.points) == len(wanted(streams=False, most_context=decoder.target.context))
    assert set(first.points) < set(whole.points)
    later = calibration.costs_of(decoder, budget=0.0)
    assert [p[:3] for p in later.points] == [p[:3] for p in whole.points]
    assert all(a.seconds <= b.seconds for a, b in zip(later.points, whole.points, strict=True))
    again = calibration.costs_of(decoder, budget=0.0, again=True)
    assert len(again.points) == calibrate.NEEDED


def test_another_form_of_the_target_has_a_curve_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path))
    packed, traced = Decoder(target_of("quantized"), [NgramLookup(2, 4)]), decoder_of()
    traced.compile = True
    places = {place_of(d) for d in (decoder_of(), packed, traced)}
    assert len(places) == 3


def test_a_broken_or_unwritable_cache_does_no_harm(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path))
    decoder = decoder_of()
    place = place_of(decoder)
    place.parent.mkdir(parents=True)
    place.write_text("half a fi")
    assert len(calibration.costs_of(decoder, budget=0.0).points) == calibrate.NEEDED
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder")
    assert len(calibration.costs_of(decoder, budget=0.0).points) == calibrate.NEEDED


def test_a_cache_that_may_not_be_searched_does_no_harm(tmp_path, monkeypatch):
    def refused(decoder):
        raise PermissionError(13, "no")

    monkeypatch.setattr(calibration, "place_of", refused)
    assert len(calibration.costs_of(decoder_of(), budget=0.0).points) == calibrate.NEEDED


def test_measuring_leaves_no_trace_in_what_is_decoded():
    from tiny import decoded, text_of

    target, prompt = target_of("grouped"), text_of(12)
    plain = decoded(target, prompt, 30, "none")
    measure(decoder_of(), trees_of(wanted(False), "ngram", None)[:6])
    assert decoded(target, prompt, 30, "none") == plain
