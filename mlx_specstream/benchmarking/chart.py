"""Memory against speed as a picture: one point for each form and method, and the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from ..training.report_plot import figure_class
from ..writing import written_whole
from . import labels
from .methods import PLAIN, SPECULATIVE
from .mlx_lm_methods import MLX_LM, MLX_LM_DRAFT
from .rows import Figures, Row
from .tables import MB, megabytes, number, spread

# Told apart without colour: a marker and a grey for each method.
LOOKS: dict[str, tuple[str, str]] = {
    SPECULATIVE: ("o", "black"),
    PLAIN: ("s", "white"),
    MLX_LM: ("^", "0.6"),
    MLX_LM_DRAFT: ("D", "0.85"),
}
LETTERS = 110  # of a line below the picture
# Columns of the table below, and their shares of its width.
COLUMNS = {
    "method": 0.16,
    "form": 0.17,
    "weights MB": 0.12,
    "peak MB": 0.12,
    "tokens/s": 0.21,
    "tokens/pass": 0.12,
    "× plain": 0.1,
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
        told = f"not drawn (other text, or answers of one pass): {', '.join(missing)}"
        figure.supxlabel(fill(told, LETTERS, break_on_hyphens=False), fontsize=8)
    figure.draw_without_rendering()  # now the axes are where they stay
    figure.set_layout_engine("none")
    labels.put(axis, [_labelled(row, row.figures) for row in drawn if row.figures])
    with written_whole(path) as file:
        figure.savefig(file, format="png")


def _labelled(row: Row, figures: Figures) -> labels.Point:
    """A point of the picture, and what it is called."""
    assert figures.decode_tps is not None
    return labels.Point(label(row), figures.decode_peak / MB, *figures.decode_tps)


def _points(axis: Any, method: str, rows: Sequence[Row]) -> None:
    """A method's points, with the rounds' spread, joined in the order of their memory."""
    marker, fill = LOOKS[method]
    places = []
    for row in rows:
        if row.figures and row.figures.decode_tps:
            places.append((row.figures.decode_peak / MB, row.figures.decode_tps))
    places.sort()
    memories = [memory for memory, _ in places]
    medians = [speed.median for _, speed in places]
    axis.plot(memories, medians, ":", color="black", linewidth=0.8, zorder=1)  # below the labels
    axis.errorbar(
        memories,
        medians,
        yerr=[
            [speed.median - speed.low for _, speed in places],
            [speed.high - speed.median for _, speed in places],
        ],
        fmt=marker,
        color="black",
        markerfacecolor=fill,
        markersize=7,
        elinewidth=0.8,
        capsize=2,
        zorder=3,  # above the labels
        label=method,
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
    table = axis.table(
        cells,
        colLabels=list(COLUMNS),
        colWidths=list(COLUMNS.values()),
        loc="upper center",
        cellLoc="right",
        colLoc="right",
        edges="B",
    )
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    for (_, column), cell in table.get_celld().items():
        cell.set_edgecolor("0.8")
        if column < 2:
            cell.set_text_props(ha="left")


def label(row: Row) -> str:
    """A row's form in a word or two."""
    return f"{row.bits} bits" + (f", {row.context}" if row.context else "")
