"""Which tree the next pass verifies: the one that promises most tokens per second.

A pass over a tree costs more than a pass over one row, by how much depends on the machine, and
commits more tokens, by how many depends on the text. ``AutoPlanner`` follows both as it goes:
seconds from the passes themselves, hits of the n-gram lookup from a shadow of it on the host
(which sees the hits also while plain passes run, at no cost), and other proposers' hits from
passes that try them now and then.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Protocol

from .plan import TreePlan

if TYPE_CHECKING:
    from .loop import PassReport

PLAIN = TreePlan()
# What a pass over a tree is taken to cost, relative to a plain one, until it has been timed.
ASSUMED_COST = 1.4


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


class PassClock:
    """Seconds per pass of each plan, as the host sees reports come in.

    Args:
        keep: Passes to take the median of.
        skip: First passes of a plan that are not counted: they pay for tracing and compiling.
    """

    def __init__(self, keep: int = 9, skip: int = 3):
        self._skip = skip
        self._seen: dict[TreePlan, int] = defaultdict(int)
        self._times: dict[TreePlan, deque[float]] = defaultdict(lambda: deque(maxlen=keep))
        self._last: float | None = None

    def restart(self) -> None:
        """A new generation begins: the time since the last report belongs to no pass."""
        self._last = None

    def tick(self, plan: TreePlan) -> None:
        """A pass of this plan has been read."""
        now = time.perf_counter()
        self._seen[plan] += 1
        if self._last is not None and self._seen[plan] > self._skip:
            self._times[plan].append(now - self._last)
        self._last = now

    def seconds(self, plan: TreePlan) -> float | None:
        """The median pass, or None before three were counted."""
        times = self._times[plan]
        return median(times) if len(times) >= 3 else None


class LookupShadow:
    """The n-gram lookup on the host, one token ahead: how often would it have been right?

    Args:
        min_length: Shortest ending followed, as in ``NgramLookup``.
        max_length: Longest ending told apart.
        decay: Weight of the newest token in the average.
    """

    def __init__(self, min_length: int, max_length: int, decay: float = 0.2):
        self._lengths = range(max_length, min_length - 1, -1)
        self._decay = decay
        self._follower: dict[tuple[int, ...], int] = {}
        self._tail: tuple[int, ...] = ()
        self.hit_rate = 0.0

    def learn(self, tokens: Sequence[int]) -> None:
        """Read tokens without judging predictions (the prompt)."""
        for token in tokens:
            self._append(token)

    def judge(self, token: int) -> None:
        """Compare the prediction with the token that came, then read it."""
        endings = (self._tail[-n:] for n in self._lengths if n <= len(self._tail))
        guess = next((self._follower[e] for e in endings if e in self._follower), None)
        self.hit_rate += self._decay * ((guess == token) - self.hit_rate)
        self._append(token)

    def _append(self, token: int) -> None:
        for length in self._lengths:
            if length <= len(self._tail):
                self._follower[self._tail[-length:]] = token
        self._tail = (*self._tail, token)[-self._lengths.start :]


class AutoPlanner:
    """Proposes while that is faster than not to, by what this machine and this text show.

    Args:
        full: The tree to verify when proposing.
        clock: Seconds per pass so far, kept from one generation to the next.
        shadow: Of the n-gram lookup if ``full`` has such a branch.
        text: The prompt's tokens.
        gain: Predicted gain at which proposing begins; it ends at no gain.
    """

    def __init__(
        self,
        full: TreePlan,
        clock: PassClock,
        shadow: LookupShadow | None = None,
        text: Sequence[int] = (),
        gain: float = 1.05,
    ):
        self._full, self._clock, self._shadow, self._gain = full, clock, shadow, gain
        self._blind = full.proposers != {"ngram"}
        self._tokens = float(1 + full.layout.max_depth) if self._blind else 1.0
        self._proposing = self._blind
        self._parked, self._next_probe = 0, 16
        clock.restart()
        if shadow is not None:
            shadow.learn(text)

    def plan(self) -> TreePlan:
        if self._clock.seconds(PLAIN) is None:  # the measure of all others
            return PLAIN
        if self._blind and not self._proposing and self._parked >= self._next_probe:
            return self._full
        return self._full if self._proposing else PLAIN

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        self._clock.tick(plan)
        if self._shadow is not None:
            for token in report.tokens:
                self._shadow.judge(token)
        if plan == self._full:
            self._tokens += 0.1 * (len(report.tokens) - self._tokens)
        self._decide(plan)

    def _decide(self, plan: TreePlan) -> None:
        full, plain = self._clock.seconds(self._full), self._clock.seconds(PLAIN)
        cost = full / plain if full and plain else ASSUMED_COST
        gain = self._promise() / cost
        was, self._proposing = self._proposing, gain > (1.0 if self._proposing else self._gain)
        if self._proposing:
            self._parked, self._next_probe = 0, 16
        elif was:
            self._parked = 0
        elif plan == self._full:  # a probe that did not pay: wait longer for the next
            self._parked, self._next_probe = 0, min(2 * self._next_probe, 256)
        else:
            self._parked += 1

    def _promise(self) -> float:
        """Tokens per pass to expect of the full tree."""
        if self._shadow is None:
            return self._tokens
        hit = min(self._shadow.hit_rate, 0.99)
        depth = max(len(b) for b in self._full.branches if "ngram" in b.proposers)
        looked_up = (1 - hit ** (depth + 1)) / (1 - hit)
        return max(looked_up, self._tokens) if self._blind else looked_up
