"""What a pass runs over: rows with positions, and who may attend to whom.

Everything here is static (numpy, known before the pass is built): only tokens and the cache
length live on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np


@dataclass(frozen=True)
class Rows:
    """Rows of one pass, relative to the cache length.

    Args:
        offsets: Position of each row minus the cache length, ``(rows,)`` int32.
        visible: ``visible[i, j]`` is true where row i attends to row j, ``(rows, rows)`` bool.
            Every row also attends to the whole prefix in the cache.
    """

    offsets: np.ndarray
    visible: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    @cached_property
    def consecutive(self) -> bool:
        """True if row i sits at position length + i: one rotation serves all rows."""
        return bool((self.offsets == np.arange(len(self))).all())

    @classmethod
    def chain(cls, count: int) -> Rows:
        """``count`` tokens in a row, each seeing the ones before it."""
        return cls(np.arange(count, dtype=np.int32), np.tri(count, dtype=bool))


class TreeLayout:
    """The shape of a proposal tree: row 0 is the root, every other row names its parent.

        >>> layout = TreeLayout([-1, 0, 1, 0])  # root with children 1 and 3; 2 is 1's child
        >>> layout.depth.tolist()
        [0, 1, 2, 1]
        >>> layout.paths.tolist()  # root-to-row paths, the last row repeated to full width
        [[0, 0, 0], [0, 1, 1], [0, 1, 2], [0, 3, 3]]

    Args:
        parents: Row of each row's parent, -1 for the root; a parent comes before its children.

    Raises:
        ValueError: If row 0 is not the only root or a parent does not precede its child.
    """

    def __init__(self, parents: list[int] | tuple[int, ...]):
        if not parents or parents[0] != -1:
            raise ValueError("row 0 of a tree must be its root (parent -1)")
        for row, parent in enumerate(parents[1:], start=1):
            if not 0 <= parent < row:
                raise ValueError(f"row {row} names parent {parent}, which does not precede it")
        self.parents = tuple(parents)
        count = len(parents)
        self.depth = np.zeros(count, dtype=np.int32)
        visible = np.eye(count, dtype=bool)
        for row, parent in enumerate(self.parents[1:], start=1):
            self.depth[row] = self.depth[parent] + 1
            visible[row] |= visible[parent]
        self.max_depth = int(self.depth.max())
        self.rows = Rows(self.depth, visible)
        self.paths = np.stack([self._path(row) for row in range(count)])
        # Accepting any row of a chain leaves its path where it was written: nothing to move.
        self.is_chain = all(parent == row - 1 for row, parent in enumerate(self.parents))

    def _path(self, row: int) -> np.ndarray:
        path = np.flatnonzero(self.rows.visible[row]).astype(np.int32)
        return np.pad(path, (0, self.max_depth + 1 - len(path)), mode="edge")

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def chain(cls, proposals: int) -> TreeLayout:
        """The root and a single line of ``proposals`` rows."""
        return cls(tuple(range(-1, proposals)))


def attention_mask(rows: Rows, length: mx.array, extent: int, window: int | None) -> mx.array:
    """Which of the first ``extent`` cache rows each row of a pass attends to.

    Args:
        rows: The rows, written at ``[length, length + len(rows))``.
        length: Committed rows in the cache, int32 scalar on the device.
        extent: Cache rows looked at, at least ``length + len(rows)``.
        window: A sliding-window layer's width in tokens, or None for full attention.

    Returns:
        ``(rows, extent)`` bool.
    """
    start = length.reshape(1)
    keys = mx.arange(extent)
    prefix = mx.broadcast_to(keys[None] < length, (len(rows), extent))
    mask = mx.slice_update(prefix, mx.array(rows.visible), start, axes=(1,))
    if window is not None:
        positions = length + mx.array(rows.offsets)
        key_positions = mx.slice_update(keys, positions, start, axes=(0,))
        mask = mask & (positions[:, None] - key_positions[None] < window)
    return mask
