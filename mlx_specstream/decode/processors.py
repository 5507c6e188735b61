"""From a row's logits to its token: penalties, filters, temperature, noise.

Every row of a pass is treated as plain decoding would treat it: with its own history (prompt,
committed tokens, its ancestors in the tree) and the noise of its own position. The order and
the meaning of each option are mlx-lm's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..errors import UsageError
from ..target.rows import TreeLayout

PENALTY_WINDOW = 20  # mlx-lm's default: tokens that a penalty looks back over


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits. The defaults are greedy decoding.

    Args:
        temp: Temperature; 0 takes the most likely token.
        top_p: Keep the most likely tokens that together have this probability; 0 or 1 keeps all.
        min_p: Drop tokens less likely than this times the most likely; 0 keeps all.
        top_k: Keep this many; 0 keeps all.
        repetition_penalty: Divide (multiply, if negative) the logits of tokens in the window.
        presence_penalty: Subtract from the logits of tokens in the window.
        frequency_penalty: Subtract once for every time a token is in the window.
        repetition_context_size: Window in tokens, prompt included; 0 is the whole history.
            The other two penalties have their own.
        logit_bias: Token id → value added to its logit.
        seed: Fixes the noise; None draws a new one for every generation.

    Raises:
        UsageError: If a value is out of its range.
    """

    temp: float = 0.0
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_context_size: int = PENALTY_WINDOW
    presence_context_size: int = PENALTY_WINDOW
    frequency_context_size: int = PENALTY_WINDOW
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "temp": self.temp == 0 or 1e-30 <= self.temp <= 1e30,  # what float32 can divide by
            "top_p": 0 <= self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "top_k": self.top_k >= 0,
            "repetition_penalty": self.repetition_penalty is None or self.repetition_penalty > 0,
            "presence_penalty": math.isfinite(self.presence_penalty or 0),
            "frequency_penalty": math.isfinite(self.frequency_penalty or 0),
            "repetition_context_size": self.repetition_context_size >= 0,
            "presence_context_size": self.presence_context_size >= 0,
            "frequency_context_size": self.frequency_context_size >= 0,
            "logit_bias": all(value < math.inf for value in (self.logit_bias or {}).values()),
        }
        for name, good in checks.items():
            if not good:
                raise UsageError(f"{name} cannot be {getattr(self, name)}")

    @property
    def greedy(self) -> bool:
        """True if no noise is used."""
        return self.temp == 0

    @property
    def penalties(self) -> list[tuple[str, float, int]]:
        """The penalties in force: (kind, strength, window)."""
        named = [
            ("repetition", self.repetition_penalty, self.repetition_context_size),
            ("presence", self.presence_penalty, self.presence_context_size),
            ("frequency", self.frequency_penalty, self.frequency_context_size),
        ]
        return [(kind, value, window) for kind, value, window in named if value]

    @property
    def signature(self) -> tuple:
        """What a compiled pass depends on: everything but the seed."""
        bias = tuple(sorted((self.logit_bias or {}).items()))
        filters = (self.temp, self.top_p, self.min_p, self.top_k)
        return (*filters, tuple(self.penalties), bias)


def penalised(
    logits: mx.array,
    sampling: Sampling,
    history: mx.array,
    length: mx.array,
    tokens: mx.array,
    layout: TreeLayout,
) -> mx.array:
    """Apply logit bias and penalties to every row of a pass.

    Args:
        logits: ``(rows, vocabulary)``.
        sampling: The options.
        history: Committed tokens by position, ``(capacity,)`` int32.
        length: Position of the root, int32 scalar.
        tokens: The tree's tokens, ``(rows,)`` int32.
        layout: The tree.

    Returns:
        ``(rows, vocabulary)``.
    """
    if sampling.logit_bias:
        ids = mx.array(list(sampling.logit_bias))
        values = mx.array(list(sampling.logit_bias.values()), dtype=logits.dtype)
        logits = logits.at[:, ids].add(values)
    for kind, strength, window in sampling.penalties:
        counts = window_counts(logits, window, history, length, tokens, layout)
        if kind == "repetition":
            scaled = mx.where(logits < 0, logits * strength, logits / strength)
            logits = mx.where(counts > 0, scaled, logits)
        elif kind == "presence":
            logits = mx.where(counts > 0, logits - strength, logits)
        else:
            logits = logits - strength * counts
    return logits


def window_counts(
    logits: mx.array,
    window: int,
    history: mx.array,
    length: mx.array,
    tokens: mx.array,
    layout: TreeLayout,
) -> mx.array:
    """How often each token occurs in the last ``window`` tokens before each row's prediction.

    A row's history is the committed tokens and its ancestors, itself included; ``window`` 0
    takes all of it. Returns ``(rows, vocabulary)`` in the dtype of ``logits``.
    """
    rows = len(layout)
    span = window or history.shape[0]
    back = mx.arange(span) - (span - 1)
    positions = (length + mx.array(layout.depth))[:, None] + back[None]
    in_tree = positions - length  # > 0: an ancestor in the tree, at that depth
    ancestor = mx.take_along_axis(
        mx.array(layout.paths), mx.clip(in_tree, 0, layout.max_depth), axis=1
    )
    seen = mx.where(in_tree > 0, tokens[ancestor], history[mx.maximum(positions, 0)])
    present = (positions >= 0).astype(logits.dtype)
    counts = mx.zeros(logits.shape, dtype=logits.dtype)
    return counts.at[mx.arange(rows)[:, None], seen].add(present)


def choose(logits: mx.array, sampling: Sampling, noise: mx.array | None) -> mx.array:
    """The token each row says comes next.

    Args:
        logits: ``(rows, vocabulary)``, penalties applied.
        sampling: The options.
        noise: The rows' noise, ``(rows, vocabulary)`` float32; None when greedy.

    Returns:
        ``(rows,)`` int32.
    """
    if noise is None:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    logp = logits.astype(mx.float32)
    logp = logp - mx.logsumexp(logp, axis=-1, keepdims=True)
    if 0 < sampling.top_p < 1:
        logp = keep_top_p(logp, sampling.top_p)
    if sampling.min_p > 0:
        floor = mx.max(logp, axis=-1, keepdims=True) + math.log(sampling.min_p)
        logp = mx.where(logp < floor, -mx.inf, logp)
    if 0 < sampling.top_k < logp.shape[-1]:
        kth = mx.sort(logp, axis=-1)[:, -sampling.top_k, None]
        logp = mx.where(logp < kth, -mx.inf, logp)
    return mx.argmax(logp * (1 / sampling.temp) + noise, axis=-1).astype(mx.int32)


def keep_top_p(logp: mx.array, top_p: float) -> mx.array:
    """Drop the tokens outside the smallest set that holds ``top_p`` of the probability."""
    ordered = mx.sort(logp, axis=-1)
    mass_above = mx.cumsum(mx.exp(ordered), axis=-1, reverse=True, inclusive=False)
    dropped = mx.sum(mass_above >= top_p, axis=-1, keepdims=True)
    # The most likely token always stays.
    dropped = mx.minimum(dropped, logp.shape[-1] - 1)
    return mx.where(logp < mx.take_along_axis(ordered, dropped, axis=-1), -mx.inf, logp)


def rows_of_noise(noise: mx.array, layout: TreeLayout) -> mx.array:
    """Spread noise by depth ``(max_depth + 1, vocabulary)`` over the rows of a tree."""
    if (layout.depth == np.arange(len(layout))).all():
        return noise
    return noise[mx.array(layout.depth)]
