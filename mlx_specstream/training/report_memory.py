"""Memory: bytes of the target and of each thing that is added to it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..streams.folder import StreamSet


@dataclass(frozen=True)
class Memory:
    """Bytes of the target and of what is added to it.

    Args:
        form: In which form the target is held.
        target: Its weights.
        heads: The streams' parameters.
        draft_head: Made of the target's weights when the streams are loaded: the head's rows of
            the draft vocabulary, and the correction's keys.
        table: The n-gram table.
        peak: Most that MLX held at a time while measuring.
    """

    form: str
    target: int
    heads: int
    draft_head: int
    table: int
    peak: int

    @property
    def added(self) -> int:
        """All that is added to the target."""
        return self.heads + self.draft_head + self.table

    @property
    def share(self) -> float:
        """That relative to the target's weights."""
        return self.added / self.target


def measure_memory(model: nn.Module, form: str, streams: StreamSet) -> Memory:
    """What is held now, and the most that was held since MLX's peak was last reset.

    Args:
        model: The target.
        form: In which form it is held, for people.
        streams: What is added to it.
    """
    heads = draft_head = 0
    if streams.heads is not None:
        heads = parameter_bytes(streams.heads)
        draft_head = streams.heads.memory_bytes() - heads
    table = 0 if streams.table is None else streams.table.nbytes
    return Memory(form, parameter_bytes(model), heads, draft_head, table, mx.get_peak_memory())


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))
