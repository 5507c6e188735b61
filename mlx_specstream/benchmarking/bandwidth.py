"""How fast the machine's memory is, and what a pass reads from it.

Decoding is limited by memory: a pass that reads b bytes takes at least b by the bandwidth, so
bytes per pass, passes per second and bandwidth say how near to that limit a method is.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

from ..target.families import family_of
from ..training.report_memory import parameter_bytes

COPIED = 1 << 28  # bytes: more than any cache holds


def copy_bandwidth(nbytes: int = COPIED, rounds: int = 5) -> float:
    """Bytes per second that the machine moves in a copy, those read and those written counted.

    The best of some rounds, on the device that MLX computes on.

    Args:
        nbytes: To copy; far more than the caches hold.
        rounds: Copies that count, after one that does not.
    """
    copy = _copy_on_cpu(nbytes) if mx.default_device() == mx.cpu else _copy_on_gpu(nbytes)
    copy()
    took = []
    for _ in range(rounds):
        began = time.perf_counter()
        copy()
        took.append(time.perf_counter() - began)
    return 2 * nbytes / min(took)


def _copy_on_cpu(nbytes: int) -> Any:
    """A copy in as many threads as there are cores: one does not fill the bandwidth."""
    source = np.full(nbytes // 4, 1.0, np.float32)
    sink = np.empty_like(source)
    sink[:] = 0  # memory is given to a process when it first writes there
    threads = os.cpu_count() or 1
    parts = [np.array_split(array, threads) for array in (sink, source)]
    pool = ThreadPoolExecutor(threads)

    def copy() -> None:
        list(pool.map(np.copyto, *parts))

    return copy


def _copy_on_gpu(nbytes: int) -> Any:
    """The simplest kernel that reads and writes every value."""
    source = mx.ones((nbytes // 4,), dtype=mx.float32)
    mx.eval(source)

    def copy() -> None:
        mx.eval(mx.negative(source))

    return copy


def weights_read(model: Any) -> int:
    """Bytes of the weights that a pass reads: all, less an embedding that is not the head too.

    Of such an embedding a pass reads a few rows.
    """
    family = family_of(model)
    spared = 0 if family.tied else parameter_bytes(family.trunk.embed_tokens)
    return parameter_bytes(model) - spared


def mean_context(prompt: int, generated: int) -> float:
    """Tokens whose keys and values a pass reads, on average over a generation."""
    return prompt + generated / 2
