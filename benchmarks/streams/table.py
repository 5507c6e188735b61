"""The table of training runs, from the histories that streams folders keep of themselves.

    python benchmarks/streams/table.py benchmarks/streams/results/*.json

Takes the ``config.json`` of streams folders (or copies of them). Held-out figures: accuracy of each
stream, and the tokens per pass to expect of a chain and of trees of the best 2 and 4 candidates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def line(path: Path) -> str:
    """One run: its best validation, and what it took."""
    config = json.loads(path.read_text())
    streams, training = config["streams"], config["training"]
    best = max(training["history"], key=lambda entry: entry["tokens_per_pass"]["top-4"])
    last = training["history"][-1]
    seen = training["anchors"] * best["step"] // max(last["step"], 1)
    accuracy = " / ".join(f"{value:.3f}" for value in best["accuracy"])
    chain, two, four = (best["tokens_per_pass"][name] for name in ("chain", "top-2", "top-4"))
    layers = streams.get("layers", 0)
    return (
        f"| {path.stem} | {streams['method']} | {layers} | {best['step']} | {seen:,} | "
        f"{accuracy} | {chain:.2f} | {two:.2f} | {four:.2f} |"
    )


def main() -> None:
    """Print a Markdown table of the runs named on the command line."""
    print("| run | heads | N_s | step | anchors | accuracy 1 / 2 / 3 | chain | top-2 | top-4 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in sys.argv[1:]:
        print(line(Path(name)))


if __name__ == "__main__":
    main()
