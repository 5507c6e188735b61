"""An n-gram table of the target's own text: what followed the last three tokens most often.

Counted from distilled answers with back-off (three tokens, else two, else one), it is the cheapest
proposer there is: no arithmetic, one lookup a pass. Every context keeps a whole chain of tokens,
followed through the table when it is built, so that a chain costs one lookup on the device.

The contexts of all orders share one hash table of buckets; a slot holds 16 bits of a second hash
and the chain. A false match (a bucket's slots in 65,536) costs a proposal, never a wrong text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np

ORDERS = (3, 2, 1)  # tried in this order
SLOTS = 8  # per bucket
_EMPTY = 0


@dataclass(frozen=True)
class NgramTable:
    """The table, on the device.

    Args:
        marks: Second hash of the context in each slot, ``(buckets, SLOTS)`` uint16, 0 if empty.
        chains: The tokens that follow it, ``(buckets, SLOTS, depth)`` uint16 or uint32.
    """

    marks: mx.array
    chains: mx.array

    @property
    def depth(self) -> int:
        """Tokens of a chain."""
        return self.chains.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self.marks.nbytes + self.chains.nbytes

    def lookup(self, recent: mx.array) -> tuple[mx.array, mx.array]:
        """The chain after a text.

        Args:
            recent: The last three tokens, oldest first, ``(3,)`` int32; -1 before the beginning.

        Returns:
            The chain ``(depth,)`` int32, and whether any context was found (bool scalar).
        """
        chain = mx.zeros((self.depth,), dtype=mx.int32)
        found = mx.array(False)
        for order in reversed(ORDERS):  # a longer context takes the place of a shorter one's
            place, mark = hashes(recent[None, len(ORDERS) - order :].astype(mx.uint32))
            bucket = (place & (self.marks.shape[0] - 1))[0].astype(mx.int32)
            matches = self.marks[bucket] == mark[0]
            known = mx.any(matches)
            here = self.chains[bucket, mx.argmax(matches)].astype(mx.int32)
            chain, found = mx.where(known, here, chain), found | known
        return chain, found

    def next_token(self, recent: Sequence[int]) -> int | None:
        """The token after a text, on the host: what ``lookup`` says first, None if nothing."""
        marks, chains = self._on_host
        for order in ORDERS:
            if order <= len(recent):
                place, mark = hash_of(recent[-order:])
                bucket = place & (len(marks) - 1)
                slots = np.flatnonzero(marks[bucket] == mark)
                if len(slots):
                    return int(chains[bucket, slots[0]])
        return None

    @cached_property
    def _on_host(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.marks), np.array(self.chains[..., 0])

    @classmethod
    def build(
        cls,
        texts: Iterable[Sequence[int]],
        vocab_size: int,
        depth: int = 4,
        most_bytes: int | None = None,
    ) -> NgramTable:
        """Count texts (lists of token ids) and pack what they say.

        Args:
            texts: The texts.
            vocab_size: Of the target.
            depth: Tokens of a chain.
            most_bytes: Largest size; the rarest contexts are left out for it.

        Raises:
            ValueError: If there is not one pair of tokens in them.
        """
        counts = followers_of(texts)
        followers = most_frequent(counts)
        if not followers[1]:
            raise ValueError("no text to count: give texts of at least two tokens")
        chains = {c: follow(c, followers, depth) for o in ORDERS for c in followers[o]}
        # A context that says no more than its shorter ending does is found under that.
        kept = [c for c in chains if chains[c] != chains.get(c[1:])]
        # Who comes first finds room: long contexts, or, where it is scarce, frequent ones.
        if most_bytes is not None:
            kept.sort(key=lambda c: -counts[len(c)][c].total())
        dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        packed = np.array([chains[c] for c in kept]).astype(dtype)
        return cls(*pack(kept, packed, buckets_for(len(kept), packed[0].nbytes, most_bytes)))


def hashes(contexts: mx.array) -> tuple[mx.array, mx.array]:
    """Bucket hash (uint32) and slot mark (uint16, never 0) of contexts of one order.

    Args:
        contexts: ``(n, order)`` uint32.
    """
    place = mx.full((contexts.shape[0],), 0x9E3779B1 * contexts.shape[1] & 0xFFFFFFFF, mx.uint32)
    for column in range(contexts.shape[1]):
        place = (place ^ contexts[:, column]) * mx.array(0x85EBCA6B, mx.uint32)
        place = place ^ (place >> 15)
    mark = (place * mx.array(0xC2B2AE35, mx.uint32)) >> 16
    place = place ^ (place >> 13)
    return place, mx.maximum(mark, 1).astype(mx.uint16)


def hash_of(context: Sequence[int]) -> tuple[int, int]:
    """``hashes`` of one context, on the host."""
    place = 0x9E3779B1 * len(context) & 0xFFFFFFFF
    for token in context:
        place = (place ^ token) * 0x85EBCA6B & 0xFFFFFFFF
        place ^= place >> 15
    mark = (place * 0xC2B2AE35 & 0xFFFFFFFF) >> 16
    return place ^ (place >> 13), max(mark, 1)


def buckets_for(contexts: int, chain_bytes: int, most_bytes: int | None) -> int:
    """The power of two that keeps buckets at most half full, or the largest that has room."""
    buckets, each = 1, SLOTS * (2 + chain_bytes)
    while buckets * SLOTS < contexts * 2 and (
        most_bytes is None or 2 * buckets * each <= most_bytes
    ):
        buckets *= 2
    return buckets


def followers_of(texts: Iterable[Sequence[int]]) -> dict[int, dict[tuple[int, ...], Counter]]:
    """For each order, each context's followers, counted."""
    counts: dict[int, dict[tuple[int, ...], Counter]] = {o: defaultdict(Counter) for o in ORDERS}
    for text in texts:
        tokens = tuple(text)
        for order in ORDERS:
            for end in range(order, len(tokens)):
                counts[order][tokens[end - order : end]][tokens[end]] += 1
    return counts


def most_frequent(
    counts: dict[int, dict[tuple[int, ...], Counter]],
) -> dict[int, dict[tuple[int, ...], int]]:
    """For each order, each context's most frequent follower (the earliest of equals)."""
    return {
        order: {context: counter.most_common(1)[0][0] for context, counter in table.items()}
        for order, table in counts.items()
    }


def predict(context: tuple[int, ...], followers: dict[int, dict[tuple[int, ...], int]]) -> int:
    """The follower of the longest known ending of a context; -1 if none is known."""
    for order in ORDERS:
        token = followers[order].get(context[-order:]) if len(context) >= order else None
        if token is not None:
            return token
    return -1


def follow(
    context: tuple[int, ...], followers: dict[int, dict[tuple[int, ...], int]], depth: int
) -> list[int]:
    """The chain of ``depth`` tokens after a context; it repeats its end where nothing is known."""
    text = context
    for _ in range(depth):
        token = predict(text, followers)
        text = (*text, text[-1] if token < 0 else token)
    return list(text[len(context) :])


def pack(
    contexts: Sequence[tuple[int, ...]], chains: np.ndarray, buckets: int
) -> tuple[mx.array, mx.array]:
    """Place contexts and their chains in buckets, in order; who finds a bucket full is left out.

    Args:
        contexts: The contexts.
        chains: What follows each, ``(contexts, depth)``.
        buckets: How many, a power of two.
    """
    place = np.zeros(len(contexts), dtype=np.int64)
    mark = np.zeros(len(contexts), dtype=np.uint16)
    for order in ORDERS:
        rows = [i for i, context in enumerate(contexts) if len(context) == order]
        if rows:
            keys = mx.array(np.array([contexts[i] for i in rows], dtype=np.uint32))
            ours, marks = hashes(keys)
            place[rows] = np.array(ours).astype(np.int64) & (buckets - 1)
            mark[rows] = np.array(marks)
    # The slot of each context: how many came to its bucket before it.
    order_in = np.argsort(place, kind="stable")
    arrived = place[order_in]
    first = np.searchsorted(arrived, arrived)
    slot = np.empty(len(contexts), dtype=np.int64)
    slot[order_in] = np.arange(len(contexts)) - first
    kept = slot < SLOTS
    marks_out = np.full((buckets, SLOTS), _EMPTY, dtype=np.uint16)
    chains_out = np.zeros((buckets, SLOTS, chains.shape[1]), dtype=chains.dtype)
    marks_out[place[kept], slot[kept]] = mark[kept]
    chains_out[place[kept], slot[kept]] = chains[kept]
    return mx.array(marks_out), mx.array(chains_out)
