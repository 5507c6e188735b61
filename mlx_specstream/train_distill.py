"""``python -m mlx_specstream.train distill``: the target's own answers to prompts, as a corpus.

    python -m mlx_specstream.train distill --prompts prompts.jsonl --out corpus.npz --temps 0,0.7

A run that was stopped goes on when the same command is given again: finished answers are kept
beside the corpus, in ``<out>.journal``.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rich.console import Console

from . import loading, options
from .errors import UsageError
from .train_data import answered
from .training.distill import read_prompts


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = options.Parser(
        prog="python -m mlx_specstream.train distill",
        description="Let the model answer prompts, to train streams on its own text.",
    )
    parser.add_argument(
        "--prompts", required=True, type=Path, help="JSONL, plain text (a prompt a line), or a chat"
    )
    parser.add_argument("--out", required=True, type=Path, help="corpus to write (.npz)")
    parser.add_argument("--temps", default="0", help="temperatures, joined by commas (default: 0)")
    parser.add_argument("--max-tokens", type=options.positive, default=192, help="of an answer")
    parser.add_argument("--batch", type=options.positive, default=32, help="answers at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled answers")
    options.add_model_options(parser)
    return parser.parse_args(argv)


def temperatures(text: str) -> list[float]:
    """``"0,0.7"`` as numbers.

    Raises:
        UsageError: If it is not that.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(0 <= value < 100 for value in values):
        raise UsageError(f"--temps takes temperatures like 0,0.7, not '{text}'")
    return list(dict.fromkeys(values))


def main(argv: list[str]) -> None:
    """Distil as the command line says."""
    args = arguments(argv)
    tasks = read_prompts(args.prompts, temperatures(args.temps))
    console = Console(stderr=True, highlight=False)
    model, tokenizer = options.load_from(args)
    console.print(f"{loading.description(model)}\n{len(tasks)} answers")
    answered(
        model, tokenizer, tasks, args.out, console, args.max_tokens, args.batch, args.seed, math.inf
    )
