"""What runs of live decoding come to: tokens per pass, and the speed-up predicted and measured.

The cost of a tree is the median time of its passes by that of plain passes. *Predicted* is tokens
by what their passes cost, in plain passes; *measured* is the time that plain decoding took by the
time that this way took, on the same prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

PLAIN, AUTO = "plain", "auto"  # ways of decoding beside fixed trees
NONE = "none"  # the empty tree: a plain pass


@dataclass(frozen=True)
class Run:
    """One prompt decoded one way.

    Args:
        prompt: Name of the prompt.
        category: Its category.
        temperature: 0 is greedy.
        way: ``"plain"``, ``"auto"`` or the tree of every pass.
        timed: Whether everything it needed had been traced.
        tokens: Tokens generated, with the end-of-text token.
        passes: Passes by tree.
        proposed: Proposals by proposer; ``accepted`` likewise.
        same: Whether the tokens are those of plain decoding.
        seconds: From the end of the prompt's computation to the last token.
        pass_seconds: Time between the reads of each pass but the first.
    """

    prompt: str
    category: str
    temperature: float
    way: str
    timed: bool
    tokens: int
    passes: dict[str, int]
    proposed: dict[str, int]
    accepted: dict[str, int]
    same: bool
    seconds: float
    pass_seconds: list[float]


@dataclass(frozen=True)
class Way:
    """What one way of decoding did at one temperature, over all prompts.

    Args:
        temperature: 0 is greedy.
        way: ``"auto"`` or the tree of every pass.
        prompts: How many prompts.
        identical: How many of them gave the text of plain decoding in every run.
        tokens: Tokens generated.
        passes: Passes made.
        by_category: Tokens per pass of each category.
        acceptance: Share of each proposer's proposals that were accepted.
        pass_seconds: Median time of a pass; None if none was timed.
        cost: That relative to a plain pass.
        predicted: Speed-up by tokens per pass and the cost of its passes' trees.
        measured: Time of plain decoding relative to this way's; of ``"auto"`` only.
    """

    temperature: float
    way: str
    prompts: int
    identical: int
    tokens: int
    passes: int
    by_category: dict[str, float]
    acceptance: dict[str, float]
    pass_seconds: float | None
    cost: float | None
    predicted: float | None
    measured: float | None

    @property
    def tokens_per_pass(self) -> float:
        """Mean over all passes."""
        return self.tokens / self.passes


def summarise(runs: Sequence[Run]) -> list[Way]:
    """Each way but plain decoding, at each temperature, in the order of the runs."""
    ways = []
    for temperature in dict.fromkeys(run.temperature for run in runs):
        by_way: dict[str, list[Run]] = {}
        for run in runs:
            if run.temperature == temperature:
                by_way.setdefault(run.way, []).append(run)
        plain = by_way.pop(PLAIN, [])
        # A tree's passes inside "auto" cost what they cost where every pass has that tree.
        costs: dict[str, float | None] = {NONE: 1.0}
        costs |= {way: _cost(every, plain) for way, every in by_way.items()}
        ways += [_way(every, plain, costs) for every in by_way.values()]
    return ways


def _way(every: list[Run], plain: list[Run], costs: dict[str, float | None]) -> Way:
    """What one way did at one temperature.

    Args:
        every: Its runs; where some are timed, only these count.
        plain: Plain decoding's of the same prompts.
        costs: Of each way and tree, in plain passes.
    """
    way = every[0].way
    runs = _counted(every)
    passes = total(run.passes for run in runs)
    proposed, accepted = total(r.proposed for r in runs), total(r.accepted for r in runs)
    by_category: dict[str, list[Run]] = {}
    for run in runs:
        by_category.setdefault(run.category, []).append(run)
    measured = None
    if way == AUTO:
        plain_seconds = sum(run.seconds for run in plain if run.timed)
        measured = plain_seconds / sum(run.seconds for run in runs)
    return Way(
        temperature=every[0].temperature,
        way=way,
        prompts=len(runs),
        identical=len({r.prompt for r in every} - {r.prompt for r in every if not r.same}),
        tokens=_tokens(runs),
        passes=sum(passes.values()),
        by_category={
            category: _tokens(some) / sum(total(run.passes for run in some).values())
            for category, some in by_category.items()
        },
        acceptance={who: accepted[who] / count for who, count in proposed.items()},
        pass_seconds=_median_pass(runs),
        cost=costs[way],
        predicted=_predicted(_tokens(runs), passes, costs),
        measured=measured,
    )


def _predicted(tokens: int, passes: Counter[str], costs: dict[str, float | None]) -> float | None:
    """Tokens by what their passes cost, in plain passes; None if a tree's cost is not known."""
    paid = 0.0
    for tree, count in passes.items():
        cost = costs.get(tree)
        if cost is None:
            return None
        paid += count * cost
    return tokens / paid


def _cost(every: list[Run], plain: list[Run]) -> float | None:
    """Median time of a pass relative to a plain pass; None if either is not known."""
    seconds, base = _median_pass(_counted(every)), _median_pass(plain)
    return seconds / base if seconds and base else None


def _median_pass(runs: list[Run]) -> float | None:
    """Median time of a pass in seconds; None if no run had more than one."""
    seconds = [each for run in runs for each in run.pass_seconds]
    return median(seconds) if seconds else None


def _counted(every: list[Run]) -> list[Run]:
    """The timed runs of a way, or all where none was timed."""
    return [run for run in every if run.timed] or every


def _tokens(runs: list[Run]) -> int:
    return sum(run.tokens for run in runs)


def total(counts: Iterable[dict[str, int]]) -> Counter[str]:
    """The sum of some counts, without what comes to 0."""
    return sum(map(Counter, counts), Counter())
