"""What a recording and a cost curve predict: speed-up, tokens per pass, and the trees chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import geometric_mean
from typing import Any, NamedTuple

from ..decode.costs import CostCurve
from ..decode.evidence import ASSUMED_RATES, Experience
from ..decode.menu import candidates, menu_for
from ..decode.plan import TreePlan
from ..decode.planner import PLAIN, AutoPlanner, FixedPlanner
from ..decode.promise import Rates
from .recording import Recording
from .replay import Clock, Pass, Price, RecordedShadow, passes
from .rows import grouped

ROUNDING = 1e-9  # of sums of the same costs, in another order


class Replayed(NamedTuple):
    """One answer, replayed.

    Args:
        id: Name of the prompt.
        category: What kind of prompt it is.
        passes: In order.
        seconds: Of all of them.
        plain_seconds: Of plain decoding.
    """

    id: str
    category: str
    passes: list[Pass]
    seconds: float
    plain_seconds: float

    @property
    def speedup(self) -> float:
        """Over plain decoding."""
        return self.plain_seconds / self.seconds

    @property
    def slower(self) -> bool:
        """Whether plain decoding would have been faster, by more than rounding."""
        return self.speedup < 1 - ROUNDING

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        tokens = sum(one.committed for one in self.passes)
        return {
            "id": self.id,
            "category": self.category,
            "tokens": tokens,
            "tokens_per_pass": tokens / len(self.passes),
            "speedup": self.speedup,
        }


@dataclass(frozen=True)
class Outcome:
    """What some replayed answers come to.

    Args:
        prompts: How many.
        tokens_per_pass: Of all their passes.
        speedup: Over plain decoding, geometric mean over prompts.
        worst_prompt: Name of the prompt that gained least.
        worst_speedup: Of that prompt.
        slower: How many prompts plain decoding would have answered faster.
    """

    prompts: int
    tokens_per_pass: float
    speedup: float
    worst_prompt: str
    worst_speedup: float
    slower: int

    @classmethod
    def of(cls, replayed: Sequence[Replayed]) -> Outcome:
        every = [one for some in replayed for one in some.passes]
        worst = min(replayed, key=lambda some: some.speedup)
        return cls(
            len(replayed),
            sum(one.committed for one in every) / len(every),
            geometric_mean([some.speedup for some in replayed]),
            worst.id,
            worst.speedup,
            sum(some.slower for some in replayed),
        )


@dataclass(frozen=True)
class Simulation:
    """What is predicted for one cost curve.

    Args:
        planned: Every answer with the planner's trees.
        menu: The trees it chose from, beside none.
        best_fixed: The one tree of all candidates, and none, that would have been fastest for all
            passes.
        fixed: Every answer with that.
    """

    planned: list[Replayed]
    menu: list[TreePlan]
    best_fixed: TreePlan
    fixed: list[Replayed]

    @property
    def overall(self) -> Outcome:
        """Of all answers, with the planner."""
        return Outcome.of(self.planned)

    @property
    def fixed_overall(self) -> Outcome:
        """Of all answers, with the best fixed tree."""
        return Outcome.of(self.fixed)

    @property
    def by_category(self) -> dict[str, Outcome]:
        """With the planner, each kind of prompt."""
        categories = grouped(self.planned, lambda some: some.category)
        return {name: Outcome.of(some) for name, some in categories.items()}

    @property
    def trees(self) -> dict[str, float]:
        """Share of the passes that each tree verified, the commonest first."""
        counts = Counter(str(one.plan) for some in self.planned for one in some.passes)
        return {tree: count / counts.total() for tree, count in counts.most_common()}

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "overall": vars(self.overall),
            "by_category": {name: vars(each) for name, each in self.by_category.items()},
            "trees": self.trees,
            "best_fixed_tree": {"tree": str(self.best_fixed), **vars(self.fixed_overall)},
            "prompts": [some.to_dict() for some in self.planned],
        }


def simulate(recording: Recording, costs: CostCurve) -> Simulation:
    """Replay a recording with the planner, as a machine of these costs would run it.

    As in a session, the planner keeps what it learns from one answer to the next. Streams take
    part if the curve says what they cost.
    """
    rates = rates_of(recording, costs)
    trees = candidates(recording.lookups, rates)
    menu = menu_for(costs, trees, rates)
    price, clock = cache(costs.of), Clock()
    experience = Experience(costs, rates, now=clock)
    planned = []
    for prompt in recording.prompts:
        shadow = RecordedShadow(prompt, experience.lookups)
        planner = AutoPlanner(
            menu,
            experience,
            shadow,
            [0] * prompt.prompt_tokens,
            in_pairs=not recording.rides_along,
        )
        made = passes(recording, prompt, planner, price, clock)
        planned.append(_replayed(prompt.id, prompt.category, made, price))
    fixed = {tree: with_tree(recording, price, tree) for tree in [PLAIN, *trees]}
    best = max(fixed, key=lambda tree: Outcome.of(fixed[tree]).speedup)
    return Simulation(planned, menu, best, fixed[best])


def with_tree(recording: Recording, price: Price, tree: TreePlan) -> list[Replayed]:
    """Replay a recording with one tree for all passes."""
    clock = Clock()
    replayed = []
    for prompt in recording.prompts:
        made = passes(recording, prompt, FixedPlanner(tree), price, clock)
        replayed.append(_replayed(prompt.id, prompt.category, made, price))
    return replayed


def prices_streams(costs: CostCurve) -> bool:
    """Whether a curve says what passes with streams cost."""
    return any(point.streams for point in costs.points)


def rates_of(recording: Recording, costs: CostCurve) -> Rates | None:
    """How often the streams' candidates are to be expected right; None to do without streams."""
    if not (recording.gamma and prices_streams(costs)):
        return None
    return (recording.rates or ASSUMED_RATES)[: recording.gamma]


def _replayed(name: str, category: str, made: list[Pass], price: Price) -> Replayed:
    """Passes with what they cost, and what plain decoding would have."""
    seconds = sum(price(one.plan, one.context) for one in made)
    return Replayed(name, category, made, seconds, _plain_seconds(made, price))


def _plain_seconds(made: Iterable[Pass], price: Price) -> float:
    """A pass over one row for every token."""
    return sum(
        price(PLAIN, one.context + number) for one in made for number in range(one.committed)
    )
