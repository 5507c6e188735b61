"""Linear stream heads: ``h + SiLU(W_j h + b_j)``, then the target's own head (Medusa, 2401.10774).

This is also what popular descriptions of Speculative Streaming show. The trunk is not touched
and nothing runs in the pass itself: the heads read the last accepted row's final hidden state.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ..target import PassOutput, Target
from .config import StreamsConfig
from .heads import StreamHeads
from .packing import packed, plain


class LinearHeads(StreamHeads):
    """``gamma`` residual layers on the final hidden state. A zero-initialised head copies it.

    Parameters: ``weight`` ``(gamma, hidden, hidden)`` and ``bias`` ``(gamma, hidden)``.
    """

    def __init__(self, config: StreamsConfig, target: Target):
        super().__init__(config, target)
        size = target.hidden_size
        self.weight = mx.zeros((config.gamma, size, size))
        self.maps: list[nn.Module] = []  # in place of the weight once packed
        self.bias = mx.zeros((config.gamma, size))

    def blank(self) -> mx.array:
        return mx.zeros((self.target.hidden_size,), dtype=self.target.dtype)

    def observed(self, output: PassOutput, row: mx.array) -> mx.array | None:
        return output.hidden[row]

    def draft_hidden(
        self, seen: mx.array, root: mx.array, kv: list[mx.array], length: mx.array, extent: int
    ) -> tuple[mx.array, list[mx.array]]:
        return self.ahead(seen[None])[0], kv

    def ahead(self, seen: mx.array) -> mx.array:
        """The streams' hidden states, ``(rows, hidden) -> (rows, gamma, hidden)``."""
        if self.maps:
            inner = mx.stack([linear(seen) for linear in self.maps], axis=1)
        else:
            inner = (seen[None] @ self.weight.swapaxes(1, 2)).swapaxes(0, 1)
        return seen[:, None] + nn.silu(inner + self.bias)

    def _pack(self) -> None:
        self.maps = [packed(plain(self.weight[j]), bits=4) for j in range(self.config.gamma)]
        del self.weight
