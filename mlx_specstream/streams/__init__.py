"""Streams: what is added to a target so that it predicts tokens beyond its own next one."""

from __future__ import annotations

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..target import Target
from .attention import MultiStreamAttention
from .config import StreamsConfig
from .heads import StreamHeads
from .linear import LinearHeads

__all__ = ["StreamHeads", "StreamsConfig", "make_streams", "randomise"]


def make_streams(config: StreamsConfig, target: Target) -> StreamHeads:
    """New streams for a target, initialised to add nothing.

    Raises:
        SpecStreamError: If the configuration does not fit the target.
    """
    heads = {"linear": LinearHeads, "attention": MultiStreamAttention}[config.method]
    return heads(config, target).prepare()


def randomise(streams: StreamHeads, seed: int, scale: float = 0.05) -> StreamHeads:
    """Replace every weight by noise: for tests, which must pass whatever streams propose."""
    key = mx.random.key(seed)
    weights = []
    for name, value in tree_flatten(streams.parameters()):
        key, own = mx.random.split(key)
        weights.append((name, mx.random.normal(value.shape, scale=scale, key=own)))
    streams.update(tree_unflatten(weights))
    return streams.prepare()
