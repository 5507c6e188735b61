"""Replaying a recording: the passes that a planner's trees would have made, on a simulated clock.

A pass at position p commits one token more than the deepest branch had right there; time moves
on by what the cost curve says. The planner is the real one, told of each pass one pass late, as
the decode loop tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from ..decode.evidence import LookupShadow
from ..decode.plan import Branch, TreePlan
from ..decode.planner import Planner
from ..decode.promise import STREAMS, Chance
from ..decode.report import BranchOutcome, PassReport
from ..errors import UsageError
from .recording import MOST_LOOKED_UP, RecordedPrompt, Recording

NO_LOGITS = mx.zeros((0, 0))
Price = Callable[[TreePlan, int], float]  # seconds of a tree's pass, by the tokens in the cache


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Pass(NamedTuple):
    """A pass as it would have been.

    Args:
        plan: Its tree.
        context: Tokens in the cache before it.
        committed: Tokens.
    """

    plan: TreePlan
    context: int
    committed: int


class RecordedShadow(LookupShadow):
    """The lookups' shadow where it is recorded, not looked up, whether they were right.

    Args:
        prompt: The answer that is replayed.
        chance: What to expect before anything was seen.
    """

    def __init__(self, prompt: RecordedPrompt, chance: Chance):
        super().__init__(1, 1, None, chance)
        self._prompt, self._place = prompt, 0

    def learn(self, tokens: Sequence[int]) -> None:
        """The prompt is in what was recorded."""

    def _guess(self) -> int | None:
        right = self._prompt.lookup[self._place] > 0
        return self._prompt.tokens[self._place] if right else None

    def _append(self, token: int) -> None:
        self._place += 1


def passes(
    recording: Recording, prompt: RecordedPrompt, planner: Planner, price: Price, clock: Clock
) -> list[Pass]:
    """The passes that a planner would have made for one answer.

    Args:
        recording: Where the answer is from.
        prompt: The answer.
        planner: Chooses the trees.
        price: What passes cost.
        clock: Moved on by every pass.

    Raises:
        UsageError: If a tree has a branch that was not recorded.
    """
    made: list[Pass] = []
    place, ready = 0, False  # streams know nothing before the first pass
    flight = planner.plan()
    while place < len(prompt.tokens):
        following = planner.plan()
        outcomes = [outcome(recording, prompt, place, ready, b) for b in flight.branches]
        committed = 1 + max((len(o.right) for o in outcomes), default=0)
        tokens = prompt.tokens[place : place + committed]
        made.append(Pass(flight, prompt.prompt_tokens + place, len(tokens)))
        clock.seconds += price(flight, made[-1].context)
        planner.observe(flight, _report(flight, tokens, outcomes))
        place += len(tokens)
        ready = recording.rides_along or STREAMS in flight.proposers
        flight = following
    return made


def outcome(
    recording: Recording, prompt: RecordedPrompt, place: int, ready: bool, branch: Branch
) -> BranchOutcome:
    """How right a branch would have been.

    Args:
        recording: Where the answer is from.
        prompt: The answer.
        place: Position of the first token that the branch proposes.
        ready: Whether streams know their state.
        branch: The branch.

    Raises:
        UsageError: If the branch was not recorded.
    """
    if branch.proposer == STREAMS and recording.gamma:
        _check_depth(branch, recording.gamma)
        right = along(branch, prompt.streams[place]) if ready else ()
        return BranchOutcome(STREAMS, len(branch) * ready, right)
    if branch.proposer == recording.lookups:
        _check_depth(branch, MOST_LOOKED_UP)
        filled = prompt.filled[place]
        right = along(branch, [0] * prompt.lookup[place])
        return BranchOutcome(branch.proposers[max(filled, 0)], len(branch) * (filled >= 0), right)
    known = [recording.lookups, *([STREAMS] if recording.gamma else [])]
    raise UsageError(f"the recording knows {' and '.join(known)}, not '{branch.proposer}'")


def along(branch: Branch, ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a branch's nodes down the path of right tokens, as far as it has them.

    >>> along(Branch.of_paths("streams", [(0, 0), (1,)]), [1, 0])
    (1,)
    """
    nodes, at, right = _nodes(branch), -1, []
    for rank in ranks:
        if (at, rank) not in nodes:
            break
        at = nodes[at, rank]
        right.append(rank)
    return tuple(right)


@lru_cache(maxsize=256)
def _nodes(branch: Branch) -> dict[tuple[int, int], int]:
    """The number of the node that is some parent's candidate of some rank."""
    pairs = zip(branch.parents, branch.ranks, strict=True)
    return {pair: number for number, pair in enumerate(pairs)}


def _check_depth(branch: Branch, most: int) -> None:
    """Refuse a tree deeper than what was recorded."""
    depth = max(branch.depths)
    if depth > most:
        raise UsageError(f"the tree '{branch}' is {depth} deep; {most} tokens were recorded")


def _report(plan: TreePlan, tokens: list[int], outcomes: list[BranchOutcome]) -> PassReport:
    """What the decode loop would have told of a pass, as far as planners read it."""
    return PassReport(
        plan=plan,
        tokens=tokens,
        owners=[None] * len(tokens),
        branches=outcomes,
        proposed={},
        logits=NO_LOGITS,
        rows=[0] * len(tokens),
    )
