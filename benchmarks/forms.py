"""The embedded model's forms on this machine: packed or expanded, compiled or eager, by rows.

    python benchmarks/forms.py

Whole passes of our own loop over a chain of proposals that never match, on a cache of about 100
tokens; each figure is the median of ``--passes`` passes, in ms, the forms taking turns.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from importlib.metadata import version

from mlx_specstream import Sampling, Target, accelerate, load
from mlx_specstream.decode.loop import Decoder
from mlx_specstream.decode.plan import TreePlan
from mlx_specstream.decode.planner import FixedPlanner
from mlx_specstream.decode.proposers import NgramLookup

PROMPT = list(range(600, 700))  # no token twice: the lookup finds nothing, every row is run
WARM_UP = 4


def passes(decoder: Decoder, rows: int, count: int) -> list[float]:
    """Seconds of passes over ``rows`` rows."""
    plan = TreePlan.parse(f"ngram:{rows - 1}" if rows > 1 else "none")
    cache = decoder.target.make_cache()
    decoder.target.prefill(PROMPT[:-1], cache)
    seconds, last = [], 0.0
    for report in decoder.decode(PROMPT, cache, FixedPlanner(plan), Sampling(), 0):
        now = time.perf_counter()
        seconds.append((now - last) / len(report.tokens))
        last = now
        if len(seconds) == count + WARM_UP:
            return seconds[WARM_UP:]
    raise AssertionError("decoding has no end of its own")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", default="1,2,3,4,5,8,12,16")
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    every = [int(n) for n in args.rows.split(",")]
    forms = {}
    for name, dequantize in (("expanded", True), ("packed", False)):
        target = Target.of(load(dequantize=dequantize)[0])
        for compile in (True, False):
            label = f"{name}, {'compiled' if compile else 'eager'}"
            forms[label] = Decoder(target, [NgramLookup(min_length=64, max_length=64)], compile)
    seconds: dict[tuple[str, int], list[float]] = {}
    for _ in range(args.rounds):
        for rows in every:
            for label, decoder in forms.items():
                if rows <= 4 or label.startswith("expanded"):  # packed is linear in rows
                    seconds.setdefault((label, rows), []).extend(passes(decoder, rows, args.passes))
    print(f"{'ms per pass over … rows':24}" + "".join(f"{rows:>8}" for rows in every))
    for label in forms:
        cells = [seconds.get((label, rows)) for rows in every]
        print(
            f"{label:24}"
            + "".join(f"{1e3 * statistics.median(c):8.1f}" if c else f"{'':8}" for c in cells)
        )
    print(
        f"\n{platform.machine()} {platform.system()}, mlx {version('mlx')}, "
        f"{accelerate.status().detail}"
    )


if __name__ == "__main__":
    main()
