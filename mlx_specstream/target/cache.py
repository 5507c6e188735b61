"""The KV cache of a target: preallocated, written past its end, committed by moving the end.

Invariant: rows below ``length`` are committed and never change; rows at and above it are
scratch. A pass writes its rows at ``[length, length + rows)``, so until ``length`` advances it
has happened only in scratch: whatever is raised meanwhile, the cache is as it was.
"""

from __future__ import annotations

import mlx.core as mx

from ..errors import SpecStreamError

# Attention reads a multiple of this many rows, so that a softmax sums in whole vectors whatever
# the tree: a row's result is then the same, bit for bit, in any pass (docs/lossless.md).
EXTENT_STEP = 64


class TreeCache:
    """Keys and values of every layer: ``2 * layers`` arrays ``(1, kv_heads, capacity, head_dim)``.

    Args:
        layers: Number of layers.
        step: Rows to grow by; the capacity is always a multiple of it.
        limit: Most rows ever to hold (positions the model knows), or None.
    """

    def __init__(self, layers: int, step: int = 256, limit: int | None = None):
        self.layers = layers
        self.step = step
        self.limit = limit
        self.length = 0
        self.kv: list[mx.array] = []
        self._pending = 0

    @property
    def capacity(self) -> int:
        """Rows allocated."""
        return self.kv[0].shape[2] if self.kv else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, scratch included."""
        return sum(array.nbytes for array in self.kv)

    def allocate(self, heads: int, key_dim: int, value_dim: int, dtype: mx.Dtype) -> None:
        """Make the (empty) buffers of every layer."""
        shapes = [(1, heads, self.step, key_dim), (1, heads, self.step, value_dim)]
        self.kv = [mx.zeros(shape, dtype=dtype) for _ in range(self.layers) for shape in shapes]

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` rows in all; growing copies the buffers once per step, lazily."""
        missing = rows - self.capacity
        if missing <= 0:
            return
        extra = -(-missing // self.step) * self.step
        for index, old in enumerate(self.kv):
            shape = (*old.shape[:2], extra, old.shape[3])
            self.kv[index] = mx.concatenate([old, mx.zeros(shape, dtype=old.dtype)], axis=2)

    def stage(self, kv: list[mx.array], rows: int) -> None:
        """Take the buffers that a pass wrote ``rows`` rows into, still uncommitted."""
        self.kv = kv
        self._pending = rows

    def commit(self, path: list[int]) -> None:
        """Keep the pending rows in ``path`` (rows of the pass, in order of position).

        Raises:
            ValueError: If no pass is pending or the path names rows it does not have; nothing
                is committed then.
        """
        if any(not 0 <= row < self._pending for row in path) or path != sorted(set(path)):
            raise ValueError(f"cannot commit rows {path} of a pass of {self._pending} rows")
        if path != list(range(len(path))):
            self.kv = move_rows(self.kv, mx.array(self.length), mx.array(path))
        self.length += len(path)
        self._pending = 0

    def abort(self) -> None:
        """Forget the pending rows."""
        self._pending = 0

    def truncate(self, length: int) -> None:
        """Keep the first ``length`` committed rows.

        Raises:
            ValueError: If the cache holds fewer.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} rows of a cache of {self.length}")
        self.length = length
        self._pending = 0

    def check_room(self, tokens: int) -> None:
        """Refuse ``tokens`` tokens that the model has no positions for.

        Raises:
            SpecStreamError: If they exceed ``limit``.
        """
        if self.limit is not None and tokens > self.limit:
            raise SpecStreamError(
                f"the prompt has {tokens} tokens but the context holds {self.limit}: "
                "shorten the prompt or the conversation"
            )


def extent(rows: int, capacity: int) -> int:
    """``rows`` rounded up to whole vectors, within the capacity.

    Every extent is a trace of its own, so far from the start they are up to a quarter apart.
    """
    step = EXTENT_STEP
    while rows > 8 * step:
        step *= 2
    return min(-(-rows // step) * step, capacity)


def move_rows(kv: list[mx.array], length: mx.array, path: mx.array) -> list[mx.array]:
    """Move the rows of an accepted path to the end of the prefix.

    Args:
        kv: Buffers ``(1, kv_heads, capacity, head_dim)``.
        length: Committed rows, int32 scalar.
        path: Rows of the pass to keep, in order, ``(n,)`` int32. Row ``length + path[i]`` goes
            to ``length + i``; where the path repeats its last row the copies are scratch.

    Returns:
        The buffers; at most ``n`` rows of each are written.
    """
    start = length.reshape(1)
    source = length + path
    rows = [mx.take(a, source, axis=2) for a in kv]
    # Every read before any write: a buffer that is still being read is copied, not written to.
    rows = mx.depends(rows, rows)
    return [mx.slice_update(a, r, start, axes=(2,)) for a, r in zip(kv, rows, strict=True)]
