"""What a planner decides by: how often lookups and streams are right, and what passes cost here.

An ``Experience`` is kept from one generation to the next. A ``LookupShadow`` reads one text.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

from ..streams.ngram_table import ORDERS, NgramTable
from .costs import CostCurve
from .plan import Branch, TreePlan
from .promise import Chance, Rates

# Of streams that nobody measured, until their passes tell more.
ASSUMED_RATES = ((0.4, 0.12, 0.06, 0.04),) * 8
ASSUMED_LOOKUPS = Chance(0.3, 0.65)
ENOUGH = 3  # passes of a tree, to know what it costs


class PassClock:
    """What passes cost here, next to what the cost curve says.

    A tree's passes may always take longer than the curve has it (its lookups, the sampling), and
    everything may take longer for a while (another program runs): a factor for each tree, learnt
    slowly, and one for all, learnt fast. Only the first can change which tree is best.

    Args:
        costs: The curve.
        skip: First passes of a plan that are not counted: they pay for tracing and compiling.
        now: Seconds, from anywhere.
    """

    def __init__(
        self, costs: CostCurve, skip: int = 2, now: Callable[[], float] = time.perf_counter
    ):
        self.costs, self._skip, self._now = costs, skip, now
        self._seen: dict[TreePlan, int] = defaultdict(int)
        self._own: dict[TreePlan, deque[float]] = defaultdict(lambda: deque(maxlen=31))
        self._all = 1.0
        self._last: float | None = None

    def restart(self) -> None:
        """A new generation begins: the time since the last report belongs to no pass."""
        self._last = None

    def tick(self, plan: TreePlan, context: int) -> None:
        """A pass of this plan over a cache of ``context`` tokens has been read."""
        now, last = self._now(), self._last
        self._last = now
        self._seen[plan] += 1
        if last is None or now <= last or self._seen[plan] <= self._skip:
            return
        slower = (now - last) / self.costs.of(plan, context)
        self._own[plan].append(slower / self._all)
        if len(self._own[plan]) > ENOUGH:
            # One pass in which the machine paused must not look like one that got slower.
            now_all = min(slower / self._factor(plan), 2 * self._all)
            self._all += 0.2 * (now_all - self._all)

    def seconds(self, plan: TreePlan, context: int) -> float:
        """What a pass is to be expected to take."""
        return self.costs.of(plan, context) * self._factor(plan) * self._all

    def knows(self, plan: TreePlan) -> bool:
        """Whether passes of a tree have been timed here, not only read off the curve."""
        return len(self._own[plan]) >= ENOUGH

    def _factor(self, plan: TreePlan) -> float:
        if self.knows(plan):
            return median(self._own[plan])
        # Nobody knows: like the others.
        known = [median(times) for times in self._own.values() if len(times) >= ENOUGH]
        return median(known) if known else 1.0


class StreamRecord:
    """How often each stream's candidates are right, now: measured rates, scaled by depth.

    Args:
        rates: ``rates[depth][rank]`` as measured in training.
        keep: Weight of all passes so far when another one is counted.
        prior: Passes that the measured rates count as.
    """

    def __init__(self, rates: Rates, keep: float = 0.95, prior: float = 6.0):
        self._rates, self._keep, self._prior = rates, keep, prior
        self._hits = [0.0] * len(rates)
        self._expected = [0.0] * len(rates)
        self.rates = self._scaled()  # to expect of the next pass

    def _scaled(self) -> list[list[float]]:
        scaled = []
        for depth, ranks in enumerate(self._rates):
            base = self._prior * sum(ranks)
            scale = (self._hits[depth] + base) / (self._expected[depth] + base) if base else 1.0
            top = max(sum(ranks), 1e-9)
            scaled.append([rate * min(scale, 0.98 / top) for rate in ranks])
        return scaled

    def forget(self, kept: float = 0.3) -> None:
        """A new text begins: what the last one showed counts for less."""
        self._hits = [kept * hits for hits in self._hits]
        self._expected = [kept * expected for expected in self._expected]
        self.rates = self._scaled()

    def judge(self, branch: Branch, right: Sequence[int], committed: int) -> None:
        """Count a pass; a depth counts if all above it was right and the target went on there.

        Args:
            branch: The streams' branch.
            right: Ranks along what the target said, as deep as the branch was right.
            committed: Tokens that the target said.
        """
        at = -1
        for depth in range(min(len(self._rates), committed)):
            offered = [n for n, parent in enumerate(branch.parents) if parent == at]
            if not offered:
                break
            hit = depth < len(right)
            ranks = [branch.ranks[n] for n in offered]
            known = self._rates[depth]
            expected = sum(known[rank] for rank in ranks if rank < len(known))
            self._hits[depth] = self._keep * self._hits[depth] + hit
            self._expected[depth] = self._keep * self._expected[depth] + expected
            if not hit:
                break
            at = offered[ranks.index(right[depth])]
        self.rates = self._scaled()


class Experience:
    """What is known of a decoder from its generations so far.

    Args:
        costs: What passes cost on this machine.
        rates: Of its streams, as measured in training, or None.
        now: Seconds, from anywhere.
    """

    def __init__(
        self,
        costs: CostCurve,
        rates: Rates | None = None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self.clock = PassClock(costs, now=now)
        self.streams = StreamRecord(rates or ASSUMED_RATES)
        self.lookups = ASSUMED_LOOKUPS
        self.kept_promise: dict[TreePlan, float] = {}  # tokens committed by tokens promised
        self.menus: dict[int | None, list[TreePlan]] = {}  # by the length asked of chains

    def remember(self, chance: Chance, tokens: int) -> None:
        """Let the lookups' chances in one text count for what to expect of the next, a little."""
        weight = 0.002 * tokens
        self.lookups = Chance(
            *(a + weight * (b - a) for a, b in zip(self.lookups, chance, strict=True))
        )


class LookupShadow:
    """The lookups on the host, one token ahead: how often would they have been right?

    It sees the hits also while plain passes run, at no cost.

    Args:
        min_length: Shortest ending followed, as in ``NgramLookup``.
        max_length: Longest ending told apart.
        table: The n-gram table asked where the text itself has no match, or None.
        chance: What to expect before anything was seen.
        decay: Weight of the newest token in the averages.
    """

    def __init__(
        self,
        min_length: int,
        max_length: int,
        table: NgramTable | None = None,
        chance: Chance = Chance(0.0, 0.0),
        decay: float = 0.15,
    ):
        self._lengths = range(max_length, min_length - 1, -1)
        self._table = table
        self._decay = decay
        self._follower: dict[tuple[int, ...], int] = {}
        self._tail: tuple[int, ...] = ()
        self._hit = False  # whether the newest token was predicted
        self.chance = chance

    def learn(self, tokens: Sequence[int]) -> None:
        """Read tokens without judging predictions (the prompt)."""
        for token in tokens:
            self._append(token)

    def judge(self, token: int) -> None:
        """Compare the prediction with the token that came, then read it."""
        first, later = self.chance
        hit = self._guess() == token
        # A chain goes on where it was right. The next one mostly begins after a token that it had
        # not, but after one that it had where chains are right to their ends.
        first += self._decay * (hit - first) / (3 if self._hit else 1)
        if self._hit:
            later += self._decay * (hit - later)
        self.chance, self._hit = Chance(first, later), hit
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
