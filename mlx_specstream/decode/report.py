"""What the host learns of a pass: what was committed, and how right each branch was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import mlx.core as mx

from .plan import TreePlan
from .promise import right_path
from .proposers import Proposer


class BranchOutcome(NamedTuple):
    """How right a branch was, whether or not its path was the one committed.

    Args:
        proposer: Who filled it.
        proposed: How many proposals it held.
        right: Ranks of its nodes along what the target said, as deep as they were right.
    """

    proposer: str
    proposed: int
    right: tuple[int, ...]


@dataclass
class PassReport:
    """What a pass committed, as read by the host.

    Args:
        plan: The tree it verified.
        tokens: The committed tokens; the last is the new root.
        owners: Who proposed each of them; None for the target's own token.
        branches: How right each branch of the tree was.
        proposed: How many proposals each proposer made.
        logits: The pass's logits after penalties, ``(rows, vocabulary)``, on the device.
        rows: For each token the row of ``logits`` it was chosen from.
    """

    plan: TreePlan
    tokens: list[int]
    owners: list[str | None]
    branches: list[BranchOutcome]
    proposed: dict[str, int]
    logits: mx.array
    rows: list[int]


def read(
    proposers: Sequence[Proposer], plan: TreePlan, report: mx.array, logits: mx.array
) -> PassReport:
    """The one host read of a pass.

    Args:
        proposers: Of the decoder.
        plan: The tree it verified.
        report: As ``loop.one_pass`` made it.
        logits: Likewise.
    """
    row, *values = cast(list[int], report.tolist())
    filled, rows = 2 * len(plan.branches), len(plan.layout)
    sources, counts = values[0:filled:2], values[1:filled:2]
    tree, committed = values[filled : filled + rows], values[filled + rows :]
    path = plan.layout.paths[row][: plan.layout.depth[row] + 1].tolist()
    said = committed[: len(path)]
    branches, at = [], 1
    proposed = {proposer.name: 0 for proposer in proposers}
    for branch, source, count in zip(plan.branches, sources, counts, strict=True):
        mine = tree[at : at + len(branch)]
        right = right_path(branch, mine, said) if count else ()
        branches.append(BranchOutcome(branch.proposers[source], count, right))
        proposed[branches[-1].proposer] += count
        at += len(branch)
    return PassReport(
        plan=plan,
        tokens=said,
        owners=[branches[plan.branch_of[node]].proposer for node in path[1:]] + [None],
        branches=branches,
        proposed=proposed,
        logits=logits,
        rows=path,
    )
