"""Position-keyed noise: what makes sampling through proposals equal to sampling without them.

The token at absolute position s is ``argmax_v(logp_s[v] + G(seed, s, v))`` with Gumbel noise G
that depends on nothing but the seed, the position and the token: an exact sample (the Gumbel
trick), and the same sample whichever pass and whichever row computes it. MLX's global random
state is never touched.
"""

from __future__ import annotations

import secrets

import mlx.core as mx


def fresh_seed() -> int:
    """A seed nobody chose, 32 bits."""
    return secrets.randbits(32)


def seed_key(seed: int) -> int:
    """Fold a seed of any size or sign into the 32 bits that the noise is keyed by."""
    seed &= (1 << 64) - 1
    high, low = seed >> 32, seed & 0xFFFFFFFF
    return low ^ (high * 0x9E3779B1) & 0xFFFFFFFF


def gumbel_rows(seed: mx.array, first: mx.array, count: int, vocab_size: int) -> mx.array:
    """Noise for the tokens at positions ``first … first + count - 1``.

    Args:
        seed: uint32 scalar.
        first: int32 scalar, the absolute position of the first token.
        count: Number of positions.
        vocab_size: Number of tokens.

    Returns:
        ``(count, vocab_size)`` float32.
    """
    rows = [
        mx.random.gumbel((vocab_size,), key=mx.stack([seed, (first + i).astype(mx.uint32)]))
        for i in range(count)
    ]
    return mx.stack(rows)
