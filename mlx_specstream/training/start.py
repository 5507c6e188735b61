"""Where streams start, by least squares: before a single step of training.

The blocks that a stream passes expect the hidden state of the position they compute. So a stream's
start should be that state, as far as it can be told from what is known: the hidden state of the
anchor and, for deferred streams, the embedding of the token after it. Least squares give the best
linear guess, in closed form, from some texts of the trunk cache; its best approximation of low rank
(reduced-rank regression) becomes the streams' ``start_a`` and ``start_b``.
"""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import numpy as np

from ..streams.attention import MultiStreamAttention
from .trunk import TrunkCache

RIDGE = 1e-4  # of the mean variance of what is known: keeps the equations solvable


def fit_starts(heads: MultiStreamAttention, trunk: TrunkCache, numbers: Iterable[int]) -> None:
    """Set the streams' starts from some texts of a trunk cache; nothing else of them changes.

    Rows count by the inverse of their size, as the norm in front of a block sees them.

    Args:
        heads: The streams.
        trunk: A cache with the states entering the top layers.
        numbers: Which texts. A few hundred are plenty.
    """
    gamma = heads.config.gamma
    squares = [0.0] * gamma
    products = [0.0] * gamma
    for number in numbers:
        text = trunk.corpus.texts[number]
        anchors = np.array(text.anchors)
        if len(anchors) <= gamma:
            continue
        states = trunk.read(number)
        assert states.entering is not None
        entering = states.entering.astype(mx.float32)
        newest = mx.array(text.tokens[anchors[:-1] + 1])
        known = np.array(heads.known(entering[:-1], newest).astype(mx.float32))
        known = np.concatenate([known, np.ones((len(known), 1), np.float32)], axis=1)
        rows = np.array(entering)
        for ahead in range(1, gamma + 1):
            here = known[: len(rows) - ahead]
            weight = 1 / np.sqrt(np.mean(rows[ahead:] ** 2, axis=1, keepdims=True))
            here, change = here * weight, (rows[ahead:] - rows[:-ahead]) * weight
            squares[ahead - 1] = squares[ahead - 1] + (here.T @ here).astype(np.float64)
            products[ahead - 1] = products[ahead - 1] + (here.T @ change).astype(np.float64)
    if isinstance(squares[0], float):
        return  # not one text is long enough
    factors = [
        low_rank(square, product, heads.config.start_rank)
        for square, product in zip(squares, products, strict=True)
    ]
    heads.start_a = mx.array(np.stack([a[:-1] for a, _ in factors]))
    heads.start_b = mx.array(np.stack([b for _, b in factors]))
    heads.start = mx.array(np.stack([a[-1] @ b for a, b in factors]))
    mx.eval(heads.start, heads.start_a, heads.start_b)


def low_rank(square: np.ndarray, product: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduced-rank regression: the a and b of ``x a b`` nearest to the targets, float32.

    Args:
        square: ``x^T x``, ``(inputs, inputs)``.
        product: ``x^T y``, ``(inputs, outputs)``.
        rank: Columns of a; those beyond the outputs are zero.
    """
    ridge = RIDGE * np.trace(square) / len(square)
    full = np.linalg.solve(square + ridge * np.eye(len(square)), product)
    # The directions in which the full solution's predictions vary most.
    _, vectors = np.linalg.eigh(full.T @ square @ full)
    kept = vectors[:, ::-1][:, :rank]
    a, b = full @ kept, kept.T
    missing = rank - kept.shape[1]
    a = np.pad(a, ((0, 0), (0, max(missing, 0))))
    b = np.pad(b, ((0, max(missing, 0)), (0, 0)))
    return a.astype(np.float32), b.astype(np.float32)
