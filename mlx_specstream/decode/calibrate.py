"""Measuring what passes cost: whole passes of the traced loop, on a warm cache, rolled back.

A pass is timed as decoding runs it, proposers and commit included. Single operations would tell
less: their own launch hides small differences, and independent ones hide each other's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx

from ..target.cache import extent
from .costs import CostCurve, Point
from .loop import Decoder, grown
from .menu import stream_branch
from .plan import Branch, TreePlan
from .processors import Sampling
from .promise import STREAMS, Rates

WARM, TIMED = 2, 4  # passes
LONG = 0.5  # seconds, after which one pass to warm up and one to time have to do
NEAR, FAR = 100, 1000  # tokens of context
# Most telling first: a budget may end anywhere after the first ``NEEDED``.
NEAR_ROWS = (1, 2, 8, 4, 16, 5, 3, 6, 10, 12, 7, 9, 11, 13, 14, 15)
FAR_ROWS = (1, 8)
STREAM_ROWS = (8, 2, 16)
NEEDED = 3
# Where the second row costs as much as the first, so do all others: no need to wait for them.
LINEAR = 1.8
SHARE_AGAIN = 0.25  # of the budget, for what is known already


class Wanted(NamedTuple):
    """A pass to measure."""

    rows: int
    context: int
    streams: bool


def wanted(streams: bool, most_context: int | None = None) -> list[Wanted]:
    """What a whole curve consists of, the most telling passes first.

    Args:
        streams: Whether there are streams.
        most_context: Tokens that the model can hold, or None.
    """
    room = most_context or 1 << 30
    context = min(NEAR, room // 2)
    near = [Wanted(rows, context, False) for rows in NEAR_ROWS]
    far = [Wanted(rows, FAR, False) for rows in FAR_ROWS]
    asked = [Wanted(rows, context, True) for rows in STREAM_ROWS] if streams else []
    order = [*near[:3], *asked[:1], *near[3:5], *far, *asked[1:], *near[5:]]
    return [near[0], *(w for w in order[1:] if w.context + 2 * w.rows < room)]


def measure(
    decoder: Decoder,
    plans: Iterable[tuple[Wanted, TreePlan]],
    known: Sequence[Point] = (),
    budget: float = float("inf"),
    progress: Callable[[Point], None] | None = None,
) -> list[Point]:
    """Time passes until all are known or the budget is spent.

    If nothing is missing, a little of the budget goes to one or more of the known ones: of all the
    times that a pass was measured the shortest is the one that nothing disturbed.

    Args:
        decoder: What runs them.
        plans: Passes to measure, in order, each with a tree that makes it.
        known: Passes measured before.
        budget: Seconds; at least ``NEEDED`` passes are measured whatever it is.
        progress: Called with each pass measured.
    """
    seconds = {Wanted(*point[:3]): point.seconds for point in known}
    began, plans = time.perf_counter(), list(plans)

    def take(want: Wanted, plan: TreePlan) -> None:
        took = seconds_of_pass(decoder, plan, want.context)
        seconds[want] = min(took, seconds.get(want, took))
        if progress:
            progress(Point(*want, took))

    if is_linear(seconds) or all(want in seconds for want, _ in plans):
        again = [pair for pair in plans if pair[0] in seconds]
        for want, plan in random.sample(again, len(again)):
            if time.perf_counter() > began + SHARE_AGAIN * budget:
                break
            take(want, plan)
    for want, plan in plans:
        late = len(seconds) >= NEEDED and time.perf_counter() > began + budget
        if late or is_linear(seconds):
            break
        if want not in seconds:
            take(want, plan)
    return [Point(*want, took) for want, took in seconds.items()]


def is_linear(seconds: dict[Wanted, float]) -> bool:
    """Whether two rows cost so much more than one that no tree can pay."""
    one, two = (
        min((took for want, took in seconds.items() if want.rows == rows), default=None)
        for rows in (1, 2)
    )
    return one is not None and two is not None and two > LINEAR * one


def seconds_of_pass(decoder: Decoder, plan: TreePlan, context: int) -> float:
    """Seconds of a tree's pass with some tokens in the cache."""
    target, sampling = decoder.target, Sampling()
    run, rows = decoder.runner(plan, sampling)
    cache = target.make_cache()
    cache.reserve(context + 2 * rows)
    text = [token % target.vocab_size for token in range(context + 1)]
    state, place = decoder.begin(text, cache), mx.array(context, dtype=mx.int32)
    state = state._replace(history=grown(state.history, context + rows + 2, cache.step))
    cache.kv = []  # nobody else holds the buffers, so a pass writes into them
    seed, reads = mx.array(0, dtype=mx.uint32), extent(context + 2 * rows, cache.step << 20)
    mx.eval(state)
    times: list[float] = []
    while len(times) < WARM + TIMED and not (len(times) > 1 and sum(times) > LONG):
        began = time.perf_counter()
        state, report, _ = run(min(reads, state.kv[0].shape[2]), state, seed)
        mx.eval(report, state)
        times.append(time.perf_counter() - began)
        state = state._replace(length=place)  # rolled back
    # Whatever interrupts a pass only makes it longer.
    return min(times[min(WARM, len(times) - 1) :])


def trees_of(
    wishes: Iterable[Wanted], lookups: str, rates: Rates | None
) -> list[tuple[Wanted, TreePlan]]:
    """A tree for each pass to measure; those that nobody here can fill are left out.

    Args:
        wishes: Passes to measure.
        lookups: Who fills chains, such as ``"ngram|table"``; "" for nobody.
        rates: Of the streams; None if there are none.
    """
    made = []
    for want in wishes:
        branches, left = [], want.rows - 1
        if want.streams and rates:
            tree = stream_branch(rates, min(4, left))
            branches, left = [tree], left - len(tree)
        if left and lookups:
            branches.insert(0, Branch.of_widths(lookups, (1,) * left))
        plan = TreePlan(tuple(branches))
        if len(plan.layout) == want.rows and (STREAMS in plan.proposers) == want.streams:
            made.append((want, plan))
    return made


def calibrated(
    decoder: Decoder,
    lookups: str,
    rates: Rates | None,
    known: Sequence[Point] = (),
    budget: float = float("inf"),
    progress: Callable[[Point], None] | None = None,
) -> CostCurve:
    """A cost curve of a decoder, measured as far as a budget reaches.

    Args:
        decoder: What is measured.
        lookups: Who fills chains; "" for nobody.
        rates: Of its streams; None if there are none.
        known: Passes measured before.
        budget: Seconds to spend, roughly.
        progress: Called with each pass measured.
    """
    wishes = trees_of(wanted(bool(rates), decoder.target.context), lookups, rates)
    return CostCurve(measure(decoder, wishes, known, budget, progress))
