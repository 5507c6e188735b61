"""The decode loop.

Invariant: *the cache holds every committed token except the root*, the newest one. A pass runs
the root and a tree of proposals below it, learns what the target says after each row, commits
the path that agrees and one token more, and that token is the next root:

    history  p r o m p t a b c R            R: the root, at position ``length``
    cache    p r o m p t a b c              ``length`` rows; the pass writes its rows after them

Everything a pass leaves to the next stays on the device, so the next pass is dispatched before
the host reads what this one committed. The host reads one small array a pass, one pass behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import UsageError
from ..streams.heads import StreamHeads
from ..target import Target, TreeCache
from ..target.cache import extent, move_rows
from .evidence import Experience
from .noise import gumbel_rows
from .plan import TreePlan
from .planner import Planner
from .processors import Sampling, choose, penalised, rows_of_noise
from .proposers import Context, Proposer, StreamProposer
from .report import PassReport, read
from .verify import accept

MOST_TRACES = 24  # kept at a time; one for each tree and set of sampling options


class State(NamedTuple):
    """What one pass leaves to the next, on the device.

    Args:
        kv: The cache's buffers.
        history: Committed tokens by position, ``(capacity,)`` int32.
        length: Position of the root, int32 scalar.
        memories: Each proposer's memory.
    """

    kv: list[mx.array]
    history: mx.array
    length: mx.array
    memories: list[tuple[mx.array, ...]]


def one_pass(
    model: Target | StreamHeads,
    proposers: Sequence[Proposer],
    plan: TreePlan,
    sampling: Sampling,
    extent: int,
    state: State,
    seed: mx.array,
) -> tuple[State, mx.array, mx.array]:
    """Propose, run, choose, accept, commit: one pass, without leaving the device.

    Args:
        model: The target, or its streams where the pass is to carry them.
        proposers: All proposers.
        plan: The tree to fill and verify.
        sampling: How tokens are chosen.
        extent: Cache rows that attention reads.
        state: From the pass before.
        seed: Of the noise, uint32 scalar.

    Returns:
        The next state; a report ``[last accepted row, (who filled it, proposals) of each branch
        …, the tree's tokens …, committed tokens …]``, int32; and the logits,
        ``(rows, vocabulary)``.
    """
    target = model if isinstance(model, Target) else model.target
    layout, length = plan.layout, state.length
    first = length + 1  # position of the token that the root predicts
    depths = layout.max_depth + 1
    noise = None if sampling.greedy else gumbel_rows(seed, first, depths, target.vocab_size)

    context = Context(target, state.history, length, state.kv, extent, sampling, noise)
    tokens, valid, sources, kv = fill_tree(proposers, plan, state.memories, context)

    output = model.forward(tokens, kv, layout, length, extent)
    logits = target.logits(output.hidden)
    logits = penalised(logits, sampling, state.history, length, tokens, layout)
    said = choose(logits, sampling, None if noise is None else rows_of_noise(noise, layout))

    verdict = accept(layout, tokens, valid, said)
    kv = output.kv if layout.is_chain else move_rows(output.kv, length, verdict.path)
    # Past the accepted path ``committed`` repeats itself; the next pass writes over that.
    history = mx.slice_update(state.history, verdict.committed, first.reshape(1), axes=(0,))
    memories = [
        proposer.observe(memory, output, verdict)
        for proposer, memory in zip(proposers, state.memories, strict=True)
    ]
    report = mx.concatenate([verdict.row.reshape(1), *sources, tokens, verdict.committed])
    return State(kv, history, first + verdict.accepted, memories), report, logits


def fill_tree(
    proposers: Sequence[Proposer],
    plan: TreePlan,
    memories: Sequence[tuple[mx.array, ...]],
    context: Context,
) -> tuple[mx.array, mx.array, list[mx.array], list[mx.array]]:
    """Let every branch be filled by the first of its proposers that has something to propose.

    Returns:
        The tree's tokens ``(rows,)`` int32 and validity ``(rows,)`` bool, the root first; for
        each branch which of its proposers filled it and the number of proposals, ``(2,)`` int32;
        the cache's buffers.

    Raises:
        UsageError: If nobody here has the name that the plan asks for.
    """
    tokens, valid = [context.history[context.length].reshape(1)], [mx.array([True])]
    sources = []
    known = {p.name: (p, memory) for p, memory in zip(proposers, memories, strict=True)}
    for branch in plan.branches:
        filled, right = mx.zeros((len(branch),), mx.int32), mx.zeros((len(branch),), mx.bool_)
        source = mx.array(0)
        for number, name in reversed(list(enumerate(branch.proposers))):
            if name not in known:
                raise UsageError(f"the tree asks for '{name}', which nobody here proposes")
            proposer, memory = known[name]
            made = proposer.propose(branch, memory, context)
            context = context._replace(kv=made.kv)
            has = mx.any(made.valid)  # then it takes the place of those after it
            filled, right = mx.where(has, made.tokens, filled), mx.where(has, made.valid, right)
            source = mx.where(has, number, source)
        tokens.append(filled)
        valid.append(right)
        sources.append(mx.stack([source, mx.sum(right)]).astype(mx.int32))
    return mx.concatenate(tokens), mx.concatenate(valid), sources, context.kv


class Decoder:
    """Runs passes for one target and its proposers.

    Args:
        target: The target.
        proposers: What may fill trees; their names must differ.
        compile: Trace each kind of pass once with ``mx.compile`` and replay it.

    Raises:
        ValueError: If two proposers have one name.
    """

    def __init__(self, target: Target, proposers: Sequence[Proposer] = (), compile: bool = False):
        names = [proposer.name for proposer in proposers]
        if len(set(names)) < len(names):
            raise ValueError(f"proposers must have names of their own, not {names}")
        self.target = target
        self.proposers = list(proposers)
        self.compile = compile
        self.experience: Experience | None = None  # for whoever plans its passes
        self._traced: dict[Any, Any] = {}

    def begin(self, tokens: list[int], cache: TreeCache) -> State:
        """What the first pass after a text is run from, with the cache's buffers.

        Args:
            tokens: The text so far; the last is the root.
            cache: Holds all of them but the last.
        """
        # Sizes are whole steps, so that prompts of many lengths share their traces.
        history = grown(mx.array(tokens, dtype=mx.int32), len(tokens) + 1, cache.step)
        memories = [proposer.start(self.target) for proposer in self.proposers]
        return State(cache.kv, history, mx.array(len(tokens) - 1, dtype=mx.int32), memories)

    def decode(
        self, tokens: list[int], cache: TreeCache, planner: Planner, sampling: Sampling, seed: int
    ) -> Iterator[PassReport]:
        """Decode from the last of ``tokens``, which are the text so far, without end.

        The cache must hold all of them but the last; it holds all committed tokens but the
        newest whenever a report is yielded, and when the iterator is closed.

        The caller stops it, at the latest where the model's positions end.

        Yields:
            What each pass committed.
        """
        state = self.begin(tokens, cache)
        noise_seed = mx.array(seed, dtype=mx.uint32)
        ahead = 0  # tokens that passes in flight may commit

        def dispatch() -> tuple[TreePlan, mx.array, mx.array]:
            nonlocal state, ahead
            plan = planner.plan()
            run, rows = self.runner(plan, sampling)
            needed = cache.length + ahead + rows
            cache.reserve(needed)
            state = State(cache.kv, grown(state.history, needed + 1, cache.step), *state[2:])
            state, report, logits = run(extent(needed, cache.capacity), state, noise_seed)
            # Nobody holds the old buffers now, so evaluation writes into them: no copy.
            cache.kv = state.kv
            mx.async_eval(report, state)
            ahead += plan.layout.max_depth + 1
            return plan, report, logits

        flight = dispatch()
        while True:
            following = dispatch()
            report = read(self.proposers, *flight)
            cache.length += len(report.tokens)
            ahead -= flight[0].layout.max_depth + 1
            planner.observe(flight[0], report)
            flight = following
            yield report

    def runner(
        self, plan: TreePlan, sampling: Sampling
    ) -> tuple[Callable[[int, State, mx.array], tuple[State, mx.array, mx.array]], int]:
        """The function that runs a plan's passes, and the cache rows that one writes."""
        used = [p for p in self.proposers if p.name in plan.proposers]
        model: Target | StreamHeads = self.target
        for proposer in self.proposers:
            # Where watching the pass is free, streams know their state in whatever pass they join.
            if isinstance(proposer, StreamProposer) and (
                proposer in used or proposer.streams.rides_along
            ):
                model = proposer.streams
        rows = max([model.rows_written(plan.layout), *(p.scratch_rows for p in used)])
        run = partial(one_pass, model, self.proposers, plan, sampling)
        if not self.compile:
            return run, rows
        key = (plan, sampling.signature)
        traced = self._traced.pop(key, None)
        if traced is None:
            if len(self._traced) >= MOST_TRACES:
                self._traced.pop(next(iter(self._traced)))
            traced = mx.compile(lambda *arguments: run(*_as_state(arguments)))
        self._traced[key] = traced  # the last one used is the last to go

        def replay(extent: int, state: State, seed: mx.array) -> tuple[State, mx.array, mx.array]:
            state_out, report, logits = traced(extent, tuple(state), seed)
            return State(*state_out), report, logits

        return replay, rows


def _as_state(arguments: tuple) -> tuple[int, State, mx.array]:
    """A traced function gets plain tuples."""
    extent, state, seed = arguments
    return extent, State(*state), seed


def grown(history: mx.array, tokens: int, step: int) -> mx.array:
    """The history with room for ``tokens`` tokens, in whole steps."""
    missing = -(-tokens // step) * step - history.shape[0]
    return mx.pad(history, (0, missing)) if missing > 0 else history
