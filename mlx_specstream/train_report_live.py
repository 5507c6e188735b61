"""Live decoding for the report: every prompt plainly, by fixed trees, and as the product does.

What the product does by default is ``"auto"``. At the end plain and default decoding run once
more, taking turns to be first, and only these are timed: traces depend on a prompt's length, so
the first run of a prompt pays for them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .benchmarking.prompts import Prompt
from .decode.plan import TreePlan
from .decode.planner import Planner
from .decode.processors import Sampling
from .decode.report import PassReport
from .errors import SpecStreamError
from .session import Session
from .speculation import Speculation, decoder_for, menu_of
from .streams.folder import StreamSet
from .target import Target
from .training.report_speed import AUTO, PLAIN, Run

WIDTHS = (3, 2, 2)  # of the streams' own tree


def measure_live(
    model: nn.Module,
    tokenizer: Any,
    streams: StreamSet,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    max_tokens: int = 128,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Run]:
    """Decode prompts in every way.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        streams: What is added to it.
        prompts: What to decode.
        temperatures: Each is measured by itself.
        max_tokens: Most tokens of an answer.
        seed: Of the sampled answers; prompt n has seed ``seed + n``.
        progress: Called with the runs done and in all.

    Raises:
        SpecStreamError: If there is nothing to decode, or a prompt is longer than the context.
    """
    if not prompts or not temperatures:
        raise SpecStreamError("live decoding needs at least one prompt and one temperature")
    trees = fixed_trees(Target.of(model), streams)
    total = len(temperatures) * len(prompts) * len(schedule(trees, 0))
    runs: list[Run] = []
    for temperature in temperatures:
        for number, prompt in enumerate(prompts):
            sampling = Sampling(temp=temperature, seed=seed + number)
            plain: list[int] | None = None
            for way, timed in schedule(trees, number):
                session = WatchedSession(model, tokenizer, streams, speculation_of(way))
                said, run = decode(session, prompt, sampling, max_tokens, way, timed, plain)
                plain = plain or said  # plain decoding is the first
                runs.append(run)
                if progress:
                    progress(len(runs), total)
    return runs


def fixed_trees(target: Target, streams: StreamSet) -> list[str]:
    """The trees to compare: those that ``"auto"`` chooses from, and the streams by themselves."""
    auto = Speculation()
    trees = [str(plan) for plan in menu_of(decoder_for(target, streams, auto), auto)]
    if streams.heads is not None:
        gamma = streams.heads.config.gamma
        trees.append(f"streams:{gamma}")
        if gamma > 1:  # a single width is read as a chain
            trees.append("streams:" + "x".join(map(str, WIDTHS[:gamma])))
    return list(dict.fromkeys(trees))


def schedule(trees: list[str], number: int) -> list[tuple[str, bool]]:
    """The ways to decode prompt ``number``, in order, and whether each run is timed."""
    turns = (PLAIN, AUTO) if number % 2 else (AUTO, PLAIN)
    return [(way, False) for way in (PLAIN, *trees, AUTO)] + [(way, True) for way in turns]


def speculation_of(way: str) -> Speculation:
    """What a way of decoding proposes."""
    return Speculation(enabled=False) if way == PLAIN else Speculation(tree=way)


class Watch:
    """A planner that notes the tree of each pass, and when it was read."""

    def __init__(self, planner: Planner):
        self._planner = planner
        self.trees: list[str] = []
        self.read: list[float] = []

    def plan(self) -> TreePlan:
        return self._planner.plan()

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        self.read.append(time.perf_counter())
        self._planner.observe(plan, report)
        self.trees.append(str(plan))

    def explain(self) -> str:
        return self._planner.explain()


class WatchedSession(Session):
    """A session whose passes are noted."""

    watch: Watch

    def _planner(self, text: list[int]) -> Planner:
        self.watch = Watch(super()._planner(text))
        return self.watch


def decode(
    session: WatchedSession,
    prompt: Prompt,
    sampling: Sampling,
    max_tokens: int,
    way: str,
    timed: bool,
    plain: list[int] | None,
) -> tuple[list[int], Run]:
    """Decode one prompt; its tokens are compared with ``plain`` unless that is None.

    Returns:
        The tokens, and the run.
    """
    began = ended = 0.0

    def computed(done: int, total: int) -> None:
        nonlocal began
        began = time.perf_counter()

    said: list[int] = []
    for last in session.stream(
        prompt.tokens, max_tokens, sampling, prompt_progress_callback=computed
    ):
        said.append(last.token)
        ended = time.perf_counter()
    mx.synchronize()  # the pass that was in flight is not the next run's
    watch = session.watch
    return said, Run(
        prompt=prompt.name,
        category=prompt.category,
        temperature=sampling.temp,
        way=way,
        timed=timed,
        tokens=len(said),
        passes=dict(Counter(watch.trees)),
        proposed=last.proposed,
        accepted=last.accepted,
        same=plain is None or said == plain,
        seconds=ended - began,
        pass_seconds=np.diff(watch.read).tolist(),
    )
