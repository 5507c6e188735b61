"""Which tree the next pass verifies: the one that promises most tokens per second.

A pass over a tree costs more than a pass over one row, by how much depends on the machine, and
commits more tokens, by how many depends on the text. ``AutoPlanner`` follows both as it goes
(``evidence.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from .evidence import LookupShadow, PassClock
from .plan import TreePlan

if TYPE_CHECKING:
    from .loop import PassReport

PLAIN = TreePlan()
LOOKUPS = frozenset({"ngram", "table"})  # what a shadow can follow
# What a row more is taken to cost, relative to a plain pass, until the tree has been timed.
ASSUMED_ROW_COST = 0.1
LEAST_ROW_COST = 0.01
# How much better another tree must promise to be before it takes over.
GAIN = 1.04
FIRST_PROBE, LAST_PROBE = 16, 256  # passes between tries of a tree that did not pay


class Planner(Protocol):
    """Chooses plans, and is told one pass late what came of them."""

    def plan(self) -> TreePlan:
        """The plan of the pass about to be dispatched."""
        ...

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        """What a pass committed."""
        ...


class FixedPlanner:
    """The same tree for every pass."""

    def __init__(self, plan: TreePlan):
        self._plan = plan

    def plan(self) -> TreePlan:
        return self._plan

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        pass


class AutoPlanner:
    """Verifies the tree that is fastest by what this machine and this text show, or none.

    Trees of lookups alone are judged by the shadow. Other trees (streams) are judged by what
    their passes committed: they are tried now and then, at growing intervals while that does not
    pay.

    Args:
        trees: What may be verified, besides nothing.
        clock: Seconds per pass so far, kept from one generation to the next.
        shadow: Of the lookups.
        text: The prompt's tokens.
    """

    def __init__(
        self,
        trees: Sequence[TreePlan],
        clock: PassClock,
        shadow: LookupShadow,
        text: Sequence[int] = (),
    ):
        self._trees, self._clock, self._shadow = [PLAIN, *trees], clock, shadow
        self._blind = [tree for tree in trees if not tree.proposers <= LOOKUPS]
        self._tokens = {tree: 1 + 0.5 * tree.layout.max_depth for tree in self._blind}
        self._interval = dict.fromkeys(self._blind, FIRST_PROBE)
        self._idle = dict.fromkeys(self._blind, 0)
        self._current = self._blind[-1] if self._blind else PLAIN
        clock.restart()
        shadow.learn(text)

    def plan(self) -> TreePlan:
        if self._clock.seconds(PLAIN) is None:  # the measure of all others
            return PLAIN
        for tree in self._blind:
            if self._idle[tree] >= self._interval[tree]:
                return tree
        return self._current

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        self._clock.tick(plan)
        for token in report.tokens:
            self._shadow.judge(token)
        if plan in self._tokens:
            self._tokens[plan] += 0.15 * (len(report.tokens) - self._tokens[plan])
        self._choose()
        for tree in self._blind:
            if tree == self._current:
                self._idle[tree], self._interval[tree] = 0, FIRST_PROBE
            elif tree == plan:  # a try that did not pay: wait longer for the next
                self._idle[tree] = 0
                self._interval[tree] = min(2 * self._interval[tree], LAST_PROBE)
            else:
                self._idle[tree] += 1

    def _choose(self) -> None:
        best = max(self._trees, key=self._worth)
        if self._worth(best) > GAIN * self._worth(self._current) or self._worth(self._current) < 1:
            self._current = best

    def _worth(self, tree: TreePlan) -> float:
        """Tokens per second that a tree promises, relative to plain decoding."""
        if tree == PLAIN:
            return 1.0
        mine, plain = self._clock.seconds(tree), self._clock.seconds(PLAIN)
        more = len(tree.layout) - 1
        cost = mine / plain if mine and plain else 1 + ASSUMED_ROW_COST * more
        # No tree is cheaper than nothing: a clock that says so is stale, and only a plain pass,
        # which a tree without hits must lead back to, can set it right.
        return self._promise(tree) / max(cost, 1 + LEAST_ROW_COST * more)

    def _promise(self, tree: TreePlan) -> float:
        """Tokens per pass to expect of a tree."""
        if tree in self._tokens:
            return self._tokens[tree]
        hit, depth = min(self._shadow.hit_rate, 0.99), tree.layout.max_depth
        return (1 - hit ** (depth + 1)) / (1 - hit)
