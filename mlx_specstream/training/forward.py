"""Streams of many positions of one text at once, for training: the arithmetic of inference.

At run time a stream row attends to the cache and to its lower streams; here all anchors of a text
run side by side, each seeing the prefix up to itself and its own lower streams.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from ..errors import SpecStreamError
from ..streams.attention import MultiStreamAttention
from ..streams.heads import StreamHeads
from ..streams.linear import LinearHeads
from .trunk import TrunkStates


class PrefixView:
    """What a block sees as its cache: fixed keys and values, followed by the rows' own.

    Args:
        keys: ``(1, kv_heads, tokens, head_dim)``; ``values`` likewise.
        positions: Of the rows, ``(rows,)`` int32.
    """

    def __init__(self, keys: mx.array, values: mx.array, positions: mx.array):
        self.keys, self.values, self.offset = keys, values, positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return (
            mx.concatenate([self.keys, keys], axis=2),
            mx.concatenate([self.values, values], axis=2),
        )


def stream_hidden(
    heads: StreamHeads, states: TrunkStates, first: int, tokens: np.ndarray, anchors: np.ndarray
) -> mx.array:
    """Normed hidden states of the streams at some anchors, differentiable.

    Args:
        heads: The streams.
        states: The trunk's states of the text.
        first: Position of the first row of ``states.final``.
        tokens: The text, ``(n,)``.
        anchors: Positions t, ``(anchors,)``.

    Returns:
        ``(anchors, gamma, hidden)``: stream j of t predicts token t + 1 + j.
    """
    rows = mx.array(anchors - first)
    if isinstance(heads, LinearHeads):
        return heads.ahead(states.final[rows])
    if not isinstance(heads, MultiStreamAttention):
        raise SpecStreamError(f"cannot train {type(heads).__name__}")
    assert states.entering is not None
    assert states.kv is not None
    gamma, target = heads.config.gamma, heads.target
    starts = heads.starts(states.entering[rows], mx.array(tokens[anchors + 1]))
    hidden = starts.reshape(1, len(anchors) * gamma, -1)
    positions = anchors.repeat(gamma) + np.tile(np.arange(1, gamma + 1), len(anchors))
    offset = mx.array(positions.astype(np.int32))
    split = len(target.blocks) - heads.config.layers
    masks = {
        window: mx.array(visible(anchors, gamma, states.kv.shape[2], positions, window))
        for window in set(target.windows[split:])
    }
    for number, block in enumerate(heads.blocks(0)):
        view = PrefixView(states.kv[None, 2 * number], states.kv[None, 2 * number + 1], offset)
        hidden = block(hidden, masks[target.windows[split + number]], view)
    return target.family.norm(hidden)[0].reshape(len(anchors), gamma, -1)


def visible(
    anchors: np.ndarray, gamma: int, length: int, positions: np.ndarray, window: int | None
) -> np.ndarray:
    """Which keys each stream row attends to: its prefix, and its own lower streams and itself.

    Returns:
        ``(anchors * gamma, length + anchors * gamma)`` bool.
    """
    owner = np.arange(len(anchors)).repeat(gamma)
    stream = np.tile(np.arange(gamma), len(anchors))
    prefix = np.arange(length)[None] <= anchors.repeat(gamma)[:, None]
    own = (owner[:, None] == owner[None]) & (stream[None] <= stream[:, None])
    mask = np.concatenate([prefix, own], axis=1)
    if window is not None:
        keys = np.concatenate([np.arange(length), positions])
        mask &= positions[:, None] - keys[None] < window
    return mask


def draft_scores(heads: StreamHeads, hidden: mx.array, previous: mx.array) -> mx.array:
    """Scores over the draft vocabulary, the correction included, differentiable.

    Args:
        heads: The streams.
        hidden: ``(anchors, gamma, hidden)`` from ``stream_hidden``.
        previous: The token before the one each stream predicts, ``(anchors, gamma)`` int32.

    Returns:
        ``(anchors, gamma, draft vocabulary)`` float32.
    """
    scores = heads.draft_logits(hidden).astype(mx.float32)
    if not heads.config.correction_rank:
        return scores
    before = heads.target.family.embed(previous.reshape(-1))[0] @ heads.correction_a
    keys = heads.draft_embeddings() @ heads.correction_b
    return scores + (before @ keys.T).reshape(scores.shape)
