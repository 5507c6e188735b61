"""Which tree the next pass verifies: the one that promises most tokens per second, or none.

A pass over a tree costs more than a pass over one row, by how much depends on the machine
(``costs.py``), and commits more tokens, by how many depends on the text (``promise.py``).
``AutoPlanner`` follows both as it goes (``evidence.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .evidence import Experience, LookupShadow
from .plan import TreePlan
from .promise import STREAMS, promised_tokens

if TYPE_CHECKING:
    from .loop import PassReport

PLAIN = TreePlan()
# How much better another tree must promise to be before it takes over.
GAIN = 1.03
FIRST_PROBE, LAST_PROBE = 8, 256  # passes between tries of streams that did not pay
# Every so many passes is plain, so that the measure of all others is known: at first, and then.
FIRST_PLAIN, LATER_PLAIN = 8, 256


class Planner(Protocol):
    """Chooses plans, and is told one pass late what came of them."""

    def plan(self) -> TreePlan:
        """The plan of the pass about to be dispatched."""
        ...

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        """What a pass committed."""
        ...

    def explain(self) -> str:
        """One line: why the next tree is what it is."""
        ...


class FixedPlanner:
    """The same tree for every pass."""

    def __init__(self, plan: TreePlan, why: str = "asked for"):
        self._plan, self._why = plan, why

    def plan(self) -> TreePlan:
        return self._plan

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        pass

    def explain(self) -> str:
        return f"{self._plan}: {self._why}"


class Promise(NamedTuple):
    """What a tree promises.

    Args:
        tokens: Per pass.
        cost: Seconds of its pass, relative to a plain pass.
    """

    tokens: float
    cost: float

    @property
    def speed(self) -> float:
        """Tokens per second, relative to plain decoding."""
        return self.tokens / self.cost


class AutoPlanner:
    """Verifies the tree that is fastest by what this machine and this text show, or none.

    What lookups find is known from a shadow of them, whatever the pass verifies. Streams are
    known only from passes that asked them: while they do not pay, a pass now and then asks, at
    growing intervals.

    Args:
        menu: What may be verified, besides nothing.
        experience: Of this decoder; it goes on learning here.
        shadow: Of the lookups.
        text: The prompt's tokens.
    """

    def __init__(
        self,
        menu: Sequence[TreePlan],
        experience: Experience,
        shadow: LookupShadow,
        text: Sequence[int] = (),
    ):
        self._trees = list(dict.fromkeys([PLAIN, *menu]))
        self._experience, self._shadow = experience, shadow
        self._context = len(text)
        self._with_streams = [tree for tree in self._trees if STREAMS in tree.proposers]
        self._passes, self._idle, self._interval = 0, 0, FIRST_PROBE
        experience.clock.restart()
        experience.streams.forget()
        shadow.learn(text)
        self._current = max(self._trees, key=lambda tree: self.promise(tree).speed)

    def plan(self) -> TreePlan:
        self._passes += 1
        known = self._experience.clock.knows(PLAIN)
        if self._passes % (LATER_PLAIN if known else FIRST_PLAIN) == 0:
            return PLAIN
        if self._with_streams and self._idle >= self._interval:
            return self._probe
        return self._current

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        experience, committed = self._experience, len(report.tokens)
        promised = self._tokens(plan)
        kept = experience.kept_promise.get(plan, 1.0)
        experience.kept_promise[plan] = kept + 0.03 * (committed / promised - kept)
        experience.clock.tick(plan, self._context)
        self._context += committed
        for token in report.tokens:
            self._shadow.judge(token)
        experience.remember(self._shadow.chance, committed)
        for branch, outcome in zip(plan.branches, report.branches, strict=True):
            if outcome.proposer == STREAMS and outcome.proposed:
                experience.streams.judge(branch, outcome.right, committed)
        self._choose()
        self._count_idle(plan)

    def promise(self, tree: TreePlan) -> Promise:
        """What a tree promises for the next pass."""
        clock, context = self._experience.clock, self._context
        cost = clock.seconds(tree, context) / clock.seconds(PLAIN, context)
        # No tree is cheaper than nothing, whatever a disturbed clock says.
        kept = min(max(self._experience.kept_promise.get(tree, 1.0), 0.5), 1.5)
        return Promise(max(kept * self._tokens(tree), 1.0), max(cost, 1.0))

    def explain(self) -> str:
        if len(self._trees) == 1:
            return "none: at what passes cost here no tree can pay"
        if self._current == PLAIN:
            best = max(self._trees[1:], key=lambda tree: self.promise(tree).speed)
            tokens, cost = self.promise(best)
            rows = len(best.layout)
            return (
                f"none: a pass over {rows} rows costs {cost:.1f}x here "
                f"and would make {tokens:.1f} tokens"
            )
        tokens, cost = self.promise(self._current)
        return f"{self._current}: {tokens:.1f} tokens a pass, which costs {cost:.1f}x here"

    def _tokens(self, tree: TreePlan) -> float:
        return promised_tokens(tree, self._shadow.chance, self._experience.streams.rates)

    def _choose(self) -> None:
        best = max(self._trees, key=lambda tree: self.promise(tree).speed)
        if self.promise(best).speed > GAIN * self.promise(self._current).speed:
            self._current = best

    @property
    def _probe(self) -> TreePlan:
        """The tree that asks the streams most cheaply."""
        return min(self._with_streams, key=lambda tree: len(tree.layout))

    def _count_idle(self, plan: TreePlan) -> None:
        """Passes since the streams were last asked, and how long to wait for the next time."""
        if STREAMS in self._current.proposers:
            self._idle, self._interval = 0, FIRST_PROBE
        elif STREAMS in plan.proposers:  # a try that did not pay
            self._idle, self._interval = 0, min(2 * self._interval, LAST_PROBE)
        else:
            self._idle += 1
