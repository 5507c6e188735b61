"""What a proposer is given, and what it gives back. All arrays stay on the device."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import mlx.core as mx

from ...target import PassOutput, Target
from ..plan import Branch
from ..processors import Sampling
from ..verify import Verdict


class Context(NamedTuple):
    """The state of decoding before a pass.

    Args:
        target: The target.
        history: Committed tokens by position, ``(capacity,)`` int32; the root is the last.
        length: Position of the root and committed rows in the cache, int32 scalar.
        kv: The cache's buffers.
        extent: Cache rows that attention may read.
        sampling: How tokens are chosen.
        noise: Noise for the tokens at positions length + 1, …, ``(depths, vocabulary)``, or None.
    """

    target: Target
    history: mx.array
    length: mx.array
    kv: list[mx.array]
    extent: int
    sampling: Sampling
    noise: mx.array | None


class Proposals(NamedTuple):
    """A filled branch.

    Args:
        tokens: ``(nodes,)`` int32, any token where not valid.
        valid: ``(nodes,)`` bool, false where there is nothing to propose.
        kv: The cache's buffers, scratch rows of which may have been used.
    """

    tokens: mx.array
    valid: mx.array
    kv: list[mx.array]


class Proposer(Protocol):
    """Fills branches. Its memory from pass to pass is a tuple of arrays that the loop carries."""

    @property
    def name(self) -> str:
        """What plans call it."""
        ...

    @property
    def max_depth(self) -> int | None:
        """The deepest proposal it can make, None for any."""
        ...

    @property
    def scratch_rows(self) -> int:
        """Cache rows past the prefix that ``propose`` may write."""
        ...

    def start(self, target: Target) -> tuple[mx.array, ...]:
        """Its memory before the first pass."""
        ...

    def propose(self, branch: Branch, memory: tuple[mx.array, ...], context: Context) -> Proposals:
        """Fill a branch below the root."""
        ...

    def observe(
        self, memory: tuple[mx.array, ...], output: PassOutput, verdict: Verdict
    ) -> tuple[mx.array, ...]:
        """Its memory after a pass."""
        ...
