"""``python -m mlx_specstream.train report``: what streams are worth on this machine.

    python -m mlx_specstream.train report --streams my-streams --data corpus.npz \
        --prompts prompts.jsonl --temps 0,0.8 --json report.json --png report.png

``--data`` gives quality on held-out text; ``--prompts`` decodes them live, by several trees, and
times the default speculation against plain decoding; memory is told in any case. ``--json`` holds
everything, every run included (``training/report.py`` explains the fields).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import doctor, loading, options, shipped
from .errors import SpecStreamError, UsageError
from .session import encode
from .streams.files import tokenizer_hash
from .streams.folder import StreamSet
from .target import Target
from .train_distill import temperatures
from .train_progress import progress_bar
from .training import report as measure
from .training import report_plot
from .training.corpus import Corpus, from_answers, json_lines, templated
from .training.distill import Task, read_prompts

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
    parser.add_argument("--data", type=Path, help="corpus to measure quality on (.npz, or JSONL)")
    parser.add_argument(
        "--texts",
        type=options.positive,
        help="most texts of it (default: those that training held out, else the last "
        f"{measure.LAST_TEXTS})",
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
    args.tasks = read_prompts(args.prompts) if args.prompts else []
    args.ids = ids_of(args.prompts, args.tasks) if args.prompts else []
    if args.data and not args.data.is_file():
        raise SpecStreamError(f"there is no corpus {args.data}")
    if args.png:
        if not (args.data or args.prompts):
            raise UsageError("--png has nothing to draw: give --data or --prompts as well")
        report_plot.figure_class()
    for path in (args.json, args.png):
        if path:
            check_writable(path)
    return args


def ids_of(path: Path, tasks: list[Task]) -> list[str]:
    """A name for each prompt: its ``id`` if all have one of their own, else its number."""
    found: dict[str, str] = {}
    if path.suffix == ".jsonl":
        for row in json_lines(path):
            if isinstance(row.get("prompt"), str) and "id" in row:
                found.setdefault(row["prompt"].strip(), str(row["id"]))
    names = [found.get(task.prompt, "") for task in tasks]
    distinct = len(set(names)) == len(names) and "" not in names
    return names if distinct else [str(number) for number in range(1, len(tasks) + 1)]


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written after all the measuring.

    Raises:
        SpecStreamError: If it could not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
    except OSError as error:
        raise SpecStreamError(f"cannot write {path}: {error.strerror or error}") from error


def read_corpus(path: Path, tokenizer: Any) -> Corpus:
    """The corpus, checked against the tokenizer.

    Raises:
        SpecStreamError: If it cannot be read or was made with another tokenizer.
    """
    ours = tokenizer_hash(tokenizer)
    if path.suffix != ".npz":
        return from_answers(path, tokenizer, ours)
    corpus = Corpus.load(path)
    if corpus.tokenizer != ours:
        raise SpecStreamError(f"{path} was made with another tokenizer than the model's")
    return corpus


def streams_of(
    args: argparse.Namespace, model: Any, tokenizer: Any
) -> tuple[StreamSet, Path | None]:
    """The streams that the options name, and their folder."""
    if args.streams == "none":
        return StreamSet(), None
    if args.streams == "auto":
        found = shipped.streams_for(model, tokenizer)
        folders = [folder for folder in shipped.folders() if folder.name == found.name]
        return found, folders[0] if folders else None
    folder = Path(args.streams).expanduser()
    return shipped.streams_in(folder, Target.of(model), tokenizer), folder


def prompts_of(
    args: argparse.Namespace, tokenizer: Any, context: int | None
) -> list[measure.Prompt]:
    """The prompts as token ids.

    Raises:
        SpecStreamError: If one leaves no room for an answer.
    """
    chat = getattr(tokenizer, "has_chat_template", True)
    prompts = []
    for name, task in zip(args.ids, args.tasks, strict=True):
        tokens = templated(tokenizer, task.prompt) if chat else encode(tokenizer, task.prompt)
        if context is not None and len(tokens) >= context:
            raise SpecStreamError(
                f"prompt {name} has {len(tokens)} tokens but the context holds {context}: "
                "shorten it or leave it out"
            )
        prompts.append(measure.Prompt(name, task.category, tokens))
    return prompts


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


# Output -----------------------------------------------------------------------------------------


def number(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash where nothing was measured."""
    return "–" if value is None else format(value, form)


def table_of(title: str, *columns: str) -> Table:
    """A table whose first column is a name and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if index else "left")
    return table


def held_out_table(held_out: measure.HeldOut) -> Table:
    """Rank hit rates by stream."""
    ranks = [f"rank {k + 1}" for k in range(len(held_out.hits[0]))]
    table = table_of(f"Quality on {held_out.which}", "stream", *ranks)
    for stream, hits in enumerate(held_out.hits, start=1):
        table.add_row(str(stream), *(f"{share:.1%}" for share in hits))
    expected = held_out.tokens_per_pass.items()
    table.caption = "rank 1 is the accuracy; tokens per pass to expect: " + ", ".join(
        f"{name} {value:.2f}" for name, value in expected
    )
    return table


def live_tables(ways: list[measure.Way]) -> list[Table]:
    """For each temperature: the trees, and their tokens per pass by category."""
    tables = []
    for temperature in dict.fromkeys(way.temperature for way in ways):
        here = [way for way in ways if way.temperature == temperature]
        table = table_of(
            f"Live decoding, temperature {temperature:g}",
            *("tree", "tokens/pass", "identical", "accepted", "ms/pass", "× plain pass"),
            *("predicted ×", "measured ×"),
        )
        for way in here:
            accepted = ", ".join(f"{who} {share:.0%}" for who, share in way.acceptance.items())
            table.add_row(
                way.way,
                f"{way.tokens_per_pass:.2f}",
                f"{way.identical} of {way.prompts}",
                accepted or "–",
                number(way.pass_seconds and 1e3 * way.pass_seconds, ".1f"),
                number(way.cost),
                number(way.predicted),
                number(way.measured),
            )
        table.caption = (
            "speed-up over plain decoding; identical: prompts with plain decoding's text"
        )
        tables.append(table)
        categories = list(dict.fromkeys(c for way in here for c in way.by_category))
        if len(categories) > 1:
            names = [way.way.replace(",", ", ") for way in here]
            table = table_of(f"Tokens per pass, temperature {temperature:g}", "category", *names)
            for category in categories:
                values = [f"{way.by_category[category]:.2f}" for way in here]
                table.add_row(escape(category) or "(none)", *values)
            tables.append(table)
    return tables


def memory_table(memory: measure.Memory) -> Table:
    """Bytes of each part."""
    table = table_of(f"Memory (the target is held {memory.form})", "part", "bytes", "of target")
    rows = {
        "target": memory.target,
        "stream heads": memory.heads,
        "draft head": memory.draft_head,
        "n-gram table": memory.table,
        "streams, all": memory.added,
        "peak while measuring": memory.peak,
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}", f"{value / memory.target:.2%}")
    return table


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file: the whole of it or nothing.

    Raises:
        SpecStreamError: If it cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as work:
            file = Path(work) / "report.json"
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            os.replace(file, path)
    except OSError as error:
        raise SpecStreamError(f"cannot write {path}: {error.strerror or error}") from error


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
    streams, folder = streams_of(args, model, tokenizer)
    name = streams.name or "nothing trained"
    console.print(f"{loading.description(model)}\nstreams: {folder or name}", markup=False)
    prompts = prompts_of(args, tokenizer, target.context)
    held_out, runs = None, []
    if args.data:
        if streams.heads is None:
            raise SpecStreamError(
                f"--data measures stream heads and there are none ({name}): name a folder that "
                "has some with --streams, or leave --data out"
            )
        corpus = read_corpus(args.data, tokenizer)
        with watched(console, "held-out tokens") as progress:
            held_out = measure.measure_held_out(streams.heads, corpus, folder, args.texts, progress)
    if prompts:
        mx.reset_peak_memory()
        with watched(console, "answers") as progress:
            runs = measure.measure_live(
                model, tokenizer, streams, prompts, args.temps, args.max_tokens, args.seed, progress
            )
    memory = measure.measure_memory(model, form_of(model), streams)
    ways = measure.summarise(runs)

    output = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    if held_out:
        output.print(held_out_table(held_out))
    output.print(*live_tables(ways), memory_table(memory), sep="\n")
    if not (args.data or args.prompts):
        console.print("give --data to measure quality, --prompts to measure decoding")
    if args.json:
        write_json(args.json, everything(args, model, folder, held_out, runs, ways, memory))
    if args.png:
        title = f"{loading.description(model)} · {name}"
        report_plot.draw(args.png, title, held_out, ways)
    differing = sum(way.prompts - way.identical for way in ways)
    if differing:
        raise SpecStreamError(
            f"{differing} texts differ from plain decoding's: please report this with the output "
            "of python -m mlx_specstream.doctor"
        )


def everything(
    args: argparse.Namespace,
    model: Any,
    folder: Path | None,
    held_out: measure.HeldOut | None,
    runs: list[measure.Run],
    ways: list[measure.Way],
    memory: measure.Memory,
) -> dict[str, Any]:
    """What ``--json`` holds: plain numbers and texts."""
    loaded = getattr(model, "_specstream_loaded", None)
    return {
        "versions": doctor.versions(),
        "machine": {
            "platform": platform.platform(),
            "device": doctor.device(),
            "memory": doctor.memory(),
            "openblas": doctor.openblas(),
        },
        "model": loaded.name if loaded else type(model).__name__,
        "streams": str(folder) if folder else None,
        "settings": {
            "data": args.data and str(args.data),
            "texts": args.texts,
            "prompts": args.prompts and str(args.prompts),
            "temperatures": args.temps,
            "max_tokens": args.max_tokens,
            "seed": args.seed,
        },
        "held_out": held_out and asdict(held_out) | {"accuracy": held_out.accuracy},
        "live": [asdict(way) | {"tokens_per_pass": way.tokens_per_pass} for way in ways],
        "runs": [asdict(run) for run in runs],
        "memory": asdict(memory) | {"added": memory.added, "share": memory.share},
    }
