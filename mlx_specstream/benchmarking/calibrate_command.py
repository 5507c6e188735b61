"""``benchmark calibrate``: measure what passes cost on this machine, and show it.

    python -m mlx_specstream.benchmark calibrate

The curve is kept in the user's cache, where chat, generate and the others find it.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .. import loading, options
from ..calibration import costs_of, lookups_of, machine_of, place_of, rates_of
from ..decode.costs import CostCurve, Point
from ..decode.loop import Decoder
from ..decode.menu import candidates, menu_for
from ..errors import SpecStreamError
from ..session import Session
from ..speculation import Speculation, decoder_for
from ..writing import check_writable


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = options.Parser(
        prog="python -m mlx_specstream.benchmark calibrate",
        description="Measure what passes over several rows cost on this machine.",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the curve here too")
    options.add_model_options(parser)
    args = parser.parse_args(argv)
    if args.out:
        check_writable(args.out)
    return args


def table_of(curve: CostCurve) -> Table:
    """Milliseconds and relative costs, a line for each number of rows."""
    columns = sorted({(p.context, p.streams) for p in curve.points})
    table = Table(title="ms a pass, and relative to one row")
    table.add_column("rows", justify="right")
    for context, streams in columns:
        what = "with streams" if streams else "alone"
        table.add_column(f"{context} tokens, {what}", justify="right")
    costs = {point[:3]: point.seconds for point in curve.points}
    for rows in sorted({point.rows for point in curve.points}):
        cells = []
        for context, streams in columns:
            seconds = costs.get((rows, context, streams))
            plain = curve.seconds(1, context)
            cells.append("" if seconds is None else f"{1e3 * seconds:.1f}  {seconds / plain:.2f}")
        table.add_row(str(rows), *cells)
    return table


def kept_in(decoder: Decoder, curve: CostCurve) -> Path | None:
    """The file in the user's cache that holds a curve; None if it could not be kept."""
    try:
        place = place_of(machine_of(decoder))
        kept = CostCurve.load(place).points if place.is_file() else []
    except (SpecStreamError, OSError, RuntimeError):
        return None
    return place if sorted(kept) == sorted(curve.points) else None


def main(argv: list[str]) -> None:
    """Measure, show and keep.

    Raises:
        SpecStreamError: If the model or the streams cannot be used.
    """
    args = arguments(argv)
    console = Console(stderr=True, highlight=False)
    model, tokenizer = options.load_from(args)
    console.print(loading.description(model), markup=False)
    session = Session(model, tokenizer, options.streams_from(args))
    decoder = decoder_for(session.target, session.streams, Speculation())

    def report(point: Point) -> None:
        with_streams = ", streams" if point.streams else ""
        console.print(
            f"{point.rows} rows, {point.context} tokens of context{with_streams}: "
            f"{1e3 * point.seconds:.1f} ms"
        )

    curve = costs_of(decoder, math.inf, again=True, progress=report)
    output = Console(highlight=False)
    output.print(table_of(curve))
    menu = menu_for(curve, candidates(lookups_of(decoder), rates_of(decoder)), rates_of(decoder))
    trees = ", ".join(map(str, menu)) or "none: no tree can pay at these costs"
    output.print(f"trees to choose from beside plain decoding: {trees}", markup=False)
    place = kept_in(decoder, curve)
    output.print(
        f"kept in {place}" if place else "not kept: the cache cannot be written", markup=False
    )
    if args.out:
        curve.save(args.out)
