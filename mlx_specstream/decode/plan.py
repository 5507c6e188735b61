"""What a pass verifies: a tree put together from the branches of several proposers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ..errors import UsageError
from ..target.rows import TreeLayout


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


@dataclass(frozen=True)
class TreePlan:
    """The branches of a pass's tree, in order; no branch at all is plain decoding."""

    branches: tuple[Branch, ...] = ()

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

        Raises:
            UsageError: If the text is not of that form.
        """
        if text == "none":
            return cls()
        branches = []
        for part in text.split(","):
            match = re.fullmatch(r"(\w+(?:\|\w+)*):(\d+(?:x\d+)*)", part.strip())
            widths = tuple(int(n) for n in match[2].split("x")) if match else ()
            if match and "x" not in match[2]:
                widths = (1,) * widths[0]
            if match is None or not widths or 0 in widths:
                raise UsageError(
                    f"cannot read the tree '{text}': write 'none', a chain like 'ngram:4', "
                    "or widths like 'streams:2x1x1', joined by commas"
                )
            branches.append(Branch.of_widths(match[1], widths))
        plan = cls(tuple(branches))
        if len(plan.owners) > 64:
            raise UsageError(f"the tree '{text}' has {len(plan.owners)} rows; at most 64 can run")
        return plan
