"""What the host costs a pass: the decode loop against passes that nobody reads.

    python benchmarks/host_time.py --tree none --tree ngram:7

Two ways of making the same passes, taking turns, on the embedded model:

* *loop*: the decode loop, which reads what each pass committed, plans the next, hands tokens out;
* *chain*: the same traced passes, all at one place, dispatched one after the other and waited for
  once, at the end.

What the loop takes longer is host time that nothing overlaps. *host* is the processor time of the
thread that plans, dispatches, reads and counts; mostly it works while the pass before runs.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import mlx_specstream  # noqa: F401  # isort: skip  (before mlx: it loads OpenBLAS)
import mlx.core as mx

from mlx_specstream import Session, Speculation, load
from mlx_specstream.decode.loop import Decoder
from mlx_specstream.decode.plan import TreePlan
from mlx_specstream.decode.planner import FixedPlanner
from mlx_specstream.decode.processors import Sampling
from mlx_specstream.speculation import decoder_for
from mlx_specstream.target import TreeCache
from mlx_specstream.target.cache import extent

PROMPT = "Write a long story about a fisherman who finds a bottle with a letter in it."
WARM = 4  # passes before the clock starts


def start(decoder: Decoder, text: list[int], room: int) -> TreeCache:
    """A cache with a prompt in it, and room for what follows, so that nothing is traced twice."""
    cache = decoder.target.make_cache(step=512)
    decoder.target.prefill(text[:-1], cache)
    cache.reserve(len(text) + room)
    return cache


def loop(decoder: Decoder, plan: TreePlan, text: list[int], passes: int) -> tuple[float, float]:
    """Seconds per pass of the decode loop, and of the processor that Python itself took of it."""
    cache = start(decoder, text, 400)
    run = decoder.decode(text, cache, FixedPlanner(plan), Sampling(), 0)
    for _ in range(WARM):
        next(run)
    began, worked = time.perf_counter(), time.thread_time()
    for _ in range(passes):
        next(run)
    took, work = time.perf_counter() - began, time.thread_time() - worked
    del run  # ends it
    mx.synchronize()
    return took / passes, work / passes


def chain(decoder: Decoder, plan: TreePlan, text: list[int], passes: int) -> float:
    """Seconds per pass of passes that nobody reads."""
    cache = start(decoder, text, 400)
    run, rows = decoder.runner(plan, Sampling())
    state = decoder.begin(text, cache)
    cache.kv, seed = [], mx.array(0, dtype=mx.uint32)
    reads, place = extent(len(text) + rows, 1 << 20), state.length
    for _ in range(WARM):
        state, report, _ = run(reads, state, seed)
        state = state._replace(length=place)
        mx.eval(report, state)
    began = time.perf_counter()
    for _ in range(passes):
        state, report, _ = run(reads, state, seed)
        state = state._replace(length=place)
        mx.async_eval(report, state)
    mx.eval(report, state)
    return (time.perf_counter() - began) / passes


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tree", action="append", help="trees (default: none, ngram:7)")
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model, tokenizer = load()
    session = Session(model, tokenizer)
    decoder = decoder_for(session.target, session.streams, Speculation())
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    print("ms a pass: loop, chain, what the loop takes longer; host processor time")
    for tree in args.tree or ["none", "ngram|table:7"]:
        plan = TreePlan.parse(tree)
        loops, hosts, chains = [], [], []
        for _ in range(args.rounds):
            took, host = loop(decoder, plan, text, args.passes)
            loops.append(took)
            hosts.append(host)
            chains.append(chain(decoder, plan, text, args.passes))
        a, b, host = median(loops), median(chains), median(hosts)
        print(
            f"{tree}: {1e3 * a:.1f}, {1e3 * b:.1f}, {100 * (a - b) / a:.1f} %; "
            f"host {1e3 * host:.2f} ({100 * host / a:.1f} %)",
            flush=True,
        )


if __name__ == "__main__":
    main()
