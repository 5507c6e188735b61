"""``benchmark draw``: the picture of what was measured, from the file that ``--json`` wrote.

python -m mlx_specstream.benchmark draw --json out.json --plot memory_speed.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .. import options
from ..errors import SpecStreamError
from ..training.report_plot import figure_class
from ..writing import check_writable
from . import chart, saved
from .rows import Figures, Row, Spread
from .schedule import Difference

DRAWN = ("weights", "decode_peak", "tokens_per_pass", "speedup_vs_plain")  # figures, or null


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        SpecStreamError: If an option or a file it names cannot be used.
    """
    parser = options.Parser(
        prog="python -m mlx_specstream.benchmark draw",
        description="Draw memory against speed from what an earlier run measured.",
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="what --json wrote")
    add("--plot", type=Path, required=True, metavar="FILE", help="the picture, a PNG")
    args = parser.parse_args(argv)
    figure_class("--plot")
    check_writable(args.plot)
    return args


def read(path: Path) -> tuple[str, list[Row]]:
    """The title and the rows of what was measured.

    Raises:
        SpecStreamError: If the file cannot be read or was not written by the benchmark.
    """
    try:
        content = json.loads(path.read_bytes())
        rows = [row_of(row) for row in content["rows"]]
        return saved.title_of({"incomplete": None, **content}), rows
    except OSError as error:
        raise SpecStreamError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecStreamError(f"{path} is not what --json wrote: {error}") from error


def row_of(fields: dict[str, Any]) -> Row:
    """A row as it was before it became JSON.

    Raises:
        ValueError: If it cannot be drawn; KeyError and TypeError if something is missing.
    """
    differences = tuple(Difference(**each) for each in fields["differences"])
    figures = fields["figures"]
    if fields["method"] not in chart.LOOKS:
        raise ValueError(f"there is no method {fields['method']!r}")
    if figures is not None:
        for name in ("prompt_tps", "first_seconds", "decode_tps"):
            figures[name] = None if figures[name] is None else Spread(*figures[name])
        numbers = [figures[name] for name in DRAWN] + list(figures["decode_tps"] or ())
        if not all(isinstance(number, (int, float, type(None))) for number in numbers):
            raise ValueError("a figure is not a number")
        figures = Figures(**figures)
    return Row(**fields | {"differences": differences, "figures": figures})


def main(argv: list[str]) -> None:
    """Draw as the command line says.

    Raises:
        SpecStreamError: If a file cannot be read or written.
    """
    args = arguments(argv)
    chart.draw(args.plot, *read(args.json))
