"""Planning: evidence on the host, what trees promise, and the tree that is chosen by it."""

from __future__ import annotations

import random
from itertools import pairwise

import mlx.core as mx
import pytest

from mlx_specstream.decode.costs import CostCurve, Point
from mlx_specstream.decode.evidence import Experience, LookupShadow, PassClock, StreamRecord
from mlx_specstream.decode.menu import candidates, menu_for
from mlx_specstream.decode.plan import TreePlan, best_paths
from mlx_specstream.decode.planner import PLAIN, AutoPlanner
from mlx_specstream.decode.promise import Chance, promised_tokens, right_path
from mlx_specstream.decode.proposers import NgramLookup
from mlx_specstream.decode.report import BranchOutcome, PassReport
from mlx_specstream.streams.ngram_table import NgramTable

SHORT, LONG = TreePlan.parse("ngram:4"), TreePlan.parse("ngram:7")
STREAMS = TreePlan.parse("ngram:4,streams:0.0.0+1")
RATES = ((0.6, 0.15), (0.4, 0.1), (0.3, 0.1))
COPY = [1, 2, 3, 4, 5, 6, 7, 8] * 40
FRESH = list(range(100, 900))


def curve(per_row: float, streams: float = 0.1) -> CostCurve:
    """A machine where a row more costs ``per_row`` plain passes."""
    costs = [Point(rows, 100, False, 1 + per_row * (rows - 1)) for rows in (1, 16)]
    return CostCurve([*costs, Point(1, 100, True, 1 + streams)])


FLAT, LINEAR = curve(0.02), curve(1.0)


class Machine:
    """Decodes a text with a planner: time passes as a curve says, lookups find what a copy has.

    Args:
        planner: Makes an ``AutoPlanner`` of a menu.
        real: What passes really cost.
        depth: How deep the streams are right.
    """

    def __init__(self, menu, costs, text, real=None, depth=0, rates=RATES):
        self.now, self.real, self.text, self.depth = 0.0, real or costs, text, depth
        self.experience = Experience(costs, rates, now=lambda: self.now)
        self.menu = menu

    def run(self, prompt=()) -> list[TreePlan]:
        shadow = LookupShadow(2, 4, chance=self.experience.lookups)
        planner = self.planner = AutoPlanner(self.menu, self.experience, shadow, prompt)
        lookup, chosen, place = LookupShadow(2, 4), [], 0
        lookup.learn(prompt)
        while place < len(self.text):
            plan = planner.plan()
            outcomes = []
            for branch in plan.branches:
                if branch.proposer == "streams":
                    right = (0,) * min(self.depth, 3)
                else:
                    right = (0,) * self.copied(lookup, place, len(branch))
                outcomes.append(BranchOutcome(branch.proposer, len(branch), right))
            count = 1 + max([len(o.right) for o in outcomes], default=0)
            tokens = self.text[place : place + count]
            lookup.learn(tokens)
            self.now += self.real.of(plan, 100 + place)
            planner.observe(plan, report(plan, tokens, outcomes))
            chosen.append(plan)
            place += count
        return chosen

    def copied(self, lookup, place: int, most: int) -> int:
        """How many tokens from here on a lookup chain has right."""
        trial = LookupShadow(2, 4)
        trial._follower, trial._tail = dict(lookup._follower), lookup._tail
        for count, token in enumerate(self.text[place : place + most]):
            if trial._guess() != token:
                return count
            trial.learn([token])
        return min(most, len(self.text) - place - 1)


def report(plan, tokens, outcomes) -> PassReport:
    count = len(tokens)
    return PassReport(plan, tokens, [None] * count, outcomes, {}, mx.zeros(()), [0] * count)


# The shadow of the lookups ----------------------------------------------------------------------


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
    for token in COPY[16:96]:
        shadow.judge(token)
    assert min(shadow.chance) > 0.95
    for token in FRESH[:24]:
        shadow.judge(token)
    assert shadow.chance.first < 0.05


def test_a_chain_that_breaks_early_is_told_from_one_that_goes_on():
    # Every second token is new: a lookup is right once, and never twice in a row.
    text = [token for n in range(200) for token in (n % 2, 1, 1000 + n)]
    shadow = LookupShadow(1, 4)
    for token in text:
        shadow.judge(token)
    assert shadow.chance.first > 0.1
    assert shadow.chance.later < 0.1


# What passes cost -------------------------------------------------------------------------------


def ticking(clock: PassClock, now: list[float], plan: TreePlan, took: list[float]) -> None:
    for seconds in took:
        now[0] += seconds
        clock.tick(plan, 100)


def test_the_clock_learns_what_a_tree_costs_beyond_the_curve():
    now = [0.0]
    clock = PassClock(FLAT, now=lambda: now[0])
    ticking(clock, now, PLAIN, [1.0] * 20)
    ticking(clock, now, SHORT, [9.0, 5.0] + [1.5] * 30)  # the first passes are traced
    assert clock.seconds(PLAIN, 100) == pytest.approx(1.0, rel=0.15)
    assert clock.seconds(SHORT, 100) / clock.seconds(PLAIN, 100) == pytest.approx(1.5, rel=0.05)
    assert 1.12 < clock.seconds(LONG, 100) / clock.seconds(PLAIN, 100) < 1.6


def test_a_machine_that_slows_down_changes_no_ratio():
    now = [0.0]
    clock = PassClock(FLAT, now=lambda: now[0])
    ticking(clock, now, PLAIN, [1.0] * 20)
    ticking(clock, now, SHORT, [1.08] * 40)
    ticking(clock, now, SHORT, [2.16] * 12)
    assert clock.seconds(SHORT, 100) == pytest.approx(2.16, rel=0.1)
    assert clock.seconds(SHORT, 100) / clock.seconds(PLAIN, 100) < 1.25


def test_a_pause_is_no_pass():
    now = [0.0]
    clock = PassClock(FLAT, now=lambda: now[0])
    ticking(clock, now, SHORT, [1.08] * 20)
    before = clock.seconds(SHORT, 100)
    ticking(clock, now, SHORT, [500.0])
    assert clock.seconds(SHORT, 100) < 1.3 * before
    clock.restart()
    now[0] += 5000  # between two generations
    clock.tick(SHORT, 100)
    assert clock.seconds(SHORT, 100) < 1.3 * before


# How right the streams are ----------------------------------------------------------------------


def test_stream_rates_follow_what_passes_show():
    (branch,) = TreePlan.parse("streams:0.0.0+1").branches
    record = StreamRecord(RATES)
    assert record.rates == [pytest.approx(list(ranks)) for ranks in RATES]
    for _ in range(80):
        record.judge(branch, (), 1)
    first, second, _ = record.rates
    assert sum(first) < 0.2
    assert second == pytest.approx(list(RATES[1]))  # never reached, so nothing was learnt
    for _ in range(80):
        record.judge(branch, (0, 0, 0), 4)
    assert record.rates[0][0] > 0.6
    assert record.rates[2][0] > 0.5
    assert all(0 <= rate <= 1 for ranks in record.rates for rate in ranks)


def test_the_end_of_a_path_counts_only_where_the_target_went_on():
    (branch,) = TreePlan.parse("streams:0.0").branches
    record = StreamRecord(RATES)
    record.judge(branch, (0,), 1)  # the text ended there
    assert record.rates[1] == pytest.approx(list(RATES[1]))


@pytest.mark.parametrize(
    ("said", "right"),
    [([5, 6, 9], (0, 0)), ([5, 8, 7], (0, 1)), ([7, 1], (1,)), ([1], ()), ([], ())],
)
def test_the_right_path_of_a_branch_is_found(said, right):
    (branch,) = TreePlan.parse("streams:0.0+0.1+1").branches
    assert right_path(branch, [5, 6, 8, 7], said) == right


# What a tree promises ---------------------------------------------------------------------------


def test_a_promise_adds_up_the_chances_of_each_depth():
    tokens = promised_tokens(TreePlan.parse("ngram:3"), Chance(0.5, 0.8), RATES)
    assert tokens == pytest.approx(1 + 0.5 + 0.4 + 0.32)
    tree = promised_tokens(TreePlan.parse("streams:0.0+1"), Chance(0, 0), RATES)
    assert tree == pytest.approx(1 + 0.75 + 0.6 * 0.4)
    assert promised_tokens(PLAIN, Chance(1, 1), RATES) == 1


def test_two_proposers_promise_more_than_one_and_less_than_both():
    chance = Chance(0.5, 0.8)
    both = promised_tokens(TreePlan.parse("ngram:3,streams:3"), chance, RATES)
    one = promised_tokens(TreePlan.parse("ngram:3"), chance, RATES)
    other = promised_tokens(TreePlan.parse("streams:3"), chance, RATES)
    assert max(one, other) < both < one + other - 1


# Choosing ---------------------------------------------------------------------------------------


def test_text_that_repeats_is_verified_in_long_chains_where_rows_are_cheap():
    chosen = Machine([SHORT, LONG], FLAT, COPY).run(COPY[:16])
    assert chosen.count(LONG) > 0.8 * len(chosen)


def test_fresh_text_is_decoded_plainly():
    machine = Machine([SHORT, LONG], curve(0.05), FRESH)
    chosen = machine.run(COPY)
    assert set(chosen[40:]) == {PLAIN}
    assert "none: a pass over" in machine.planner.explain()


@pytest.mark.parametrize("text", [COPY, FRESH])
def test_where_a_row_costs_as_much_as_a_pass_nothing_is_proposed(text):
    chosen = Machine([SHORT, LONG, STREAMS], LINEAR, text).run(COPY[:16])
    assert chosen.count(PLAIN) > 0.95 * len(chosen)


def test_streams_that_pay_are_used_and_those_that_do_not_are_asked_ever_more_rarely():
    good = Machine([SHORT, STREAMS], FLAT, FRESH, depth=2).run()
    assert good.count(STREAMS) > 0.95 * len(good)
    poor = Machine([SHORT, STREAMS], curve(0.1), FRESH, depth=0).run()
    tries = [n for n, plan in enumerate(poor) if plan == STREAMS and n > 60]
    gaps = [b - a for a, b in pairwise(tries) if b - a > 2]
    assert len(gaps) >= 2
    assert gaps == sorted(gaps)
    assert len([n for n in tries if n > 300]) <= 6


def test_a_curve_that_was_wrong_is_put_right_by_the_clock():
    text = 4 * COPY
    machine = Machine([SHORT, LONG], FLAT, text, real=curve(1.5))
    chosen = machine.run()
    assert chosen[-30:].count(PLAIN) == 30
    plain_time = len(text) * 1.0
    assert machine.now < 1.5 * plain_time


def test_what_was_learnt_is_there_in_the_next_generation():
    machine = Machine([SHORT, LONG], FLAT, COPY)
    for _ in range(8):
        last = machine.run(COPY[:16])
    assert machine.experience.lookups.first > 0.8
    assert last[0] == LONG


def test_every_choice_is_explained_with_its_figures():
    machine = Machine([STREAMS], FLAT, FRESH, depth=3)
    machine.run()
    assert machine.planner.explain().startswith(f"{STREAMS}: ")
    assert "tokens a pass, which costs 1." in machine.planner.explain()
    nothing = AutoPlanner([], Experience(LINEAR), LookupShadow(2, 4))
    assert nothing.explain() == "none: at what passes cost here no tree can pay"


# The menu ---------------------------------------------------------------------------------------


def test_a_menu_has_trees_for_copies_and_for_prose_where_rows_are_cheap():
    menu = menu_for(FLAT, candidates("ngram|table", RATES), RATES)
    assert 2 <= len(menu) <= 6
    assert any(tree.proposers == {"ngram", "table"} and len(tree.layout) > 8 for tree in menu)
    assert any("streams" in tree.proposers for tree in menu)
    assert all(len(tree.layout) <= 20 for tree in menu)


def test_no_tree_is_on_the_menu_where_none_can_pay():
    assert menu_for(LINEAR, candidates("ngram", RATES), RATES) == []
    assert menu_for(FLAT, candidates("", None), None) == []


def test_trees_stay_small_where_the_cheap_rows_end():
    cheap_to_five = {1: 1.0, 5: 1.1, 6: 2.0, 8: 2.7, 16: 4.5}
    costs = CostCurve.from_ratios(cheap_to_five, 0.02, streams=0.1)
    menu = menu_for(costs, candidates("ngram", RATES), RATES)
    assert menu
    assert min(len(tree.layout) for tree in menu) <= 5


def test_a_chain_of_a_given_length_is_the_only_one():
    lengths = {len(t.branches[0]) for t in candidates("ngram", None, (0, 3))}
    assert lengths == {3}


def test_stream_trees_follow_the_measured_rates():
    rates = ((0.5, 0.4), (0.1, 0.05), (0.1, 0.05))
    trees = [str(tree) for tree in candidates("", rates)]
    assert "streams:0+1" in trees
    assert best_paths(rates, 2) == [(0,), (1,)]
