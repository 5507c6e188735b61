"""What proposals are worth, weighed without running a model's passes: simulate, fits, record.

    python -m mlx_specstream.benchmark simulate
    python -m mlx_specstream.benchmark simulate --curve m4-pro
    python -m mlx_specstream.benchmark fits --params 8B --bits 4
    python -m mlx_specstream.benchmark record --prompts prompts.jsonl --out recorded.json.gz

``simulate`` replays a recorded run with the planner and a cost curve. What it prints is a
prediction; without ``--curve`` it does so for all published curves.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import options
from ..decode.costs import CostCurve
from ..decode.planner import PLAIN
from ..errors import UsageError
from ..writing import check_writable, written_whole
from . import fits_command, record_command
from .chips import published, published_curve
from .recording import Recording, shipped
from .simulation import Outcome, Simulation, prices_streams, simulate
from .tables import Sheet

WIDTH = 160  # of the tables, where stdout is no terminal
ALL = "all"
LABEL = "PREDICTION, not a measurement"
NOTE = "× plain: geometric mean over prompts; under 1.0: prompts slower than plain decoding"
NO_CATEGORY = "(none given)"


def main(name: str, argv: list[str]) -> None:
    """Lead to one of the three commands.

    Raises:
        SpecStreamError: If what the command line asks for cannot be done.
    """
    {"simulate": run_simulate, "fits": fits_command.main, "record": record_command.main}[name](argv)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line of ``simulate``.

    Raises:
        SpecStreamError: If an option or a file it names cannot be used.
    """
    parser = options.Parser(
        prog="python -m mlx_specstream.benchmark simulate",
        description="Predict what speculation is worth where passes cost what a curve says.",
    )
    add = parser.add_argument
    names = ", ".join(published())
    add(
        "--curve",
        default=ALL,
        metavar="FILE|NAME",
        help=f"a saved cost curve, a published one ({names}), or {ALL} for all published ones "
        f"(default: {ALL})",
    )
    add("--recording", type=Path, metavar="FILE", help="made by record (default: the shipped one)")
    add("--json", type=Path, metavar="FILE", help="everything, as JSON")
    args = parser.parse_args(argv)
    args.recorded = read_recording(args.recording)
    args.curves = curves_of(args.curve, args.recorded)
    if args.json:
        check_writable(args.json)
    return args


def read_recording(path: Path | None) -> Recording:
    """A recording, or the one that comes with the repository.

    Raises:
        SpecStreamError: If it cannot be read, or there is none.
    """
    path = path or shipped()
    if path is None:
        raise UsageError(
            "the recording of the default model comes with the repository only: name one with "
            "--recording (python -m mlx_specstream.benchmark record makes it)"
        )
    return Recording.load(path)


def curves_of(choice: str, recording: Recording) -> dict[str, CostCurve]:
    """The cost curves that ``--curve`` names.

    Raises:
        SpecStreamError: If there is no such curve, or its file cannot be read.
    """
    if choice == ALL:
        return {name: each.curve(recording) for name, each in published().items()}
    if choice not in published() and Path(choice).exists():
        return {choice: CostCurve.load(Path(choice))}
    return {choice: published_curve(choice).curve(recording)}


def run_simulate(argv: list[str]) -> None:
    """Predict as the command line says.

    Raises:
        SpecStreamError: If a file cannot be used.
    """
    args = arguments(argv)
    made = {name: simulate(args.recorded, curve) for name, curve in args.curves.items()}
    output = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    output.print(f"{LABEL}. Replayed: {args.recorded}", markup=False)
    if args.curve == ALL:
        output.print(comparison(made).rich())
    for name, curve in args.curves.items():
        output.print(f"{name}: {source_of(curve)}", markup=False)
        if not prices_streams(curve):
            output.print("It does not say what streams cost: replayed without them.")
        if args.curve != ALL:
            output.print(categories(made[name]).rich(), trees(made[name]).rich(), sep="\n")
    if args.json:
        content = json_of(args.recorded, args.curves, made)
        with written_whole(args.json) as file:
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def source_of(curve: CostCurve) -> str:
    """Where a cost curve is from, in words."""
    about = curve.about
    if "source" in about:
        return f"{about.get('what', 'costs')}; published: {about['source']}"
    known = ", ".join(str(about[key]) for key in ("device", "dtype", "mlx") if key in about)
    return f"measured on {known}" if known else "its file does not say where it was measured"


def cells(outcome: Outcome) -> list[str]:
    """Tokens per pass and speed-up."""
    return [f"{outcome.tokens_per_pass:.2f}", f"{outcome.speedup:.2f}"]


def worst(outcome: Outcome) -> list[str]:
    """The prompt that gained least, and how many lost."""
    return [f"{outcome.worst_prompt} {outcome.worst_speedup:.2f}", str(outcome.slower)]


def comparison(made: dict[str, Simulation]) -> Sheet:
    """A row for each curve."""
    rows = []
    for name, one in made.items():
        commonest, share = next(iter(one.trees.items()))
        fixed = [str(one.best_fixed), *cells(one.fixed_overall)]
        rows.append(
            [
                *(name, f"{commonest} ({share:.0%})", fixed[0]),
                *(*cells(one.overall), *worst(one.overall), *fixed[1:]),
            ]
        )
    return Sheet(
        title="Predicted, by cost curve",
        columns=[
            *("curve", "commonest tree", "best fixed tree", "tokens/pass", "× plain"),
            *("worst prompt ×", "under 1.0", "fixed tokens/pass", "fixed × plain"),
        ],
        names=3,
        rows=rows,
        note=f"{NOTE}; the best fixed tree is known only afterwards",
    )


def categories(one: Simulation) -> Sheet:
    """A row for each kind of prompt, and for all."""
    every = {**one.by_category, "all": one.overall}
    every[f"all, best fixed tree: {one.best_fixed}"] = one.fixed_overall
    rows = [
        [name or NO_CATEGORY, str(each.prompts), *cells(each), *worst(each)]
        for name, each in every.items()
    ]
    return Sheet(
        title="Predicted, by kind of prompt",
        columns=[
            *("prompts of", "prompts", "tokens/pass", "× plain", "worst prompt ×", "under 1.0")
        ],
        names=1,
        rows=rows,
        note=NOTE,
    )


def trees(one: Simulation) -> Sheet:
    """How often each tree was chosen."""
    return Sheet(
        title="Trees chosen",
        columns=["tree", "of all passes"],
        names=1,
        rows=[[tree, f"{share:.1%}"] for tree, share in one.trees.items()],
        note=f"the menu: {', '.join(map(str, [PLAIN, *one.menu]))}",
    )


def json_of(
    recording: Recording, curves: dict[str, CostCurve], made: dict[str, Simulation]
) -> dict[str, Any]:
    """Everything, ready for JSON."""
    return {
        "what": LABEL,
        "recording": str(recording),
        "curves": [
            {"name": name, "source": source_of(curves[name]), **one.to_dict()}
            for name, one in made.items()
        ],
    }
