"""What a pass verifies: a tree put together from the branches of several proposers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..errors import UsageError
from ..target.rows import TreeLayout

MOST_ROWS = 64  # of a tree


@dataclass(frozen=True)
class Branch:
    """A part of the tree, below the root, that one proposer fills.

    Args:
        proposer: Name of the proposer; ``"a|b"`` is a, or b where a has nothing to propose.
        parents: For each node its parent within the branch, -1 for the root of the tree.
        ranks: For each node which of its parent's candidates it is, 0 the likeliest.
    """

    proposer: str
    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def proposers(self) -> tuple[str, ...]:
        """Who may fill it, in order of preference."""
        return tuple(self.proposer.split("|"))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of its nodes, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @classmethod
    def of_widths(cls, proposer: str, widths: tuple[int, ...]) -> Branch:
        """Every node at depth d has ``widths[d]`` children; the likeliest chain comes first.

        >>> Branch.of_widths("streams", (2, 1)).parents
        (-1, 0, -1, 2)
        """
        parents: list[int] = []
        ranks: list[int] = []

        def grow(parent: int, depth: int) -> None:
            for rank in range(widths[depth]):
                parents.append(parent)
                ranks.append(rank)
                if depth + 1 < len(widths):
                    grow(len(parents) - 1, depth + 1)

        if widths:
            grow(-1, 0)
        return cls(proposer, tuple(parents), tuple(ranks))

    @classmethod
    def of_paths(cls, proposer: str, paths: Iterable[tuple[int, ...]]) -> Branch:
        """The nodes on some paths of ranks from the root, the likeliest chain first.

        >>> Branch.of_paths("streams", [(0, 0), (1,)]).ranks
        (0, 0, 1)
        """
        nodes = sorted({path[:end] for path in paths for end in range(1, len(path) + 1)})
        place = {(): -1, **{node: number for number, node in enumerate(nodes)}}
        return cls(proposer, tuple(place[n[:-1]] for n in nodes), tuple(n[-1] for n in nodes))

    @property
    def shape(self) -> str:
        """The branch without its proposer, as ``TreePlan.parse`` reads it."""
        paths: list[tuple[int, ...]] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), rank))
        depth = max(map(len, paths))
        widths = tuple(1 + max(p[d] for p in paths if len(p) > d) for d in range(depth))
        if len(paths) > depth > 1 and self == Branch.of_widths(self.proposer, widths):
            return "x".join(map(str, widths))
        ends = [path for path in paths if not any(p[:-1] == path for p in paths)]
        if ends == [(0,) * len(self)]:
            return str(len(self))
        return "+".join(".".join(map(str, path)) for path in ends)

    def __str__(self) -> str:
        return f"{self.proposer}:{self.shape}"


def best_paths(rates: Sequence[Sequence[float]], nodes: int) -> list[tuple[int, ...]]:
    """The tree of some size that commits most tokens, from how often each rank is right.

    A node pays when every rank on its path is right; the product of their rates says how often.
    No node pays more than its parent, so the ``nodes`` that pay most are a tree, and the best one
    (what Sequoia, arXiv 2402.12374, finds by dynamic programming where rates differ by parent).

    Args:
        rates: ``rates[d][k]``: how often the k-th candidate at depth d is right, given that its
            parent is.
        nodes: Nodes below the root.
    """
    worth: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in rates:
        level = {
            (*path, rank): value * rate
            for path, value in level.items()
            for rank, rate in enumerate(depth)
        }
        worth |= level
    # Of equals the shallower and lower ranked, so that a node never comes without its parent.
    return sorted(worth, key=lambda path: (-worth[path], len(path), path))[:nodes]


@dataclass(frozen=True)
class TreePlan:
    """The branches of a pass's tree, in order; no branch at all is plain decoding."""

    branches: tuple[Branch, ...] = ()

    def __str__(self) -> str:
        """As ``parse`` reads it."""
        return ",".join(map(str, self.branches)) or "none"

    @cached_property
    def layout(self) -> TreeLayout:
        """The whole tree: row 0 is the root, then each branch's nodes."""
        parents = [-1]
        for branch in self.branches:
            base = len(parents)
            parents += [0 if p < 0 else base + p for p in branch.parents]
        return TreeLayout(parents)

    @cached_property
    def owners(self) -> tuple[str | None, ...]:
        """For each row of the tree the proposer of its branch (None for the root)."""
        return (None, *(b.proposer for b in self.branches for _ in range(len(b))))

    @cached_property
    def branch_of(self) -> tuple[int, ...]:
        """For each row of the tree the number of its branch (-1 for the root)."""
        return (-1, *(n for n, b in enumerate(self.branches) for _ in range(len(b))))

    @cached_property
    def proposers(self) -> frozenset[str]:
        """Everyone who may fill a branch."""
        return frozenset(name for branch in self.branches for name in branch.proposers)

    @classmethod
    def parse(cls, text: str) -> TreePlan:
        """Read ``"ngram|table:4,streams:2x1x1"``, or ``"none"``.

        That is a chain of 4, from the lookup or else from the table, and a tree by its widths.
        ``"streams:0.0.0+1.0"`` is a tree by its paths of ranks, 0 for the likeliest candidate.

        Raises:
            UsageError: If the text is not of that form.
        """
        if text == "none":
            return cls()
        branches = []
        for part in text.split(","):
            name, _, shape = part.strip().partition(":")
            branch = None
            if re.fullmatch(r"\w+(\|\w+)*", name):
                branch = _branch(name, shape)
            if branch is None:
                raise UsageError(
                    f"cannot read the tree '{text}': write 'none', a chain like 'ngram:4', widths "
                    "like 'streams:2x1x1' or paths like 'streams:0.0+1', joined by commas"
                )
            branches.append(branch)
        plan = cls(tuple(branches))
        if len(plan.owners) > MOST_ROWS:
            raise UsageError(
                f"the tree '{text}' has {len(plan.owners)} rows; at most {MOST_ROWS} can run"
            )
        return plan


def _branch(name: str, shape: str) -> Branch | None:
    """A branch by its length, widths or paths; None if the shape is none of them."""
    if re.fullmatch(r"\d{1,3}", shape) and int(shape):
        return Branch.of_widths(name, (1,) * int(shape))
    if re.fullmatch(r"[1-9]\d{0,2}(x[1-9]\d{0,2})+", shape):
        widths = [int(n) for n in shape.split("x")]
        if math.prod(widths) <= MOST_ROWS:
            return Branch.of_widths(name, tuple(widths))
    if not shape.isdigit() and re.fullmatch(r"\d{1,3}(\.\d{1,3})*(\+\d{1,3}(\.\d{1,3})*)*", shape):
        paths = [tuple(int(n) for n in path.split(".")) for path in shape.split("+")]
        return Branch.of_paths(name, paths)
    return None
