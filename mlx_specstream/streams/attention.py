"""Multi-stream attention: the streams of Speculative Streaming (arXiv 2402.11131, section 3.1).

The top ``layers`` of the target also carry ``gamma`` stream rows per position. A stream starts
from the main row's hidden state plus a learned stream embedding, attends to the prefix and to
its lower streams, and passes the target's own blocks with low-rank adapters that act on stream
rows only: the main rows, and so the target's output, are untouched.

Beyond the paper, the start is what the blocks were made for: a guess, linear in the main row's
hidden state and (deferred) in the newest token's embedding, of the hidden state that the position
ahead will have there. Least squares find that guess before training (``training/start.py``).
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SpecStreamError
from ..target import PassOutput, Rows, Target, TreeLayout
from .config import StreamsConfig
from .heads import StreamHeads, stream_rows
from .packing import packed, plain

# The linear maps that get an adapter, by the part of a block they are in. Experts get none: an
# adapter for each would be trained on few rows.
ADAPTED = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}


class LowRank(nn.Module):
    """``x A B``: an adapter of a given rank. B starts at zero, so it starts as nothing."""

    def __init__(self, inputs: int, outputs: int, rank: int, seed: int):
        super().__init__()
        self.a = mx.random.normal((inputs, rank), scale=inputs**-0.5, key=mx.random.key(seed))
        self.b = mx.zeros((rank, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        return (x @ self.a) @ self.b


class PackedLowRank(nn.Module):
    """A ``LowRank`` in fewer bits."""

    def __init__(self, adapter: LowRank):
        super().__init__()
        maps = (plain(adapter.a.T), plain(adapter.b.T))
        self.down, self.up = (packed(linear, bits=4) for linear in maps)

    def __call__(self, x: mx.array) -> mx.array:
        return self.up(self.down(x))


class StreamLinear(nn.Module):
    """A target's linear map whose adapter acts only on the rows from ``main_rows`` on."""

    def __init__(self, base: nn.Module, adapter: LowRank, main_rows: int):
        super().__init__()
        self.base, self.adapter, self.main_rows = base, adapter, main_rows

    def __call__(self, x: mx.array) -> mx.array:
        y, m = self.base(x), self.main_rows
        # In the target's dtype, whatever the adapter's: main rows must stay what they are.
        adapted = y[:, m:] + self.adapter(x[:, m:]).astype(y.dtype)
        return mx.concatenate([y[:, :m], adapted], axis=1) if m else adapted


class MultiStreamAttention(StreamHeads):
    """Streams through the top layers of the target.

    Parameters: ``start`` ``(gamma, hidden)``, the stream embeddings P_j; ``start_a``
    ``(gamma, inputs, start_rank)`` and ``start_b`` ``(gamma, start_rank, hidden)``, the low-rank
    map from what is known (the hidden state; in deferred mode the newest token's embedding too)
    to what the start adds to it; ``adapters``, one ``LowRank`` per linear map of each layer.
    """

    def __init__(self, config: StreamsConfig, target: Target):
        super().__init__(config, target)
        blocks = target.blocks[-config.layers :]
        if config.layers > len(target.blocks):
            raise SpecStreamError(
                f"streams through {config.layers} layers do not fit a target of "
                f"{len(target.blocks)}"
            )
        self.start = mx.zeros((config.gamma, target.hidden_size))
        self.adapters = [
            {
                name: LowRank(*_dims(linear), config.rank, seed=16 * layer + number)
                for number, (_, name, linear) in enumerate(_maps(block))
            }
            for layer, block in enumerate(blocks)
        ]
        self._split = len(target.blocks) - config.layers
        self._deferred = config.mode == "deferred"
        inputs = target.hidden_size * (2 if self._deferred else 1)
        shape = (config.gamma, inputs, config.start_rank)
        self.start_a = mx.random.normal(shape, scale=inputs**-0.5, key=mx.random.key(1))
        self.start_b = mx.zeros((config.gamma, config.start_rank, target.hidden_size))
        self.start_maps: list[PackedLowRank] = []  # in place of these two once packed
        self._adapted: dict[int, list[Any]] = {}

    @property
    def rides_along(self) -> bool:
        return self._deferred

    @property
    def scratch_rows(self) -> int:
        return self.config.gamma if self._deferred else 0

    def rows_written(self, layout: TreeLayout) -> int:
        return len(layout) * (1 if self._deferred else 1 + self.config.gamma)

    def known(self, entering: mx.array, newest: mx.array | None) -> mx.array:
        """What a start is made of, ``(rows, inputs)``.

        Args:
            entering: Hidden states entering the top layers, ``(rows, hidden)``.
            newest: The token after each of them, ``(rows,)`` int32; fused streams take none.
        """
        if not self._deferred:
            return entering
        assert newest is not None
        embedded = self.target.family.embed(newest)[0]
        scale = mx.ones((embedded.shape[-1],), dtype=embedded.dtype)
        return mx.concatenate([entering, mx.fast.rms_norm(embedded, scale, 1e-6)], axis=-1)

    def starts(self, entering: mx.array, newest: mx.array | None) -> mx.array:
        """Where the streams of some rows start, ``(rows, gamma, hidden)``; see ``known``."""
        known = self.known(entering, newest)
        if self.start_maps:
            ahead = mx.stack([start(known) for start in self.start_maps])
        else:
            ahead = (known @ self.start_a) @ self.start_b  # (gamma, rows, hidden)
        starts = entering[:, None] + ahead.swapaxes(0, 1) + self.start[None]
        return starts.astype(self.target.dtype)

    def _pack(self) -> None:
        self.adapters = [
            {name: PackedLowRank(adapter) for name, adapter in adapters.items()}
            for adapters in self.adapters
        ]
        maps = [LowRank(1, 1, 1, seed=0) for _ in range(self.config.gamma)]
        for number, start in enumerate(maps):
            start.a, start.b = self.start_a[number], self.start_b[number]
        self.start_maps = [PackedLowRank(start) for start in maps]
        del self.start_a, self.start_b
        self._adapted.clear()

    def blocks(self, main_rows: int) -> list[Any]:
        """The top blocks with adapters on the rows from ``main_rows`` on."""
        if main_rows not in self._adapted:
            self._adapted[main_rows] = [
                _with_adapters(block, adapters, main_rows)
                for block, adapters in zip(
                    self.target.blocks[self._split :], self.adapters, strict=True
                )
            ]
        return self._adapted[main_rows]

    def forward(
        self,
        tokens: mx.array,
        kv: list[mx.array],
        layout: TreeLayout,
        length: mx.array,
        extent: int,
    ) -> PassOutput:
        """Deferred: the target's pass, tapped below the top layers. Fused: all rows in one go."""
        target, split = self.target, self._split
        if self._deferred:
            return target.forward(tokens, kv, layout, length, extent, tap=split)
        count, gamma = len(layout), self.config.gamma
        hidden = target.enter(tokens, layout.rows, length)
        hidden, kv = target.run(hidden, kv, layout.rows, length, extent, range(split))
        starts = self.starts(hidden[0], None).reshape(1, count * gamma, -1)
        hidden, kv = target.run(
            mx.concatenate([hidden, starts], axis=1),
            kv,
            _fused_rows(layout, gamma),
            length,
            extent,
            range(split, len(target.blocks)),
            self.blocks(count),
        )
        streams = hidden[0, count:].reshape(count, gamma, -1)
        return PassOutput(target.family.norm(hidden[:, :count])[0], kv, streams=streams)

    def blank(self) -> mx.array:
        size = self.target.hidden_size
        shape = (size,) if self._deferred else (self.config.gamma, size)
        return mx.zeros(shape, dtype=self.target.dtype)

    def observed(self, output: PassOutput, row: mx.array) -> mx.array | None:
        seen = output.tap if self._deferred else output.streams
        return None if seen is None else seen[row]

    def draft_hidden(
        self, seen: mx.array, root: mx.array, kv: list[mx.array], length: mx.array, extent: int
    ) -> tuple[mx.array, list[mx.array]]:
        target = self.target
        if self._deferred:
            hidden = self.starts(seen[None], root[None])
            top = range(self._split, len(target.blocks))
            # Stream j of the last accepted row, at length - 1, sits at length - 1 + j.
            rows = Rows.chain(self.config.gamma)
            hidden, kv = target.run(hidden, kv, rows, length, extent, top, self.blocks(0))
            seen = hidden[0]
        return target.family.norm(seen[None])[0], kv


@lru_cache(maxsize=64)
def _fused_rows(layout: TreeLayout, gamma: int) -> Rows:
    return stream_rows(layout, gamma)


def _maps(block: Any) -> list[tuple[str, str, Any]]:
    """The linear maps of a block that get an adapter: part, name and map."""
    parts = [(part, name) for part, names in ADAPTED.items() for name in names if part in block]
    return [(part, name, block[part][name]) for part, name in parts if name in block[part]]


def _dims(linear: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear map, quantized or not."""
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    return inputs, outputs


def _with_adapters(block: Any, adapters: dict[str, LowRank], main_rows: int) -> Any:
    """A block sharing the weights of ``block``, its linear maps adapted."""
    twin = copy.copy(block)
    for part in ADAPTED:
        if part in block:
            twin[part] = copy.copy(block[part])
    for part, name, linear in _maps(block):
        twin[part][name] = StreamLinear(linear, adapters[name], main_rows)
    return twin
