"""Measuring memory and speed: models are loaded, methods run, and what came of it told."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from rich.console import Console

from .. import loading, options
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
from .rows import Row, grouped, rows_of
from .schedule import Run, measure

WIDTH = 200  # of the tables, where stdout is no terminal
REPORT = "please report this with the output of python -m mlx_specstream.doctor"


@dataclass
class Measured:
    """What was measured so far; it is still there when measuring is stopped.

    Args:
        model: Name of the model, for people.
        runs: In order.
    """

    model: str = ""
    runs: list[Run] = field(default_factory=list)

    def finished(self, count: int) -> list[Run]:
        """The runs of the prompts (of each form and context) that have ``count`` runs: all."""
        groups = grouped(self.runs, lambda run: (run.bits, run.context, run.prompt)).values()
        return [run for some in groups if len(some) == count for run in some]


def methods_of(
    args: argparse.Namespace, model: Any, tokenizer: Any, draft: Any
) -> tuple[Ours, list[Method]]:
    """Plain decoding, and the others that the command line asks for.

    Raises:
        SpecStreamError: If the streams cannot be used.
    """
    found = Session(model, tokenizer, options.streams_from(args)).streams
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
    measured: Measured,
    say: Callable[[str], None],
    done: Callable[[], None],
) -> None:
    """Load the model in one form and measure it in every context.

    Args:
        args: The command line.
        bits: The form, or None for the model as it loads.
        draft: The draft model and its tokenizer, or None.
        measured: Where the runs go.
        say: Called with lines for people.
        done: Called after each run.

    Raises:
        SpecStreamError: If the model or what belongs to it cannot be used.
    """
    model, tokenizer = load_form(args, bits)
    described = loading.description(model)
    measured.model = described.split(" · ", 1)[0]
    say(described)
    if draft is not None:
        check_draft(tokenizer, draft[1])
    room = Target.of(model).context
    check_room(args, room)
    plain, others = methods_of(args, model, tokenizer, draft and draft[0])

    def keep(run: Run) -> None:
        measured.runs.append(run)
        done()

    for context in args.contexts:
        prompts = prompts_of(args.tasks, tokenizer, room, context)
        longer = [p.name for p in prompts if context is not None and len(p.tokens) > context]
        if longer:
            say(f"longer than --context {context} and left as they are: {', '.join(longer)}")
        measure(
            plain,
            others,
            prompts,
            bits=held_bits(model),
            context=context,
            rounds=args.rounds,
            max_tokens=args.max_tokens,
            sampling=args.sampling,
            done=keep,
        )


def check_room(args: argparse.Namespace, room: int | None) -> None:
    """Refuse contexts and answers that are longer than what the model holds.

    Raises:
        UsageError: If they are.
    """
    most = max((context for context in args.contexts if context), default=0)
    if room is None or most + args.max_tokens <= room:
        return
    asked = f"--context {most} and answers" if most else "answers"
    raise UsageError(
        f"{asked} of {args.max_tokens} tokens (--max-tokens) need more positions than the "
        f"{room} that the model has"
    )


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


def measure_all(
    args: argparse.Namespace, console: Console, measured: Measured, total: int
) -> SpecStreamError | None:
    """Measure all forms.

    Args:
        args: The command line.
        console: For people.
        measured: Where the runs go.
        total: How many runs there will be.

    Returns:
        What stopped it before its end, Ctrl-C too, as a command tells it; None if nothing did.
    """
    try:
        draft = loading.load(args.draft_model) if args.draft_model else None
        with progress_bar(console) as bar:
            task = bar.add_task("runs", total=total)
            for bits in args.forms:
                measure_form(
                    *(args, bits, draft, measured),
                    say=lambda line: console.print(line, markup=False),
                    done=lambda: bar.advance(task),
                )
                gc.collect()  # the model of this form goes before the next one comes
                mx.clear_cache()
    except KeyboardInterrupt:
        return SpecStreamError("interrupted", 130)
    except SpecStreamError as error:
        return error
    except (RuntimeError, MemoryError) as error:  # of MLX: there is no more memory, for instance
        return SpecStreamError(str(error) or "there is no more memory")
    return None


def check_texts(rows: Sequence[Row]) -> None:
    """End in an error if a text of ours is not the one it has to be.

    Raises:
        SpecStreamError: If speculative decoding gave another text than plain decoding, or plain
            decoding another than in its first run.
    """
    differing = {row.method for row in rows if row.differences}
    if PLAIN in differing:
        raise SpecStreamError(
            "plain decoding itself did not give the same text in every run, so nothing can be "
            f"compared with it: {REPORT}"
        )
    if SPECULATIVE in differing:
        raise SpecStreamError(
            f"speculative decoding gave another text than plain decoding: {REPORT}"
        )


def main(argv: list[str]) -> None:
    """Measure as the command line says. What is finished is told and written in any case.

    Raises:
        SpecStreamError: If something asked for cannot be measured or written, or measuring was
            stopped; at the end, if a text of ours is not the one it has to be.
    """
    args = arguments(argv)
    args.argv = argv
    bandwidth = copy_bandwidth()
    measured = Measured()
    each = (len(args.against) + 1) * (args.rounds + 1)  # runs of a prompt
    total = len(args.forms) * len(args.contexts) * len(args.tasks) * each
    console = Console(stderr=True, highlight=False)
    stopped = measure_all(args, console, measured, total)
    if stopped and not measured.runs:
        raise stopped
    runs = measured.finished(each)
    rows = rows_of(runs)
    why = str(stopped) if stopped else None
    content = saved.content_of(runs, rows, bandwidth, argv, measured.model, why)
    title = saved.title_of(content)
    if rows:
        show(args, rows, bandwidth, title)
    if args.json:
        saved.write_json(args.json, content)
    if args.csv:
        saved.write_csv(args.csv, measured.runs)
    if args.plot and rows:
        chart.draw(args.plot, title, rows)
    if stopped:
        raise SpecStreamError(
            f"{stopped} (after {len(measured.runs)} of {total} runs: those were kept)",
            stopped.exit_code,
        )
    check_texts(rows)
