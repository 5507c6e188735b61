"""What runs come to: a row for each form, context and method, and the figures of each prompt.

Fail-closed: a method whose text differed from plain decoding's anywhere, in any run, has no
figures; the row says where it differed instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar

from ..training.report_speed import total
from .methods import PLAIN
from .mlx_lm_methods import MLX_LM
from .schedule import Difference, Run

Key = TypeVar("Key")
Item = TypeVar("Item")


class Spread(NamedTuple):
    """A median over rounds, and the rounds' least and most."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Figures:
    """What one method did with all prompts of one form and context.

    Args:
        prompt_tps: Prompt tokens per second, until the first token.
        first_seconds: Time to the first token, mean over prompts.
        decode_tps: Tokens per second after the first pass; None if no answer was longer.
        passes: Of a round, median.
        tokens_per_pass: Over all rounds.
        acceptance: Share of each proposer's proposals that were accepted; ``proposed`` tells how
            many proposals there were, in all rounds.
        predicted: Speed-up over plain decoding by what the passes cost on the planner's curve.
        speedup_vs_plain: Measured, geometric mean over prompts; None if nothing could be compared.
        speedup_vs_mlx_lm: Likewise, over the prompts where mlx-lm's text is the same too.
        weights: Bytes of the target; likewise ``added``, ``kv``, ``prefill_peak``,
            ``decode_peak`` and ``cache`` (see ``Decoding``), the most of any run.
        pass_bytes: Bytes that a pass reads, on average.
        read_rate: Bytes that passes read per second.
    """

    prompt_tps: Spread
    first_seconds: Spread
    decode_tps: Spread | None
    passes: float
    tokens_per_pass: float
    proposed: dict[str, int]
    acceptance: dict[str, float]
    predicted: float | None
    speedup_vs_plain: float | None
    speedup_vs_mlx_lm: float | None
    weights: int
    added: int
    kv: int
    prefill_peak: int
    decode_peak: int
    cache: int
    pass_bytes: float
    read_rate: float | None


@dataclass(frozen=True)
class Row:
    """One form of the target, one context, one method.

    Args:
        bits: Of the target's weights in memory.
        context: Tokens that the prompts were padded to, or None.
        method: Name of the method.
        prompts: How many prompts.
        differences: The first of each prompt whose text differed.
        figures: None if there are any.
    """

    bits: int
    context: int | None
    method: str
    prompts: int
    differences: tuple[Difference, ...]
    figures: Figures | None


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """The rows, in the order of the runs."""
    rows = []
    for (bits, context), here in grouped(runs, lambda run: (run.bits, run.context)).items():
        for method, mine in grouped(here, lambda run: run.method).items():
            found: dict[str, Difference] = {}
            for run in mine:
                if run.difference:
                    found.setdefault(run.prompt, run.difference)
            count = len({run.prompt for run in mine})
            figures = None if found else figures_of(mine, here)
            rows.append(Row(bits, context, method, count, tuple(found.values()), figures))
    return rows


def figures_of(mine: Sequence[Run], here: Sequence[Run]) -> Figures:
    """The figures of one method.

    Args:
        mine: Its runs.
        here: Those of all methods.
    """
    timed = [run for run in mine if run.timed]
    rounds = list(grouped(timed, lambda run: run.round).values())
    done = [run.decoding for run in timed]
    proposed = total(d.proposed for d in done)
    accepted = total(d.accepted for d in done)
    tokens, passes = sum(len(d.tokens) for d in done), sum(d.passes for d in done)
    costs = [d.cost for d in done if d.cost is not None]
    rates = [rate for some in rounds if (rate := tokens_per_second(some))]
    # Like ``decode_seconds``, without the first pass.
    read = sum((d.passes - 1) * d.pass_bytes for d in done)
    seconds = sum(d.decode_seconds for d in done)
    return Figures(
        prompt_tps=Spread.of(
            [sum(r.prompt_tokens for r in some) / seconds_to_first(some) for some in rounds]
        ),
        first_seconds=Spread.of([seconds_to_first(some) / len(some) for some in rounds]),
        decode_tps=Spread.of(rates) if rates else None,
        passes=median(sum(run.decoding.passes for run in some) for some in rounds),
        tokens_per_pass=tokens / passes,
        proposed=dict(proposed),
        acceptance={who: accepted[who] / count for who, count in proposed.items()},
        predicted=tokens / sum(costs) if len(costs) == len(done) else None,
        speedup_vs_plain=mean_speedup(mine, here, PLAIN),
        speedup_vs_mlx_lm=mean_speedup(mine, here, MLX_LM),
        weights=done[0].weights,
        added=done[0].added,
        kv=max(d.kv for d in done),
        prefill_peak=max(d.prefill_peak for d in done),
        decode_peak=max(d.decode_peak for d in done),
        cache=max(d.cache for d in done),
        pass_bytes=sum(d.passes * d.pass_bytes for d in done) / passes,
        read_rate=read / seconds if read and seconds else None,
    )


def seconds_to_first(runs: Iterable[Run]) -> float:
    """The sum of some runs' times to their first token."""
    return sum(run.decoding.first_seconds for run in runs)


def tokens_per_second(runs: Sequence[Run]) -> float | None:
    """Tokens after each first pass by the time they took; None if there are none."""
    tokens = sum(len(run.decoding.tokens) - run.decoding.first_tokens for run in runs)
    seconds = sum(run.decoding.decode_seconds for run in runs)
    return tokens / seconds if tokens and seconds else None


def mean_speedup(mine: Sequence[Run], here: Sequence[Run], base: str) -> float | None:
    """The geometric mean over prompts of the speed-up over another method; None if unknown."""
    theirs = grouped([run for run in here if run.method == base], lambda run: run.prompt)
    found = [
        speedup(some, theirs.get(prompt, []))
        for prompt, some in grouped(mine, lambda run: run.prompt).items()
    ]
    return geometric_mean([value for value in found if value is not None])


def speedup(mine: Sequence[Run], base: Sequence[Run]) -> float | None:
    """How much faster one method decoded a prompt than another: median over rounds.

    Rates of the same round are compared, which the machine's slower changes do not touch.

    Args:
        mine: A method's runs of the prompt.
        base: The other's.

    Returns:
        None where a text differs from plain decoding's or no answer outlasts its first pass.
    """
    if any(run.difference for run in (*mine, *base)):
        return None
    theirs = {run.round: tokens_per_second([run]) for run in base if run.timed}
    ratios = []
    for run in mine:
        rate, other = tokens_per_second([run]), theirs.get(run.round)
        if rate and other:
            ratios.append(rate / other)
    return median(ratios) if ratios else None


def geometric_mean(values: Sequence[float]) -> float | None:
    """None of no values."""
    return statistics.geometric_mean(values) if values else None


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Things by a key, in the order in which the keys come up."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups
