"""What a pass verifies: a tree put together from the branches of several proposers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from ..errors import UsageError
from ..target.rows import TreeLayout


@dataclass(frozen=True)
class Branch:
    """One proposer's part of the tree, below the root.

    Args:
        proposer: Name of the proposer.
        parents: For each node its parent within the branch, -1 for the root of the tree.
        ranks: For each node which of its parent's candidates it is, 0 the likeliest.
    """

    proposer: str
    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parents)

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
        """For each row of the tree its proposer (None for the root)."""
        return (None, *(b.proposer for b in self.branches for _ in range(len(b))))

    @classmethod
    def parse(cls, text: str) -> TreePlan:
        """Read ``"ngram:4,streams:2x1x1"``: a chain of 4 and a tree by its widths, or ``"none"``.

        Raises:
            UsageError: If the text is not of that form.
        """
        if text == "none":
            return cls()
        branches = []
        for part in text.split(","):
            match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", part.strip())
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
