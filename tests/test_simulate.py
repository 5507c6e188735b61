"""Recording what proposals would have been right, and replaying it by a cost curve."""

from __future__ import annotations

from dataclasses import replace

import pytest
from recorded import COMPARED, COUNT, PROMPT, made_up, repetitive, replayed, table, tiny_recording
from tiny import reports, streams_of, target_of

from mlx_specstream import Sampling, SpecStreamError
from mlx_specstream.benchmarking.chips import published
from mlx_specstream.benchmarking.replay import Clock, RecordedShadow, along, passes
from mlx_specstream.benchmarking.simulation import Outcome, simulate, with_tree
from mlx_specstream.decode.costs import CostCurve
from mlx_specstream.decode.evidence import LookupShadow
from mlx_specstream.decode.plan import Branch, TreePlan
from mlx_specstream.decode.planner import FixedPlanner
from mlx_specstream.decode.promise import Chance
from mlx_specstream.decode.proposers import NgramLookup, StreamProposer, TableProposer

# What is recorded is what decoding does ---------------------------------------------------------


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["linear", "fused", "deferred"])
@pytest.mark.parametrize("tree", ["ngram|table:7", "ngram|table:3,streams:8x2x1", "streams:4x1"])
def test_a_replayed_tree_makes_the_passes_that_decoding_makes(kind, temp, tree):
    recording = tiny_recording(kind, temp)
    target, streams = target_of("grouped"), streams_of("grouped", kind)
    proposers = (NgramLookup(), TableProposer(table()), StreamProposer(streams))
    seen = []

    class Watcher(FixedPlanner):
        def observe(self, plan, report):
            seen.append(report)

    clock, planner = Clock(), Watcher(TreePlan.parse(tree))
    passes(recording, recording.prompts[0], planner, lambda plan, context: 1.0, clock)
    really = reports(target, PROMPT, COUNT, tree, Sampling(temp=temp, seed=5), proposers)
    place = 0
    for simulated, real in zip(seen, really, strict=False):
        if place >= COMPARED:
            break
        assert simulated.tokens == real.tokens, place
        assert simulated.branches == real.branches, place
        place += len(real.tokens)
    assert place >= COMPARED
    assert clock.seconds == len(seen)


def test_the_tiny_answers_have_something_to_tell():
    for kind in ("linear", "fused", "deferred"):
        prompt = tiny_recording(kind).prompts[0]
        assert {0, 1} <= set(prompt.filled)
        assert max(prompt.lookup) > 3
        assert all(max(ranks) > 0 for ranks in zip(*prompt.streams, strict=True))
        assert prompt.streams[0] == [-1, -1, -1]


def test_the_recorded_shadow_judges_as_the_lookups_on_the_host_do():
    prompt = tiny_recording("linear").prompts[0]
    ours, theirs = (
        RecordedShadow(prompt, Chance(0.3, 0.6)),
        LookupShadow(2, 4, table(), Chance(0.3, 0.6)),
    )
    ours.learn(PROMPT)
    theirs.learn(PROMPT)
    for token in prompt.tokens:
        ours.judge(token)
        theirs.judge(token)
        assert ours.chance == theirs.chance


# Replaying, by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("none", [(10 + n, 1) for n in range(6)]),
        ("ngram|table:1", [(10, 2), (12, 1), (13, 1), (14, 2)]),
        ("ngram|table:4", [(10, 3), (13, 1), (14, 2)]),
        ("streams:1", [(10, 1), (11, 2), (13, 1), (14, 1), (15, 1)]),
        ("streams:2x1", [(10, 1), (11, 3), (14, 1), (15, 1)]),
        ("ngram|table:2,streams:2x1", [(10, 3), (13, 3)]),
    ],
)
def test_passes_by_hand(tree, expected):
    assert replayed(made_up(), tree) == expected


def test_fused_streams_know_nothing_after_a_pass_without_them():
    recording = made_up(rides_along=False)

    class Turns(FixedPlanner):
        def plan(self):
            self._plan, self.other = self.other, self._plan
            return self._plan

    planner = Turns(TreePlan.parse("streams:1"))
    planner.other = TreePlan()
    made = passes(recording, recording.prompts[0], planner, lambda plan, context: 1.0, Clock())
    assert [one.committed for one in made] == [1] * 6
    assert replayed(recording, "streams:1")[1] == (11, 2)


def test_along_a_tree():
    branch = Branch.of_paths("streams", [(0, 0), (0, 1), (2,)])
    assert along(branch, [0, 1, 0]) == (0, 1)
    assert along(branch, [2, 0]) == (2,)
    assert along(branch, [1]) == along(branch, [-1, 0]) == along(branch, []) == ()


@pytest.mark.parametrize("tree", ["ngram:4", "streams:1x1x1", "ngram|table:16"])
def test_a_tree_that_was_not_recorded_is_refused(tree):
    with pytest.raises(SpecStreamError, match="record"):
        replayed(made_up(), tree)


# What is predicted ------------------------------------------------------------------------------


def test_where_rows_cost_as_much_as_passes_nothing_is_proposed():
    linear = CostCurve.from_ratios({1: 1.0, 16: 16.0}, 0.05, 0.2)
    found = simulate(repetitive(), linear)
    assert found.menu == []
    assert found.trees == {"none": 1.0}
    assert found.overall == Outcome(3, 1.0, pytest.approx(1.0), "0", pytest.approx(1.0), 0)
    assert str(found.best_fixed) == "none"


def test_where_rows_cost_nothing_the_speed_up_is_the_tokens_per_pass():
    flat = CostCurve.from_ratios({1: 1.0, 20: 1.0}, 0.05)
    found = simulate(repetitive(), flat)
    assert found.overall.tokens_per_pass > 5
    assert found.overall.speedup == pytest.approx(found.overall.tokens_per_pass, rel=0.05)
    assert found.fixed_overall.speedup >= 0.99 * found.overall.speedup
    assert sum(found.trees.values()) == pytest.approx(1)
    assert list(found.by_category) == ["k"]


def test_the_worst_prompt_and_those_that_lose_are_told():
    # The second answer is never guessed: every pass of two rows costs 1.5 and commits a token.
    (good,) = made_up().prompts
    bad = replace(good, id="bad", category="b", lookup=[0] * 6)
    recording = replace(made_up(), prompts=[good, bad])
    costs = CostCurve.from_ratios({1: 1.0, 2: 1.5}, 2.0)
    found = Outcome.of(with_tree(recording, costs.of, TreePlan.parse("ngram|table:1")))
    assert (found.worst_prompt, found.slower, found.prompts) == ("bad", 1, 2)
    assert found.worst_speedup == pytest.approx(1 / 1.5)
    assert found.speedup == pytest.approx(1.5**-0.5)


def test_a_fixed_tree_costs_what_the_curve_says():
    costs = CostCurve.from_ratios({1: 1.0, 2: 1.5}, 2.0)
    (one,) = with_tree(made_up(), costs.of, TreePlan.parse("ngram|table:1"))
    assert one.seconds == pytest.approx(4 * 3.0)
    assert one.plain_seconds == pytest.approx(6 * 2.0)
    assert one.speedup == pytest.approx(1.0)


def test_a_curve_that_does_not_price_streams_is_replayed_without_them():
    costs = CostCurve([(1, 0, False, 1.0), (16, 0, False, 1.1)])
    found = simulate(repetitive(), costs)
    assert found.overall.speedup > 2
    assert not any("streams" in tree for tree in found.trees)


def test_streams_of_a_published_curve_cost_their_share_of_a_pass_over_their_rows():
    curve = published()["m1-m2"].curve(made_up())
    plain = curve.seconds(1)
    assert curve.seconds(1, 0, True) == pytest.approx(plain * (1 + 0.2 * 2))  # two streams
    assert curve.seconds(6) == pytest.approx(6 * plain)
