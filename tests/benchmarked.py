"""Made-up runs of the benchmark, for tests."""

from __future__ import annotations

from mlx_specstream.benchmarking.methods import Decoding
from mlx_specstream.benchmarking.schedule import Run


def decoding(tokens=(1, 2, 3, 4, 5), seconds=1.0, passes=5, first=1, **changes) -> Decoding:
    fields = {
        "first_seconds": 0.5, "cost": None, "proposed": {}, "accepted": {}, "weights": 1000,
        "added": 10, "kv": 100, "prefill_peak": 2000, "decode_peak": 1500, "cache": 50,
        "pass_bytes": 1100.0,
    }  # fmt: skip
    return Decoding(
        tokens=tuple(tokens), decode_seconds=seconds, passes=passes, first_tokens=first,
        **fields | changes,
    )  # fmt: skip


def run_of(method, prompt, turn, seconds=1.0, difference=None, bits=4, **changes) -> Run:
    done = decoding(seconds=seconds, **changes)
    return Run(bits, None, method, prompt, f"kind of {prompt}", 8, turn, done, difference)


def some_runs() -> list[Run]:
    """Two prompts, two rounds: plain, ours twice and three times as fast, mlx-lm slower."""
    runs = []
    for prompt, faster in (("p", 2.0), ("q", 3.0)):
        for turn, drift in enumerate((50.0, 1.0, 1.5)):  # the warm-up would spoil all of it
            runs += [
                run_of("plain", prompt, turn, 2.0 * drift),
                run_of(
                    "speculative", prompt, turn, 2.0 * drift / faster, passes=2, cost=2.5,
                    proposed={"ngram": 4, "table": 0}, accepted={"ngram": 3, "table": 0},
                ),
                run_of("mlx-lm", prompt, turn, 2.5 * drift),
            ]  # fmt: skip
    return runs
