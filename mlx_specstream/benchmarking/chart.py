"""Memory against speed as a picture: one point for each form and method, and the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..training.report_plot import figure_class
from ..writing import written_whole
from .methods import PLAIN, SPECULATIVE
from .mlx_lm_methods import MLX_LM, MLX_LM_DRAFT
from .rows import Row
from .tables import MB, megabytes, number, spread

# Told apart without colour: a marker and a grey for each method, and where its labels go (from
# the point, in points of type), since forms of the same memory lie one above the other.
LOOKS: dict[str, tuple[str, str, tuple[int, int], str]] = {
    SPECULATIVE: ("o", "black", (8, 6), "left"),
    PLAIN: ("s", "white", (-8, 6), "right"),
    MLX_LM: ("^", "0.6", (-8, -13), "right"),
    MLX_LM_DRAFT: ("D", "0.85", (8, -13), "left"),
}


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    """Write the picture as a PNG, the whole file or nothing.

    Rows without figures are named below the picture instead of drawn.

    Args:
        path: The file.
        title: Above the picture.
        rows: What was measured.

    Raises:
        SpecStreamError: If matplotlib is missing or the file cannot be written.
    """
    drawn = [row for row in rows if row.figures and row.figures.decode_tps]
    lines = len(drawn) + 1
    figure = figure_class("--plot")(figsize=(8, 5.2 + 0.24 * lines), dpi=120, layout="constrained")
    axis, below = figure.subplots(2, 1, height_ratios=(4.6, 0.24 * lines + 0.3))
    figure.suptitle(title, fontsize=11)
    for method in dict.fromkeys(row.method for row in drawn):
        _points(axis, method, [row for row in drawn if row.method == method])
    axis.set_xlabel("most memory held while decoding (MB)")
    axis.set_ylabel("tokens per second")
    if drawn:  # from 0, with room for labels
        axis.set_xlim(0, 1.15 * max(r.figures.decode_peak for r in drawn if r.figures) / MB)
        axis.set_ylim(0, 1.1 * axis.get_ylim()[1])
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="0.9", linewidth=0.6)
    axis.set_axisbelow(True)
    if drawn:
        place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "ncols": 4}
        axis.legend(fontsize=8, frameon=False, **place)
    below.axis("off")
    if drawn:
        _numbers(below, drawn)
    missing = [f"{row.method} ({label(row)})" for row in rows if row not in drawn]
    if missing:
        figure.supxlabel(
            f"not drawn (other text, or answers of one pass): {', '.join(missing)}", fontsize=8
        )
    with written_whole(path) as file:
        figure.savefig(file, format="png")


def _points(axis: Any, method: str, rows: Sequence[Row]) -> None:
    """A method's points, with the rounds' spread, joined in the order of their memory."""
    marker, fill, offset, side = LOOKS[method]
    places = []
    for row in rows:
        if row.figures and row.figures.decode_tps:
            places.append((row.figures.decode_peak / MB, row.figures.decode_tps, label(row)))
    places.sort()
    axis.errorbar(
        [memory for memory, _, _ in places],
        [speed.median for _, speed, _ in places],
        yerr=[
            [speed.median - speed.low for _, speed, _ in places],
            [speed.high - speed.median for _, speed, _ in places],
        ],
        fmt=marker,
        color="black",
        markerfacecolor=fill,
        markersize=7,
        linestyle=":",
        linewidth=0.8,
        elinewidth=0.8,
        capsize=2,
        label=method,
    )
    for memory, speed, text in places:
        axis.annotate(
            text,
            (memory, speed.median),
            textcoords="offset points",
            xytext=offset,
            ha=side,
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
        )


def _numbers(axis: Any, rows: Sequence[Row]) -> None:
    """The same as a table."""
    cells = []
    for row in rows:
        if figures := row.figures:
            cells.append(
                [row.method, label(row), megabytes(figures.weights), megabytes(figures.decode_peak),
                 spread(figures.decode_tps, ".1f"), f"{figures.tokens_per_pass:.2f}",
                 number(figures.speedup_vs_plain)]
            )  # fmt: skip
    columns = ["method", "form", "weights MB", "peak MB", "tokens/s", "tokens/pass", "× plain"]
    table = axis.table(cells, colLabels=columns, loc="upper center", cellLoc="right", edges="B")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    for (_, column), cell in table.get_celld().items():
        cell.set_edgecolor("0.8")
        if column < 2:
            cell.set_text_props(ha="left")


def label(row: Row) -> str:
    """A row's form in a word or two."""
    return f"{row.bits} bits" + (f", {row.context}" if row.context else "")
