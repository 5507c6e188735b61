"""What a planner decides by: seconds of passes, and how often lookups would have been right."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median

from ..streams.ngram_table import ORDERS, NgramTable
from .plan import TreePlan


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
    """The lookups on the host, one token ahead: how often would they have been right?

    It sees the hits also while plain passes run, at no cost.

    Args:
        min_length: Shortest ending followed, as in ``NgramLookup``.
        max_length: Longest ending told apart.
        table: The n-gram table asked where the text itself has no match, or None.
        decay: Weight of the newest token in the average.
    """

    def __init__(
        self,
        min_length: int,
        max_length: int,
        table: NgramTable | None = None,
        decay: float = 0.2,
    ):
        self._lengths = range(max_length, min_length - 1, -1)
        self._table = table
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
        self.hit_rate += self._decay * ((self._guess() == token) - self.hit_rate)
        self._append(token)

    def _guess(self) -> int | None:
        for length in self._lengths:
            if length <= len(self._tail) and self._tail[-length:] in self._follower:
                return self._follower[self._tail[-length:]]
        return None if self._table is None else self._table.next_token(self._tail)

    def _append(self, token: int) -> None:
        for length in self._lengths:
            if length <= len(self._tail):
                self._follower[self._tail[-length:]] = token
        self._tail = (*self._tail, token)[-max(self._lengths.start, len(ORDERS)) :]
