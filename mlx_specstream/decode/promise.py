"""How many tokens a tree promises to commit, from how often its proposers are right.

A pass commits the root's successor, whatever it is, and one token more for every level of the
tree at which some path is right: ``1 + sum over depths d of P(a path of d nodes is right)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .plan import Branch, TreePlan

STREAMS = "streams"
# Lookups and streams are right about the same easy tokens more often than chance would have it:
# of what two independent proposers would add to the better one, this share remains
# (docs/planner.md).
SHARE_ADDED = 0.7


class Chance(NamedTuple):
    """How often a chain's next token is right.

    Args:
        first: Its first one.
        later: One whose predecessor was right.
    """

    first: float
    later: float


Rates = Sequence[Sequence[float]]  # [depth][rank]: right, given that the parent is


def promised_tokens(plan: TreePlan, lookups: Chance, rates: Rates) -> float:
    """Tokens per pass to expect of a tree.

    Args:
        plan: The tree.
        lookups: Of the branches that lookups fill.
        rates: Of the streams.
    """
    reached: list[float] = []
    for branch in plan.branches:
        mine = (
            stream_reach(branch, rates)
            if STREAMS in branch.proposers
            else chain_reach(lookups, max(branch.depths))
        )
        reached = [
            together(a, b)
            for a, b in zip(
                reached + [0.0] * (len(mine) - len(reached)),
                mine + [0.0] * (len(reached) - len(mine)),
                strict=True,
            )
        ]
    return 1 + sum(reached)


def together(one: float, other: float) -> float:
    """The chance that one of two proposers reaches a depth."""
    low, high = sorted((one, other))
    return high + SHARE_ADDED * low * (1 - high)


def chain_reach(chance: Chance, length: int) -> list[float]:
    """For each depth the chance that a chain is right down to it."""
    return [chance.first * chance.later**depth for depth in range(length)]


def stream_reach(branch: Branch, rates: Rates) -> list[float]:
    """For each depth the chance that one of a stream tree's nodes there, and its path, is right."""
    depths = branch.depths
    worth: list[float] = []
    reach = [0.0] * max(depths)
    for node, parent in enumerate(branch.parents):
        ranks = rates[depths[node] - 1] if depths[node] <= len(rates) else ()
        rank = branch.ranks[node]
        own = ranks[rank] if rank < len(ranks) else 0.0
        worth.append(own * (worth[parent] if parent >= 0 else 1.0))
        reach[depths[node] - 1] += worth[node]
    return [min(value, 1.0) for value in reach]


def right_path(branch: Branch, tokens: Sequence[int], said: Iterable[int]) -> tuple[int, ...]:
    """The ranks of a filled branch's nodes along what the target said, as deep as it was right.

    Args:
        branch: The branch.
        tokens: What its nodes proposed.
        said: The tokens that came.
    """
    at, ranks = -1, []
    for token in said:
        children = (
            n for n, parent in enumerate(branch.parents) if parent == at and tokens[n] == token
        )
        found = next(children, None)
        if found is None:
            break
        at = found
        ranks.append(branch.ranks[at])
    return tuple(ranks)
