"""``python -m mlx_specstream.train report``: what streams are worth on this machine.

    python -m mlx_specstream.train report --streams my-streams --data corpus.npz \
        --prompts prompts.jsonl --temps 0,0.8 --json report.json --png report.png

``--data`` gives quality on held-out text (``training/report_quality.py``); ``--prompts`` decodes
them live, by several trees, and times the default speculation against plain decoding
(``train_report_live.py``, ``training/report_speed.py``); memory is told in any case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console

from . import loading, options, shipped
from .benchmarking.prompts import named_tasks, prompts_of
from .errors import SpecStreamError, UsageError
from .streams.folder import StreamSet
from .target import Target
from .train_data import read_corpora
from .train_distill import temperatures
from .train_progress import progress_bar
from .train_report_json import circumstances, measurements
from .train_report_live import measure_live
from .train_report_tables import held_out_table, live_tables, memory_table
from .training import report_plot
from .training.report_memory import measure_memory
from .training.report_quality import LAST_TEXTS, measure_held_out
from .training.report_speed import summarise
from .writing import check_writable, written_whole

WIDTH = 120  # of the tables, where stdout is no terminal


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line, checked as far as it can be without the model.

    Raises:
        SpecStreamError: If an option or a file it names cannot be used.
    """
    parser = options.Parser(
        prog="python -m mlx_specstream.train report",
        description="Measure streams: quality, tokens per pass, speed-up, memory.",
    )
    parser.add_argument(
        "--data", nargs="+", type=Path, help="corpora to measure quality on (.npz, or JSONL)"
    )
    parser.add_argument(
        "--texts",
        type=options.positive,
        help="most texts of it (default: those that training held out, else the last "
        f"{LAST_TEXTS})",
    )
    parser.add_argument(
        "--prompts", type=Path, help="prompts to decode live: JSONL with prompt, category, id"
    )
    parser.add_argument("--temps", default="0,0.8", help="temperatures (default: 0,0.8)")
    parser.add_argument("--max-tokens", type=options.positive, default=128, help="of an answer")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled answers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, as JSON")
    parser.add_argument("--png", type=Path, metavar="FILE", help="a picture of it")
    options.add_model_options(parser)
    args = parser.parse_args(argv)
    args.temps = temperatures(args.temps)
    args.tasks = named_tasks(args.prompts) if args.prompts else {}
    for path in args.data or ():
        if not path.is_file():
            raise SpecStreamError(f"there is no corpus {path}")
    if args.png:
        if not (args.data or args.prompts):
            raise UsageError("--png has nothing to draw: give --data or --prompts as well")
        report_plot.figure_class()
    for path in (args.json, args.png):
        if path:
            check_writable(path)
    return args


def streams_of(choice: str, model: Any, tokenizer: Any) -> tuple[StreamSet, Path | None]:
    """The streams that ``--streams`` names, and their folder.

    Raises:
        SpecStreamError: If they cannot be used with the model.
    """
    if choice == "none":
        return StreamSet(), None
    if choice == "auto":
        found = shipped.streams_for(model, tokenizer)
        return found, next((f for f in shipped.folders() if f.name == found.name), None)
    folder = Path(choice).expanduser()
    return shipped.streams_in(folder, Target.of(model), tokenizer), folder


def form_of(model: Any) -> str:
    """In which form the target is held."""
    loaded = getattr(model, "_specstream_loaded", None)
    if loaded is None:
        return str(Target.of(model).dtype).removeprefix("mlx.core.")
    if not loaded.bits:
        return loaded.dtype
    kept = f"expanded to {loaded.dtype}" if loaded.dequantized else f"computed in {loaded.dtype}"
    return f"{loaded.bits}-bit, {kept}"


@contextmanager
def watched(console: Console, name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, as a function to call with what is done and how much there is."""
    with progress_bar(console) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main(argv: list[str]) -> None:
    """Report as the command line says.

    Raises:
        SpecStreamError: If something asked for cannot be measured or written; at the end, if any
            text differed from plain decoding's.
    """
    args = arguments(argv)
    console = Console(stderr=True, highlight=False)
    model, tokenizer = options.load_from(args)
    target = Target.of(model)
    streams, folder = streams_of(args.streams, model, tokenizer)
    name = streams.name or "nothing trained"
    console.print(f"{loading.description(model)}\nstreams: {folder or name}", markup=False)
    prompts = prompts_of(args.tasks, tokenizer, target.context)
    held_out, runs = None, []
    if args.data:
        if streams.heads is None:
            raise SpecStreamError(
                f"--data measures stream heads and there are none ({name}): name a folder that "
                "has some with --streams, or leave --data out"
            )
        corpus = read_corpora(args.data, tokenizer, None)
        with watched(console, "held-out tokens") as progress:
            held_out = measure_held_out(streams.heads, corpus, folder, args.texts, progress)
    if prompts:
        mx.reset_peak_memory()
        with watched(console, "answers") as progress:
            runs = measure_live(
                model, tokenizer, streams, prompts, args.temps, args.max_tokens, args.seed, progress
            )
    memory = measure_memory(model, form_of(model), streams)
    ways = summarise(runs)

    output = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if held_out:
        output.print(held_out_table(held_out))
    output.print(*live_tables(ways), memory_table(memory), sep="\n")
    if not (args.data or args.prompts):
        console.print("give --data to measure quality, --prompts to measure decoding")
    if args.json:
        content = circumstances(args, model, folder) | measurements(held_out, ways, runs, memory)
        with written_whole(args.json) as file:
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.png:
        report_plot.draw(args.png, f"{loading.description(model)} · {name}", held_out, ways)
    differing = sum(way.prompts - way.identical for way in ways)
    if differing:
        raise SpecStreamError(
            f"{differing} texts differ from plain decoding's: please report this with the output "
            "of python -m mlx_specstream.doctor"
        )
