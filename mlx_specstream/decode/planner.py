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
    from .report import PassReport

PLAIN = TreePlan()
# How much better another tree must promise to be before it takes over; plain decoding need not.
GAIN = 1.03
FIRST_PROBE, LAST_PROBE = 8, 256  # passes between tries of what did not pay
# Every so many passes is plain, so that the measure of all others is known: at first, and then.
FIRST_PLAIN, LATER_PLAIN = 8, 256
# What trees may lose in a text, in plain passes: at the start, and for each of its tokens.
LOSS_AT_START, LOSS_PER_TOKEN = 0.3, 0.01
MOST_CREDIT = 3.0  # of what was gained before, in plain passes
# A promise so far above plain decoding is kept to although trees have lost that.
SURE = 1.7


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


class Probes:
    """When to try again what did not pay: after ever more passes."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """It pays now."""
        self._idle, self._interval = 0, FIRST_PROBE

    @property
    def due(self) -> bool:
        """Whether the next pass is a try."""
        return self._idle >= self._interval

    def dispatched(self) -> None:
        """A try is on its way."""
        self._idle, self._interval = 0, min(2 * self._interval, LAST_PROBE)

    def wait(self) -> None:
        """A pass went by without one."""
        self._idle += 1


class AutoPlanner:
    """Verifies the tree that is fastest by what this machine and this text show, or none.

    What lookups find is known from a shadow of them, whatever the pass verifies. Streams are
    known only from passes that asked them, and what a tree's pass costs now only from its passes:
    what does not pay is tried now and then, at growing intervals. What trees cost beyond what
    they gain is counted, text by text; once that is more than a text may lose, only promises that
    are well above plain decoding are followed.

    Args:
        menu: What may be verified, besides nothing.
        experience: Of this decoder; it goes on learning here.
        shadow: Of the lookups.
        text: The prompt's tokens.
        nothing: Why the menu is empty, if it is.
        in_pairs: Whether streams know their state only after a pass that carried them.
    """

    def __init__(
        self,
        menu: Sequence[TreePlan],
        experience: Experience,
        shadow: LookupShadow,
        text: Sequence[int] = (),
        nothing: str = "at what passes cost here no tree can pay",
        in_pairs: bool = False,
    ):
        self._trees = list(dict.fromkeys([PLAIN, *menu]))
        self._experience, self._shadow, self._nothing = experience, shadow, nothing
        self._context, self._passes, self._lost = len(text), 0, -LOSS_AT_START
        self._with_streams = [tree for tree in self._trees if STREAMS in tree.proposers]
        self._streams, self._costs = Probes(), Probes()
        self._in_pairs, self._again = in_pairs, False
        experience.clock.restart()
        experience.streams.forget()
        self._current = PLAIN
        if menu:
            shadow.learn(text)
            self._choose()

    def plan(self) -> TreePlan:
        if len(self._trees) == 1:
            return PLAIN
        self._passes += 1
        known = self._experience.clock.knows(PLAIN)
        if self._passes % (LATER_PLAIN if known else FIRST_PLAIN) == 0:
            return PLAIN
        if self._with_streams and (self._streams.due or self._again):
            self._again = self._in_pairs and not self._again
            self._streams.dispatched()
            # The tree that asks the streams most cheaply.
            return min(self._with_streams, key=lambda tree: len(tree.layout))
        if self._costs.due:
            self._costs.dispatched()
            return max(self._trees, key=lambda tree: self.promise(tree, timed=False).speed)
        return self._current

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        if len(self._trees) == 1:
            return
        experience, committed = self._experience, len(report.tokens)
        promised = self._tokens(plan)
        kept = experience.kept_promise.get(plan, 1.0)
        experience.kept_promise[plan] = kept + 0.03 * (committed / promised - kept)
        experience.clock.tick(plan, self._context)
        self._lost += self._cost(plan) - (1 + LOSS_PER_TOKEN) * committed
        self._lost = max(self._lost, -MOST_CREDIT)
        self._context += committed
        for token in report.tokens:
            self._shadow.judge(token)
        experience.remember(self._shadow.chance, committed)
        for branch, outcome in zip(plan.branches, report.branches, strict=True):
            if outcome.proposer == STREAMS and outcome.proposed:
                experience.streams.judge(branch, outcome.right, committed)
        self._choose()
        self._count()

    def promise(self, tree: TreePlan, timed: bool = True) -> Promise:
        """What a tree promises for the next pass.

        Args:
            tree: The tree.
            timed: By the times of its passes; else by the cost curve alone.
        """
        kept = min(max(self._experience.kept_promise.get(tree, 1.0), 0.5), 1.5)
        cost = (
            self._cost(tree) if timed else self._experience.clock.costs.ratio(tree, self._context)
        )
        return Promise(max(kept * self._tokens(tree), 1.0), cost)

    def explain(self) -> str:
        if len(self._trees) == 1:
            return f"none: {self._nothing}"
        if self._current == PLAIN:
            best = max(self._trees[1:], key=lambda tree: self.promise(tree).speed)
            tokens, cost = self.promise(best)
            return (
                f"none: a pass over {len(best.layout)} rows costs {cost:.2f}x here "
                f"and would make {tokens:.2f} tokens"
            )
        tokens, cost = self.promise(self._current)
        return f"{self._current}: {tokens:.2f} tokens a pass, which costs {cost:.2f}x here"

    def _tokens(self, tree: TreePlan) -> float:
        return promised_tokens(tree, self._shadow.chance, self._experience.streams.rates)

    def _cost(self, tree: TreePlan) -> float:
        """Seconds of a tree's pass by those of a plain one; none is cheaper than nothing."""
        clock, context = self._experience.clock, self._context
        return max(clock.seconds(tree, context) / clock.seconds(PLAIN, context), 1.0)

    def _choose(self) -> None:
        speeds = {tree: self.promise(tree).speed for tree in self._trees}
        best = max(self._trees, key=speeds.__getitem__)
        if best == PLAIN or speeds[best] > GAIN * speeds[self._current]:
            self._current = best
        if self._lost > 0 and speeds[self._current] < SURE:
            self._current = PLAIN

    def _count(self) -> None:
        """Passes since what does not pay was last tried."""
        if STREAMS in self._current.proposers:
            self._streams.reset()
        elif self._lost <= 0:
            self._streams.wait()
        held_back = self._current == PLAIN and any(
            self.promise(tree, timed=False).speed > GAIN for tree in self._trees
        )
        if held_back and self._lost <= 0:
            self._costs.wait()
        elif not held_back:
            self._costs.reset()
