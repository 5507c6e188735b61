"""One forward of the target over the rows of a proposal tree.

mlx-lm's blocks run as they are, on their own weights. Each block gets two things in place of
what mlx-lm's loop gives it: a mask that says who sees whom, and a cache object that puts the
rows into preallocated buffers and hands each row's position to the block's own rope.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .cache import TreeCache, extent
from .families import family_of
from .rows import Rows, TreeLayout, attention_mask
from .vector_math import vectorised_block


class RowRope(nn.Module):
    """A layer's own rope, for rows that sit at positions of their own.

    ``mx.fast.rope`` takes one offset per batch element, so rows become batch elements:
    ``(1, heads, rows, dim) -> (rows, heads, 1, dim)`` and back.
    """

    def __init__(self, rope: nn.Module):
        super().__init__()
        self.rope = rope

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if isinstance(offset, int) or offset.ndim == 0:
            return self.rope(x, offset=offset)
        return self.rope(x.transpose(2, 1, 0, 3), offset=offset).transpose(2, 1, 0, 3)


def shadow(block: Any) -> Any:
    """A block that shares every weight with ``block`` but has a ``RowRope``; the original stays.

    Blocks without a rope (OPT's) do not ask where a row sits.
    """
    twin = vectorised_block(block)
    if "rope" in block.self_attn:
        twin.self_attn.rope = RowRope(block.self_attn.rope)
    return twin


class LayerView:
    """What one block sees as its cache during one pass.

    Args:
        keys: ``(1, kv_heads, capacity, head_dim)``; ``values`` likewise.
        start: Where the pass's rows go, ``(1,)`` int32.
        offset: Rope positions: a scalar for consecutive rows, else ``(rows,)`` int32.
        extent: Rows of the buffers that attention reads.
    """

    def __init__(
        self, keys: mx.array, values: mx.array, start: mx.array, offset: mx.array, extent: int
    ):
        self.keys, self.values = keys, values
        self.start, self.offset, self.extent = start, offset, extent

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.slice_update(self.keys, keys, self.start, axes=(2,))
        self.values = mx.slice_update(self.values, values, self.start, axes=(2,))
        return self.keys[..., : self.extent, :], self.values[..., : self.extent, :]


@dataclass
class PassOutput:
    """What a pass leaves behind.

    Args:
        hidden: Final normed hidden state of every row, ``(rows, hidden)``.
        kv: The cache's buffers with the pass's rows written past its length.
        tap: Hidden state entering the layer that was asked for, ``(rows, hidden)``, or None.
        streams: Hidden states of every row's streams, ``(rows, gamma, hidden)``, or None.
    """

    hidden: mx.array
    kv: list[mx.array]
    tap: mx.array | None = None
    streams: mx.array | None = None


@dataclass
class Target:
    """A target model and what it takes to run it over trees. Nothing of the model is changed.

    Args:
        model: An mlx-lm model of a supported family.

    Raises:
        SpecStreamError: If the architecture is not supported.
    """

    model: Any
    compiled: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.family = family_of(self.model)
        self.blocks = [shadow(block) for block in self.family.layers]
        self.windows = self.family.windows()
        args = self.family.args
        self.vocab_size: int = args.vocab_size
        self.hidden_size: int = args.hidden_size
        self.context: int | None = getattr(args, "max_position_embeddings", None)
        # What hidden states are in; known without computing anything.
        self.dtype: mx.Dtype = self.family.embed(mx.zeros((1,), dtype=mx.int32)).dtype

    @property
    def is_packed(self) -> bool:
        """Whether the target's weights are quantized in memory."""
        return any(isinstance(m, nn.QuantizedLinear) for m in self.blocks[0].modules())

    @classmethod
    def of(cls, model: Any) -> Target:
        """The model's target, made once and kept with the model.

        Raises:
            SpecStreamError: If the architecture is not supported.
        """
        target = getattr(model, "_specstream_target", None)
        if target is None:
            target = cls(model)
            model._specstream_target = target
        return target

    def make_cache(self, step: int = 256, limit: int | None = None) -> TreeCache:
        """An empty cache in the dtype that the model computes in."""
        limits = [n for n in (limit, self.context) if n is not None]
        cache = TreeCache(len(self.blocks), step, min(limits, default=None))
        width = self.family.head_dim
        norm = self.family.norm(self.family.embed(mx.zeros((1,), dtype=mx.int32)))
        cache.allocate(self.family.kv_heads, width, width, norm.dtype)
        return cache

    def enter(self, tokens: mx.array, rows: Rows, length: mx.array) -> mx.array:
        """What enters the first block, ``(rows,)`` ids to ``(1, rows, hidden)``; see ``run``."""
        return self.family.enter(tokens, length + mx.array(rows.offsets))

    def run(
        self,
        hidden: mx.array,
        kv: list[mx.array],
        rows: Rows,
        length: mx.array,
        extent: int,
        layers: range | None = None,
        blocks: list[Any] | None = None,
    ) -> tuple[mx.array, list[mx.array]]:
        """Run rows through some layers; their keys and values land past the prefix.

        Args:
            hidden: ``(1, rows, hidden)`` entering the first of the layers.
            kv: The cache's buffers.
            rows: Positions and visibility of the rows.
            length: Committed rows in the cache, int32 scalar on the device.
            extent: Cache rows that attention reads, at least ``length + len(rows)``.
            layers: Which layers; all by default.
            blocks: The blocks to run in their place (streams' adapted ones), one for each layer.

        Returns:
            The hidden states after the last of the layers, and the buffers.
        """
        layers = range(len(self.blocks)) if layers is None else layers
        blocks = [self.blocks[i] for i in layers] if blocks is None else blocks
        start = length.reshape(1)
        offset = length if rows.consecutive else length + mx.array(rows.offsets)
        windows = {self.windows[i] for i in layers}
        masks = {window: attention_mask(rows, length, extent, window) for window in windows}
        kv = list(kv)
        for index, block in zip(layers, blocks, strict=True):
            view = LayerView(kv[2 * index], kv[2 * index + 1], start, offset, extent)
            hidden = block(hidden, masks[self.windows[index]], view)
            kv[2 * index], kv[2 * index + 1] = view.keys, view.values
        return hidden, kv

    def forward(
        self,
        tokens: mx.array,
        kv: list[mx.array],
        layout: TreeLayout,
        length: mx.array,
        extent: int,
        tap: int | None = None,
    ) -> PassOutput:
        """A whole pass over a tree, up to the final norm: ``tokens`` is ``(rows,)`` int32.

        ``tap`` names the layer whose input is wanted too; the rest as in ``run``.
        """
        entering, rows = None, layout.rows
        hidden = self.enter(tokens, rows, length)
        split = len(self.blocks) if tap is None else tap
        hidden, kv = self.run(hidden, kv, rows, length, extent, range(split))
        if tap is not None:
            entering = hidden[0]
            hidden, kv = self.run(hidden, kv, rows, length, extent, range(tap, len(self.blocks)))
        return PassOutput(self.family.norm(hidden)[0], kv, tap=entering)

    def rows_written(self, layout: TreeLayout) -> int:
        """Cache rows past the prefix that ``forward`` writes for a tree."""
        return len(layout)

    def logits(self, hidden: mx.array) -> mx.array:
        """Normed hidden states ``(rows, hidden)`` to logits ``(rows, vocabulary)``."""
        return self.family.head(hidden[None])[0]

    def prefill(self, tokens: list[int], cache: TreeCache, step: int = 512) -> None:
        """Append tokens to the cache, ``step`` at a time, without computing logits.

        Raises:
            SpecStreamError: If the context cannot hold them.
        """
        cache.check_room(cache.length + len(tokens))
        for first in range(0, len(tokens), step):
            chunk = mx.array(tokens[first : first + step], dtype=mx.int32)
            rows = Rows.chain(chunk.size)
            needed = cache.length + chunk.size
            cache.reserve(needed)
            length = mx.array(cache.length, dtype=mx.int32)
            window = extent(needed, cache.capacity)
            hidden = self.enter(chunk, rows, length)
            hidden, kv = self.run(hidden, cache.kv, rows, length, window)
            del hidden  # the last layer's output and its MLP are never computed
            cache.stage(kv, chunk.size)
            mx.eval(kv)
            cache.commit(list(range(chunk.size)))
