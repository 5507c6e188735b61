"""The report as a picture: rank hit rates by stream, tokens per pass by tree and category."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import SpecStreamError
from ..writing import written_whole
from .report_quality import HeldOut
from .report_speed import Way

# Told apart in black and white: a grey and a hatch for each bar of a group.
GREYS = ("0.2", "0.95", "0.6", "0.8", "0.4", "0.9")
HATCHES = ("", "//", "..", "xx", "\\\\", "", "oo", "--", "++", "**")


def figure_class(option: str = "--png") -> Any:
    """matplotlib's figure, which needs no display.

    Args:
        option: What asks for it, for people.

    Raises:
        SpecStreamError: If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecStreamError(
            f"{option} needs matplotlib: pip install 'mlx-specstream[report]'"
        ) from error
    return Figure


def draw(path: Path, title: str, held_out: HeldOut | None, ways: Sequence[Way]) -> None:
    """Write the picture as a PNG, the whole file or nothing: a panel for what was measured.

    Args:
        path: The file.
        title: Above all panels.
        held_out: Quality on held-out text, or None.
        ways: What live decoding came to; may be empty.

    Raises:
        SpecStreamError: If matplotlib is missing or the file cannot be written.
    """
    temperatures = list(dict.fromkeys(way.temperature for way in ways))
    panels = (held_out is not None) + len(temperatures)
    figure = figure_class()(figsize=(9, 1 + 3.6 * panels), dpi=120, layout="constrained")
    axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    figure.suptitle(title)
    if held_out is not None:
        _ranks(axes.pop(0), held_out)
    for axis, temperature in zip(axes, temperatures, strict=True):
        _trees(axis, temperature, [way for way in ways if way.temperature == temperature])
    with written_whole(path) as file:
        figure.savefig(file, format="png")


def _ranks(axis: Any, held_out: HeldOut) -> None:
    """A group of bars for each stream, a bar for each rank."""
    groups = [f"stream {number}" for number in range(1, len(held_out.hits) + 1)]
    ranks = range(len(held_out.hits[0]))
    bars = {f"rank {k + 1}": [100 * hits[k] for hits in held_out.hits] for k in ranks}
    _grouped(axis, groups, bars)
    axis.set_ylabel("right token has this rank (%)")
    axis.set_title(f"Rank hit rates on {held_out.which}", fontsize=10)


def _trees(axis: Any, temperature: float, ways: list[Way]) -> None:
    """A group of bars for each tree, a bar for each category."""
    categories = list(dict.fromkeys(c for way in ways for c in way.by_category))
    bars = {"all": [way.tokens_per_pass for way in ways]}
    if len(categories) > 1:
        bars |= {c or "(none)": [way.by_category.get(c, 0.0) for way in ways] for c in categories}
    _grouped(axis, [way.way.replace(",", ",\n") for way in ways], bars)
    axis.axhline(1, color="black", linewidth=0.8, linestyle=":")  # plain decoding
    axis.set_ylabel("tokens per pass")
    kind = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    axis.set_title(f"Live decoding by tree, {kind}, {ways[0].prompts} prompts (dotted: plain)")


def _grouped(axis: Any, groups: list[str], bars: dict[str, list[float]]) -> None:
    """Grouped bars with a legend beside them."""
    width = 0.85 / len(bars)
    for number, (name, heights) in enumerate(bars.items()):
        middle = (number - (len(bars) - 1) / 2) * width
        axis.bar(
            [place + middle for place in range(len(groups))],
            heights,
            width,
            label=name,
            color=GREYS[number % len(GREYS)],
            hatch=HATCHES[number % len(HATCHES)],
            edgecolor="black",
            linewidth=0.6,
        )
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
