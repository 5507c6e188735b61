"""Our loops against mlx-lm's, on the embedded model, as ratios in one run.

    python benchmarks/ground_floor.py --prompts ../shared/prompts/dev.jsonl --csv out.csv

For every prompt the methods run in turn, ``--rounds`` times, in an order that rotates; each
figure is the median over rounds of the seconds from the first token's pass to the last token.
Fail-closed: a prompt whose token ids differ between methods is printed as different, with the
position, and counts for nothing.

Methods: ``mlx-lm`` (``mlx_lm.stream_generate``), ``plain`` (our loop without proposals), ``ngram``
(our loop with n-gram lookup alone) and ``default`` (what the chat does: whatever comes with the
project for the model, see ``weights/``). The planner decides what to verify in the last two.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from math import exp, log
from pathlib import Path

from mlx_specstream import Session, Speculation, accelerate, load

import mlx_lm  # isort: skip  (after mlx_specstream, which loads OpenBLAS first)


class Runner:
    """Runs each method on the same model and weights."""

    def __init__(self, max_tokens: int):
        self.model, self.tokenizer = load()
        self.max_tokens = max_tokens
        self.methods: dict[str, Callable[[list[int]], tuple[list[int], float, float]]] = {
            "mlx-lm": self.mlx_lm,
            "plain": lambda tokens: self.ours(tokens, Speculation(enabled=False)),
            "ngram": lambda tokens: self.ours(tokens, Speculation()),
            "default": lambda tokens: self.ours(tokens, Speculation(), "auto"),
        }

    def tokens(self, prompt: str) -> list[int]:
        messages = [{"role": "user", "content": prompt}]
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def mlx_lm(self, tokens: list[int]) -> tuple[list[int], float, float]:
        stream = mlx_lm.stream_generate(
            self.model, self.tokenizer, tokens, max_tokens=self.max_tokens
        )
        ids, first, last = [], 0.0, 0.0
        for response in stream:
            ids.append(response.token)
            last = time.perf_counter()
            first = first or last
        return ids, last - first, 1.0

    def ours(
        self, tokens: list[int], speculation: Speculation, streams: str | None = None
    ) -> tuple[list[int], float, float]:
        session = Session(self.model, self.tokenizer, streams, speculation)
        ids, first, last, per_pass = [], 0.0, 0.0, 1.0
        for response in session.stream(tokens, max_tokens=self.max_tokens):
            ids.append(response.token)
            last = time.perf_counter()
            first = first or last
            per_pass = response.tokens_per_pass
        return ids, last - first, per_pass


def geometric_mean(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values)) if values else float("nan")


# Each: what is shown, the slower one's name, the faster one's.
RATIOS = [
    ("plain/mlx-lm", "mlx-lm", "plain"),
    ("ngram/plain", "plain", "ngram"),
    ("default/plain", "plain", "default"),
    ("default/mlx-lm", "mlx-lm", "default"),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL: id, category, prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--category", help="only prompts of these categories, joined by commas")
    parser.add_argument("--csv", type=Path, help="raw seconds of every run")
    parser.add_argument(
        "--methods", default="mlx-lm,plain,ngram,default", help="which of them, joined by commas"
    )
    args = parser.parse_args()

    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines()]
    if args.category:
        prompts = [p for p in prompts if p["category"] in args.category.split(",")]
    runner = Runner(args.max_tokens)
    names = [name for name in runner.methods if name in args.methods.split(",")]
    shown = [ratio for ratio in RATIOS if set(ratio[1:]) <= set(names)]
    for name in names:  # warm up: compile, page in
        runner.methods[name](runner.tokens("Write the word apple ten times, then pear ten times."))

    raw: list[list[object]] = []
    ratios: list[tuple[str, dict[str, float]]] = []
    print("ms per token after the first; tok/pass of ngram and default; speed ratios")
    print(
        f"{'prompt':14} {'tokens':>6}"
        + "".join(f" {name:>8}" for name in names)
        + f" {'tok/pass':>11}"
        + "".join(f" {label:>14}" for label, _, _ in shown)
    )
    for number, prompt in enumerate(prompts):
        tokens = runner.tokens(prompt["prompt"])
        seconds: dict[str, list[float]] = {name: [] for name in names}
        ids: dict[str, list[int]] = {}
        per_pass: dict[str, float] = {}
        for turn in range(args.rounds):
            shift = (turn + number) % len(names)
            for name in names[shift:] + names[:shift]:
                ids[name], took, per_pass[name] = runner.methods[name](tokens)
                seconds[name].append(took)
                raw.append(
                    [prompt["id"], prompt["category"], name, turn, len(ids[name]),
                     per_pass[name], took]
                )  # fmt: skip
        if any(ids[name] != ids[names[0]] for name in names):
            pairs = zip(*ids.values(), strict=False)
            at = next((i for i, tokens_at in enumerate(pairs) if len(set(tokens_at)) > 1), -1)
            print(f"{prompt['id']:14} DIFFERENT from token {at} on")
            continue
        mid = {name: statistics.median(values) for name, values in seconds.items()}
        mine = {label: mid[slow] / mid[fast] for label, slow, fast in shown}
        ratios.append((prompt["category"], mine))
        count = len(ids[names[0]])
        print(
            f"{prompt['id']:14} {count:6}"
            + "".join(f" {1e3 * mid[name] / max(count - 1, 1):8.1f}" for name in names)
            + "".join(f"  {per_pass.get(name, 1.0):4.2f}" for name in ("ngram", "default"))
            + "".join(f" {mine[label]:14.3f}" for label, _, _ in shown),
            flush=True,
        )

    print("\ngeometric means")
    for category in [*dict.fromkeys(category for category, _ in ratios), "all"]:
        rows = [mine for c, mine in ratios if category in (c, "all")]
        print(
            f"{category:14}"
            + "".join(f" {k} {geometric_mean([row[k] for row in rows]):.3f}" for k, _, _ in shown)
        )
    print(
        f"\n{platform.machine()} {platform.system()}, mlx {version('mlx')}, "
        f"{accelerate.status().detail}"
    )
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(
                ["id", "category", "method", "round", "tokens", "tokens_per_pass", "seconds"]
            )
            writer.writerows(raw)


if __name__ == "__main__":
    main()
