"""Exponentials of ``target/vector_math.py`` against MLX's own, on MLX's CPU backend.

    python benchmarks/vector_math.py

Medians of single evaluations, taking turns, in ms; and the largest relative error of ``exp``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_specstream.target import vector_math

ROUNDS = 60


def medians(*functions: Callable[[], mx.array]) -> list[float]:
    """Milliseconds of each function, the functions taking turns."""
    times: list[list[float]] = [[] for _ in functions]
    for turn in range(ROUNDS + 5):
        for function, own in zip(functions, times, strict=True):
            began = time.perf_counter()
            mx.eval(function())
            if turn >= 5:
                own.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(own) for own in times]


def main() -> None:
    """Print a Markdown table."""
    mx.set_default_device(mx.Device(mx.cpu))
    normal = np.random.default_rng(0).normal
    x = mx.array(8 * normal(size=(32, 1536)).astype(np.float32))
    exact = np.exp(np.array(x).astype(np.float64))
    ours = mx.compile(vector_math.exp)
    errors = [np.abs(np.array(f(x)) / exact - 1).max() for f in (mx.exp, ours)]
    print("| | MLX's own | here |\n|---|---|---|")
    print(f"| `exp`, relative error | {errors[0]:.1e} | {errors[1]:.1e} |")
    theirs = mx.compile(lambda gate, up: nn.silu(gate) * up)
    print(
        "| `exp`, 32 × 1536 | {:.2f} | {:.2f} |".format(
            *medians(lambda: mx.exp(x), lambda: ours(x))
        )
    )
    for rows in (96, 256):
        gate = mx.array(normal(size=(rows, 1536)).astype(np.float32))
        pair = medians(partial(theirs, gate, gate), partial(vector_math.swiglu, gate, gate))
        print("| gates, {} rows × 1536 | {:.2f} | {:.2f} |".format(rows, *pair))
    for rows, keys in ((96, 320), (256, 256)):
        scores = mx.array(normal(size=(9, rows, keys)).astype(np.float32))
        pair = medians(partial(mx.softmax, scores, axis=-1), partial(vector_math.softmax, scores))
        print(
            "| softmax, 9 heads × {} rows × {} keys | {:.2f} | {:.2f} |".format(rows, keys, *pair)
        )


if __name__ == "__main__":
    main()
