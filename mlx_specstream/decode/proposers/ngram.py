"""n-gram lookup: what followed the last time the text ended like this (prompt lookup decoding)."""

from __future__ import annotations

import mlx.core as mx

from ...errors import UsageError
from ...target import PassOutput, Target
from ..plan import Branch
from ..verify import Verdict
from .base import Context, Proposals


class NgramLookup:
    """Continue the most recent of the longest earlier matches of the text's own ending.

    Args:
        min_length: Shortest ending worth following, in tokens.
        max_length: Longest ending told apart.

    Raises:
        UsageError: Unless ``1 <= min_length <= max_length``.
    """

    name = "ngram"
    max_depth = None
    scratch_rows = 0

    def __init__(self, min_length: int = 2, max_length: int = 4):
        if not 1 <= min_length <= max_length:
            raise UsageError(f"n-gram lengths {min_length} to {max_length} are not a range from 1")
        self.min_length = min_length
        self.max_length = max_length

    def start(self, target: Target) -> tuple[mx.array, ...]:
        return ()

    def propose(self, branch: Branch, memory: tuple[mx.array, ...], context: Context) -> Proposals:
        continuation, found = self.lookup(context.history, context.length, len(branch))
        valid = mx.broadcast_to(found, (len(branch),))
        return Proposals(continuation, valid, context.kv)

    def observe(
        self, memory: tuple[mx.array, ...], output: PassOutput, verdict: Verdict
    ) -> tuple[mx.array, ...]:
        return memory

    def lookup(self, history: mx.array, last: mx.array, count: int) -> tuple[mx.array, mx.array]:
        """What ``count`` tokens followed the best match, vectorised over all positions.

            history  a b c d a b        last = 5: the text ends in "a b", as it did at position 1
            →        c d a b            (a match that runs into the end goes round: "c d a b c d")

        Args:
            history: Tokens by position, ``(capacity,)`` int32.
            last: Position of the newest token, int32 scalar.
            count: Tokens wanted.

        Returns:
            The tokens ``(count,)`` int32 and whether there was a match (bool scalar).
        """
        capacity = history.shape[0]
        positions = mx.arange(capacity)
        matched = mx.zeros((capacity,), dtype=mx.int32)
        running = positions < last
        for back in range(self.max_length):
            tail = history[mx.maximum(last - back, 0)]
            # Position i - back moved to i; what wraps round from the end is ruled out.
            shifted = mx.roll(history, back) if back else history
            running = running & (shifted == tail) & (positions >= back)
            matched = matched + running
        found_at = mx.argmax(matched * capacity + positions * (matched > 0)).astype(mx.int32)
        found = matched[found_at] >= self.min_length
        period = mx.maximum(last - found_at, 1)
        source = found_at + 1 + mx.arange(count, dtype=mx.int32) % period
        tokens = mx.where(found, history[mx.minimum(source, capacity - 1)], 0)
        return tokens.astype(mx.int32), found
