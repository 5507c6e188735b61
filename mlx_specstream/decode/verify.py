"""Which proposals the target agrees with. Pure functions over arrays; no model in here."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from ..target.rows import TreeLayout


class Verdict(NamedTuple):
    """The outcome of a pass.

    Args:
        row: The last accepted row, int32 scalar (0: only the root).
        accepted: Proposals accepted, int32 scalar.
        path: Root-to-``row`` path, ``(max_depth + 1,)`` int32, the last row repeated.
        committed: The pass's new tokens, ``(max_depth + 1,)`` int32; the first ``accepted + 1``
            count, the last of these is the new root.
    """

    row: mx.array
    accepted: mx.array
    path: mx.array
    committed: mx.array


def accept(layout: TreeLayout, tokens: mx.array, valid: mx.array, said: mx.array) -> Verdict:
    """Follow the target through the tree: a row is accepted if its parent is and said it.

        tree  the ─ cat ─ sat      target, after each row:  the → cat, cat → ran, sat → on,
              └──── dog                                     dog → is
        accepted path: the ─ cat; committed: cat ran; the new root: ran

    Args:
        layout: The tree.
        tokens: Its tokens, ``(rows,)`` int32.
        valid: False where a proposer had nothing to propose, ``(rows,)`` bool.
        said: The target's token after each row, ``(rows,)`` int32.

    Returns:
        The verdict. Of several deepest paths (proposers that agree) the first row's wins.
    """
    parents = mx.array((0, *layout.parents[1:]))
    agrees = (valid & (tokens == said[parents])) | mx.array(layout.depth == 0)  # the root: given
    accepted = mx.all(agrees[mx.array(layout.paths)], axis=1)  # every ancestor, and itself
    depth = mx.array(layout.depth)
    order = depth * len(layout) - mx.arange(len(layout))  # deepest first, then first row first
    row = mx.argmax(mx.where(accepted, order, -len(layout))).astype(mx.int32)
    path = mx.array(layout.paths)[row]
    return Verdict(row, depth[row], path, said[path])
