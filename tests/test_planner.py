"""Planning: evidence on the host, and the tree that is chosen by it."""

from __future__ import annotations

import random
from itertools import pairwise

import mlx.core as mx
import pytest

from mlx_specstream import UsageError
from mlx_specstream.decode.evidence import LookupShadow, PassClock
from mlx_specstream.decode.loop import PassReport
from mlx_specstream.decode.plan import TreePlan
from mlx_specstream.decode.planner import PLAIN, AutoPlanner
from mlx_specstream.decode.proposers import NgramLookup
from mlx_specstream.speculation import auto_plans
from mlx_specstream.streams.ngram_table import NgramTable

SHORT, LONG = TreePlan.parse("ngram:4"), TreePlan.parse("ngram:7")
STREAMS = TreePlan.parse("ngram:4,streams:3")


class Machine:
    """A clock's view of a machine where a pass over n rows takes ``cost(n)`` seconds."""

    def __init__(self, cost):
        self.cost = cost

    def restart(self) -> None:
        pass

    def tick(self, plan: TreePlan) -> None:
        pass

    def seconds(self, plan: TreePlan) -> float:
        return self.cost(len(plan.layout))


def flat(rows: int) -> float:
    return 1.0 + 0.02 * rows


def linear(rows: int) -> float:
    return float(rows)


def drive(planner: AutoPlanner, text: list[int], right: dict[TreePlan, int]) -> list[TreePlan]:
    """Run passes over a text; a plan's passes commit ``right`` tokens beyond their own."""
    chosen, place = [], 0
    while place < len(text):
        plan = planner.plan()
        count = min(1 + right.get(plan, 0), len(text) - place)
        tokens = text[place : place + count]
        planner.observe(plan, PassReport(tokens, [None] * count, {}, mx.zeros(()), [0] * count))
        chosen.append(plan)
        place += count
    return chosen


COPY = [1, 2, 3, 4, 5, 6, 7, 8] * 30
FRESH = list(range(100, 400))


def planner_of(trees, cost, text=()) -> AutoPlanner:
    return AutoPlanner(trees, Machine(cost), LookupShadow(2, 4), text)


def test_the_shadow_guesses_what_the_lookups_on_the_device_propose():
    chance = random.Random(7)
    corpus = [[chance.randrange(9) for _ in range(50)] for _ in range(4)]
    table, lookup = NgramTable.build(corpus, 96), NgramLookup(2, 4)
    for _ in range(60):
        text = [chance.randrange(10) for _ in range(chance.randrange(1, 40))]
        shadow = LookupShadow(2, 4, table)
        shadow.learn(text)
        history = mx.array(text + [0] * 8)
        tokens, found = lookup.lookup(history, mx.array(len(text) - 1), 1)
        if not found.item():
            recent = [-1, -1, -1, *text][-3:]
            tokens, found = table.lookup(mx.array(recent, dtype=mx.int32))
        assert shadow._guess() == (tokens[0].item() if found.item() else None)


def test_hit_rates_follow_the_text():
    shadow = LookupShadow(2, 4)
    shadow.learn(COPY[:16])
    for token in COPY[16:40]:
        shadow.judge(token)
    assert shadow.hit_rate > 0.95
    for token in FRESH[:24]:
        shadow.judge(token)
    assert shadow.hit_rate < 0.05


def test_the_clock_takes_medians_and_skips_what_compiling_costs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = PassClock(keep=5, skip=2)
    for took in (0, 900, 10, 30, 20):
        now[0] += took
        clock.tick(SHORT)
    assert clock.seconds(SHORT) == 20
    assert clock.seconds(LONG) is None
    clock.restart()
    now[0] += 5000
    clock.tick(SHORT)  # a pause between generations belongs to no pass
    assert clock.seconds(SHORT) == 20


def test_text_that_repeats_is_verified_in_long_chains_where_rows_are_cheap():
    chosen = drive(planner_of([SHORT, LONG], flat, COPY[:16]), COPY, {SHORT: 4, LONG: 7})
    assert chosen.count(LONG) > 0.8 * len(chosen)


def test_fresh_text_is_decoded_plainly():
    chosen = drive(planner_of([SHORT, LONG], flat, COPY), FRESH, {})
    assert set(chosen[30:]) == {PLAIN}


@pytest.mark.parametrize("text", [COPY, FRESH])
def test_where_a_row_costs_as_much_as_a_pass_nothing_is_proposed(text):
    chosen = drive(planner_of([SHORT, LONG], linear, COPY[:16]), text, {SHORT: 4, LONG: 7})
    assert set(chosen) == {PLAIN}


def test_streams_that_pay_are_used_and_those_that_do_not_are_tried_ever_more_rarely():
    text = list(range(100, 1300))
    good = drive(planner_of([SHORT, STREAMS], flat), text, {STREAMS: 2})
    assert good.count(STREAMS) > 0.95 * len(good)
    poor = drive(planner_of([SHORT, STREAMS], lambda rows: 1 + 0.2 * rows), text, {STREAMS: 0})
    tries = [n for n, plan in enumerate(poor) if plan == STREAMS and n > 60]
    gaps = [b - a for a, b in pairwise(tries) if b - a > 2]
    assert len(gaps) >= 2
    assert gaps == sorted(gaps)
    assert len([n for n in tries if n > 600]) <= 12


def test_plain_passes_come_first_until_one_has_been_timed():
    planner = AutoPlanner([SHORT, STREAMS], PassClock(), LookupShadow(2, 4), COPY)
    chosen = drive(planner, COPY[:6], {})
    assert set(chosen[:5]) == {PLAIN}


@pytest.mark.parametrize(
    ("depths", "trees"),
    [
        ({"ngram": None}, ["ngram:4", "ngram:7"]),
        ({"ngram": None, "table": None}, ["ngram|table:4", "ngram|table:7"]),
        ({"ngram": None, "streams": 3}, ["ngram:4", "ngram:7", "ngram:4,streams:3"]),
        (
            {"ngram": None, "table": None, "streams": 5},
            ["ngram|table:4", "ngram|table:7", "ngram|table:4,streams:4"],
        ),
    ],
)
def test_what_auto_chooses_from(depths, trees):
    assert auto_plans(depths, 4) == [TreePlan.parse(tree) for tree in trees]


def test_one_proposal_at_a_time_is_one_tree():
    assert auto_plans({"ngram": None}, 1) == [TreePlan.parse("ngram:1")]


@pytest.mark.parametrize("text", ["ngram|", "|ngram:2", "a||b:1", "ngram|table"])
def test_malformed_alternatives_are_refused(text):
    with pytest.raises(UsageError, match="cannot read the tree"):
        TreePlan.parse(text)


def test_a_clock_that_calls_a_tree_cheaper_than_nothing_does_not_keep_it_going():
    """Plain passes timed in a bad moment: nothing would ever time them again."""
    chosen = drive(planner_of([SHORT, LONG], lambda rows: 2.0 - 0.1 * rows, COPY), FRESH, {})
    assert set(chosen[30:]) == {PLAIN}
