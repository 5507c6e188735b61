"""``python -m mlx_specstream.benchmark record``: what proposals would have been right, as a file.

python -m mlx_specstream.benchmark record --prompts prompts.jsonl --out recorded.json.gz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from .. import loading, options
from ..decode.processors import Sampling
from ..session import Session
from ..target import Target
from ..train_progress import progress_bar
from ..writing import check_writable
from .prompts import named_tasks, prompts_of
from .record import record


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        SpecStreamError: If an option or a file it names cannot be used.
    """
    parser = options.Parser(
        prog="python -m mlx_specstream.benchmark record",
        description="Decode prompts plainly and record, for every token, what each proposer "
        "would have had right there. The file holds the answers' token ids.",
    )
    add = parser.add_argument
    add("--prompts", type=Path, help="JSONL with prompt, category, id (default: four of its own)")
    add("--out", type=Path, required=True, metavar="FILE", help="JSON; compressed if it ends .gz")
    add("--max-tokens", type=options.positive, default=128, help="of an answer (default: 128)")
    add("--temp", type=float, default=0.0, help="temperature (default: 0, greedy)")
    add("--seed", type=int, default=0, help="of sampled answers (default: 0)")
    options.add_model_options(parser)
    args = parser.parse_args(argv)
    Sampling(temp=args.temp)  # refused now if it cannot be
    args.tasks = named_tasks(args.prompts)
    check_writable(args.out)
    return args


def main(argv: list[str]) -> None:
    """Record as the command line says.

    Raises:
        SpecStreamError: If the model, the streams or the prompts cannot be used.
    """
    args = arguments(argv)
    console = Console(stderr=True, highlight=False)
    model, tokenizer = options.load_from(args)
    console.print(loading.description(model), markup=False)
    chosen = options.streams_from(args)
    streams = Session(model, tokenizer, chosen).streams
    prompts = prompts_of(args.tasks, tokenizer, Target.of(model).context)
    name = loading.description(model).split(" · ", 1)[0]
    with progress_bar(console) as bar:
        task = bar.add_task("answers", total=len(prompts))
        recording = record(
            *(model, tokenizer, name, streams, prompts, args.max_tokens, args.temp, args.seed),
            done=lambda: bar.advance(task),
        )
    recording.save(args.out)
    print(f"wrote {args.out}: {recording}")
