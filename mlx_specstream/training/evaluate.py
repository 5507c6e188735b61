"""How good streams are on held-out text: accuracy, and the tokens per pass to expect."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..streams.heads import StreamHeads
from .forward import draft_scores, stream_hidden
from .trunk import TrunkCache

RANKS = 4  # candidates of a stream that are looked at


@dataclass(frozen=True)
class Quality:
    """What streams do on held-out text.

    Args:
        hits: ``hits[j, k]``: share of anchors where stream j+1's k-th candidate is the token.
        rates: The same, among the anchors whose lower streams had the token among their
            candidates: what a tree's nodes are worth (``decode.plan.best_paths``).
        tokens_per_pass: Expected for a chain, and for the trees of the best 2 and 4 of each
            stream: 1 + sum over depths of the share of anchors right at all depths so far.
    """

    hits: np.ndarray
    rates: np.ndarray
    tokens_per_pass: dict[str, float]

    @property
    def accuracy(self) -> list[float]:
        """Share of anchors where each stream's best candidate is right."""
        return self.hits[:, 0].tolist()

    def __str__(self) -> str:
        accuracy = "/".join(f"{a:.3f}" for a in self.accuracy)
        expected = ", ".join(f"{name} {value:.2f}" for name, value in self.tokens_per_pass.items())
        return f"accuracy {accuracy}; tokens per pass: {expected}"


def evaluate(
    heads: StreamHeads, trunk: TrunkCache, numbers: Iterable[int], stride: int = 2
) -> Quality:
    """Measure streams on some texts of a trunk cache, at every ``stride``-th anchor.

    A stream is given the right token before the one it predicts, which is what verification
    gives it: a deeper proposal only counts where the ones above it were right.
    """
    gamma = heads.config.gamma
    rank_of = [np.zeros((0, gamma), dtype=np.int64)]
    for number in numbers:
        text = trunk.corpus.texts[number]
        anchors = np.array(text.anchors, dtype=np.int64)[::stride]
        anchors = anchors[anchors + gamma + 1 < len(text.tokens)]
        if not len(anchors):
            continue
        ahead = text.tokens[anchors[:, None] + 1 + np.arange(gamma + 1)]
        states = trunk.read(number, heads.config.method == "linear")
        hidden = stream_hidden(heads, states, text.anchors.start, text.tokens, anchors)
        scores = draft_scores(heads, hidden, mx.array(ahead[:, :-1]))
        best = mx.argsort(-scores, axis=-1)[..., :RANKS]
        proposed = np.array(heads.draft_token(best))
        right = proposed == ahead[:, 1:, None]
        rank_of.append(np.where(right.any(-1), right.argmax(-1), RANKS))
    ranks = np.concatenate(rank_of)
    count = max(len(ranks), 1)
    hits = np.stack([(ranks == k).sum(0) / count for k in range(RANKS)], axis=1)
    reached = np.cumprod(np.pad(ranks < RANKS, ((0, 0), (1, 0)), constant_values=True), axis=1)
    rates = (
        np.stack([((ranks == k) & (reached[:, :-1] > 0)).sum(0) for k in range(RANKS)], axis=1)
        / np.maximum(reached[:, :-1].sum(0), 1)[:, None]
    )
    expected = {
        name: 1 + float(np.cumprod(ranks < width, axis=1).sum() / count)
        for name, width in (("chain", 1), ("top-2", 2), ("top-4", 4))
    }
    return Quality(hits, rates, expected)
