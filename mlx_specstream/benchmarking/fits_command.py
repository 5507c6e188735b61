"""``python -m mlx_specstream.benchmark fits``: which Mac holds a model, and how fast it would be.

python -m mlx_specstream.benchmark fits --params 8B --bits 4 --context 8192
python -m mlx_specstream.benchmark fits --model path/to/a/model
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from .. import options
from ..errors import UsageError
from ..writing import check_writable, written_whole
from .chips import data
from .fits import Fit, Need, fits_of, need_of, predicted_speedups
from .model_size import ModelSize, of_folder, of_params
from .recording import Recording, shipped
from .tables import NOTHING, Sheet

WIDTH = 160  # of the table, where stdout is no terminal
GB = 2**30  # as memory is sold
SMALL = 2e9  # bytes of weights: the published figures are of larger models
LABEL = "PREDICTION, not a measurement"


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        UsageError: If an option cannot be used.
    """
    parser = options.Parser(
        prog="python -m mlx_specstream.benchmark fits",
        description="Predict which Macs hold a model and how fast they decode, from published "
        "figures; nothing is measured, no model is loaded.",
    )
    add = parser.add_argument
    add("--model", type=Path, metavar="FOLDER", help="a model's folder")
    add("--params", help="or its number of parameters, such as 8B or 135M")
    add("--bits", type=options.positive, help="of a weight (default: the folder's own, else 4)")
    add("--layers", type=options.positive, help="with --params (default: as models of that size)")
    add("--hidden", type=options.positive, help="with --heads: gives the size of a head")
    add("--heads", type=options.positive, help="query heads")
    add("--kv-heads", type=options.positive, help="heads of keys and values")
    add("--head-dim", type=options.positive, help="size of a head")
    add("--context", type=options.positive, default=4096, help="tokens held (default: 4096)")
    add("--recording", type=Path, metavar="FILE", help="to predict by (default: the shipped one)")
    add("--json", type=Path, metavar="FILE", help="everything, as JSON")
    args = parser.parse_args(argv)
    if (args.model is None) == (args.params is None):
        raise UsageError("give either --model or --params")
    shape = (args.layers, args.hidden, args.heads, args.kv_heads, args.head_dim)
    if args.model is not None and any(shape):
        raise UsageError("a model's folder says its shape itself: leave the shape's options out")
    if (args.hidden is None) != (args.heads is None):
        raise UsageError("--hidden and --heads need each other: together they give --head-dim")
    if args.hidden and args.hidden % args.heads:
        raise UsageError(f"--hidden {args.hidden} does not divide into {args.heads} heads")
    if args.bits and args.bits > 32:
        raise UsageError(f"--bits cannot be {args.bits}")
    if args.json:
        check_writable(args.json)
    return args


def model_of(args: argparse.Namespace) -> ModelSize:
    """The model that the command line names.

    Raises:
        SpecStreamError: If its folder or its parameters cannot be read.
    """
    if args.model is not None:
        return of_folder(args.model, args.bits)
    head_dim = args.head_dim or (args.hidden // args.heads if args.hidden else None)
    kv_heads = args.kv_heads
    return of_params(args.params, args.bits or 4, args.layers, kv_heads, head_dim)


def table(fits: list[Fit]) -> Sheet:
    """A row for each chip."""

    def rate(value: float) -> str:
        return f"{value:.0f}" if value >= 10 else f"{value:.1f}"

    def span(pair: tuple[float, float] | None) -> str:
        return NOTHING if pair is None else "–".join(map(rate, pair))

    def sizes(some: list[Fit]) -> str:
        return ", ".join(str(fit.memory) for fit in some) or NOTHING

    rows = []
    for chip in dict.fromkeys(fit.chip for fit in fits):
        mine = [fit for fit in fits if fit.chip == chip]
        holds = [fit for fit in mine if fit.fits]
        speeds = [NOTHING] * 4
        if holds:
            speedup = NOTHING if holds[0].speedup is None else f"{holds[0].speedup:.2f}"
            speeds = [rate(holds[0].ceiling), span(holds[0].plain)]
            speeds += [speedup, span(holds[0].streams)]
        rows.append([chip, sizes([f for f in mine if not f.fits]), sizes(holds), *speeds])
    return Sheet(
        title=LABEL,
        columns=[
            *("chip", "too small, GB", "fits, GB", "ceiling tokens/s", "plain tokens/s"),
            *("× streams", "tokens/s with streams"),
        ],
        names=1,
        rows=rows,
        note="GB of memory as Macs are sold; tokens/s with the context full",
    )


def notes(model: ModelSize, need: Need, context: int, recording: Recording | None) -> list[str]:
    """What the figures rest on."""
    facts = data()
    low, high = (facts["efficiency"][end] for end in ("low", "high"))
    lines = [
        f"{model.name}: {need.weights / GB:.2f} GB weights + {need.kv / GB:.2f} GB keys and values "
        f"({context} tokens, 16 bits) + {need.streams / GB:.2f} GB streams and table + "
        f"{need.scratch / GB:.1f} GB scratch (a round figure) = {need.total / GB:.2f} GB",
        *([f"assumed: {model.stated}"] if model.stated else []),
        "usable: two thirds of up to 36 GB, three quarters of more; "
        f"{facts['usable_memory']['source']}",
        facts["usable_memory"]["raise"],
        "ceiling: bandwidth by the bytes that a pass reads at a full context",
        f"plain: {low:.0%} to {high:.0%} of the ceiling; {facts['efficiency']['source']}",
    ]
    if need.weights < SMALL:
        lines.append(
            "a model this small waits for its kernels to start, not for memory: expect less"
        )
    if recording is None:
        return [*lines, "streams: no recording here to predict by (--recording)"]
    return [
        *lines,
        "× streams: with streams trained for the model (docs/training.md); predicted by the "
        "published costs of passes on that chip (benchmark simulate), for proposals as often right "
        f"as those recorded: {recording}; {NOTHING} where nobody published such costs",
    ]


def main(argv: list[str]) -> None:
    """Tell what fits, as the command line says.

    Raises:
        SpecStreamError: If the model or a file cannot be read or written.
    """
    args = arguments(argv)
    model = model_of(args)
    path = args.recording or shipped()
    recording = None if path is None else Recording.load(path)
    need = need_of(model, args.context, recording)
    found = fits_of(need, {} if recording is None else predicted_speedups(recording))
    said = notes(model, need, args.context, recording)
    output = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    output.print(table(found).rich())
    output.print(*said, sep="\n", markup=False)
    if args.json:
        content = {
            "what": LABEL,
            "model": model.name,
            "context": args.context,
            "bytes": {**vars(need), "total": need.total},
            "notes": said,
            "fits": [fit.to_dict() for fit in found],
        }
        with written_whole(args.json) as file:
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
