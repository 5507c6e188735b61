"""Measuring memory and speed: models are loaded, methods run, and what came of it told."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from rich.console import Console

from .. import doctor, loading
from ..errors import SpecStreamError, UsageError
from ..session import Session
from ..speculation import Speculation
from ..streams.folder import StreamSet
from ..target import Target
from ..train_progress import progress_bar
from . import chart, saved, tables
from .arguments import arguments
from .bandwidth import copy_bandwidth
from .forms import held_bits, load_form
from .methods import PLAIN, SPECULATIVE, Method, Ours
from .mlx_lm_methods import MLX_LM, MLX_LM_DRAFT, MlxLm, check_draft
from .prompts import prompts_of
from .rows import Row, rows_of
from .schedule import Run, measure

WIDTH = 200  # of the tables, where stdout is no terminal


def methods_of(
    args: argparse.Namespace, model: Any, tokenizer: Any, draft: Any
) -> tuple[Ours, list[Method]]:
    """Plain decoding, and the others that the command line asks for.

    Raises:
        SpecStreamError: If the streams cannot be used.
    """
    streams = None if args.streams == "none" else args.streams
    found = Session(model, tokenizer, streams).streams
    plain = Ours(PLAIN, model, tokenizer, StreamSet(), Speculation(enabled=False))
    others: list[Method] = [Ours(SPECULATIVE, model, tokenizer, found, Speculation())]
    if MLX_LM in args.against:
        others.append(MlxLm(model, tokenizer))
    if MLX_LM_DRAFT in args.against:
        others.append(MlxLm(model, tokenizer, draft, args.num_draft_tokens))
    return plain, others


def measure_form(
    args: argparse.Namespace,
    bits: int | None,
    draft: tuple[Any, Any] | None,
    say: Callable[[str], None],
    done: Callable[[], None],
) -> tuple[str, list[Run]]:
    """Load the model in one form and measure it in every context.

    Args:
        args: The command line.
        bits: The form, or None for the model as it loads.
        draft: The draft model and its tokenizer, or None.
        say: Called with lines for people.
        done: Called after each run.

    Returns:
        The model's description, and the runs.

    Raises:
        SpecStreamError: If the model or what belongs to it cannot be used.
    """
    model, tokenizer = load_form(args, bits)
    described = loading.description(model)
    say(described)
    if draft is not None:
        check_draft(tokenizer, draft[1])
    room = Target.of(model).context
    most = max((context for context in args.contexts if context), default=0)
    if room is not None and most + args.max_tokens > room:
        raise UsageError(
            f"--context {most} and --max-tokens {args.max_tokens} need more positions than the "
            f"{room} that the model has"
        )
    plain, others = methods_of(args, model, tokenizer, draft and draft[0])
    runs = []
    for context in args.contexts:
        prompts = prompts_of(args.tasks, tokenizer, room, context)
        longer = [p.name for p in prompts if context is not None and len(p.tokens) > context]
        if longer:
            say(f"longer than --context {context} and left as they are: {', '.join(longer)}")
        runs += measure(
            plain,
            others,
            prompts,
            bits=held_bits(model),
            context=context,
            rounds=args.rounds,
            max_tokens=args.max_tokens,
            sampling=args.sampling,
            done=done,
        )
    return described, runs


def show(args: argparse.Namespace, rows: list[Row], bandwidth: float, title: str) -> None:
    """Print the tables."""
    sheets = [tables.speed_sheet(rows), tables.memory_sheet(rows, bandwidth)]
    notes = tables.difference_lines(rows)
    if args.markdown:
        told = (
            f"{title}\n\n`{shlex.join(['python', '-m', 'mlx_specstream.benchmark', *args.argv])}`"
        )
        print(*[told, *(sheet.markdown() for sheet in sheets), *notes], sep="\n\n")
        return
    output = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    output.print(title, markup=False)
    output.print(*(sheet.rich() for sheet in sheets), sep="\n")
    output.print(*notes, sep="\n", markup=False)


def main(argv: list[str]) -> None:
    """Measure as the command line says.

    Raises:
        SpecStreamError: If something asked for cannot be measured or written; at the end, if
            speculative decoding gave another text than plain decoding.
    """
    args = arguments(argv)
    args.argv = argv
    console = Console(stderr=True, highlight=False)
    bandwidth = copy_bandwidth()
    draft = loading.load(args.draft_model) if args.draft_model else None
    runs: list[Run] = []
    described = ""
    count = len(args.forms) * len(args.contexts) * len(args.tasks)
    total = count * (len(args.against) + 1) * (args.rounds + 1)
    with progress_bar(console) as bar:
        task = bar.add_task("runs", total=total)
        for bits in args.forms:
            described, more = measure_form(
                args,
                bits,
                draft,
                lambda line: console.print(line, markup=False),
                lambda: bar.advance(task),
            )
            runs += more
            gc.collect()  # the model of this form goes before the next one comes
            mx.clear_cache()
    rows = rows_of(runs)
    name = described.split(" · ", 1)[0]
    where = saved.machine()
    versions = doctor.versions()
    title = f"{name} on {where['device']}, mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}"
    show(args, rows, bandwidth, title)
    if args.json:
        saved.write_json(args.json, saved.content_of(runs, rows, bandwidth, argv, name))
    if args.csv:
        saved.write_csv(args.csv, runs)
    if args.plot:
        chart.draw(args.plot, title, rows)
    differing = [row for row in rows if row.method in (PLAIN, SPECULATIVE) and row.differences]
    if differing:
        raise SpecStreamError(
            "speculative decoding gave another text than plain decoding: please report this with "
            "the output of python -m mlx_specstream.doctor"
        )
