"""The rows as tables: for a terminal, or as GitHub's Markdown to paste."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from .methods import PLAIN
from .mlx_lm_methods import MLX_LM
from .rows import Figures, Row, Spread

NOTHING = "–"
DIFFERS = "differs (*)"
MB = 1e6


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn.

    Args:
        title: Above it.
        columns: Their names.
        names: How many columns at the left are names; the others are numbers.
        rows: Texts of the cells.
        note: Below it.
    """

    title: str
    columns: list[str]
    names: int
    rows: list[list[str]]
    note: str

    def rich(self) -> Table:
        """For a terminal."""
        table = Table(title=escape(self.title), title_justify="left", caption=escape(self.note))
        table.caption_justify = "left"
        for place, column in enumerate(self.columns):
            table.add_column(escape(column), justify="left" if place < self.names else "right")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        """For GitHub."""
        lines = ["---"] * self.names + ["---:"] * (len(self.columns) - self.names)
        cells = [self.columns, lines, *self.rows]
        drawn = ["| " + " | ".join(c.replace("|", "\\|") for c in row) + " |" for row in cells]
        return "\n".join([f"**{self.title}**", "", *drawn, "", self.note])


def speed_sheet(rows: Sequence[Row]) -> Sheet:
    """Speeds, passes and proposals."""
    columns = [
        *("prefill tokens/s", "first token s", "decode tokens/s", "passes", "tokens/pass"),
        *("accepted", "predicted ×", "× plain", "× mlx-lm"),
    ]

    def cells(f: Figures) -> list[str]:
        return [
            spread(f.prompt_tps, ".0f"),
            spread(f.first_seconds, ".2f"),
            spread(f.decode_tps, ".1f"),
            f"{f.passes:g}",
            f"{f.tokens_per_pass:.2f}",
            accepted(f),
            number(f.predicted),
            number(f.speedup_vs_plain),
            number(f.speedup_vs_mlx_lm),
        ]

    note = (
        "median over rounds (least to most) of all prompts together; passes: of a round; × : "
        "decoding speed, geometric mean over prompts; predicted: by the cost of the passes"
    )
    left_out = [row for row in rows if row.method == MLX_LM and row.differences]
    if left_out:
        note += "; × mlx-lm: over the prompts on which its text is the same"
    return sheet("Speed", columns, rows, cells, note)


def memory_sheet(rows: Sequence[Row], bandwidth: float) -> Sheet:
    """Bytes held, and bytes read.

    Args:
        rows: The rows.
        bandwidth: Of the machine's memory, in bytes per second.
    """
    columns = [
        *("weights", "streams", "KV", "prefill peak", "decode peak", "allocator cache"),
        *("read/pass", "of bandwidth"),
    ]

    def cells(f: Figures) -> list[str]:
        parts = (f.weights, f.added, f.kv, f.prefill_peak, f.decode_peak, f.cache, f.pass_bytes)
        share = None if f.read_rate is None else f.read_rate / bandwidth
        return [*map(megabytes, parts), number(share, ".0%")]

    note = (
        "MB (10^6 bytes), of each method alone; streams: or the draft model; bandwidth: "
        f"{bandwidth / 1e9:.1f} GB/s in a copy, reads and writes counted"
    )
    return sheet("Memory", columns, rows, cells, note)


def sheet(
    title: str,
    columns: list[str],
    rows: Sequence[Row],
    cells: Callable[[Figures], list[str]],
    note: str,
) -> Sheet:
    """A table with a row's names at the left; a row without figures says so in their place."""
    padded = any(row.context is not None for row in rows)
    names = ["bits", *(["context"] if padded else []), "method"]
    content = []
    for row in rows:
        left = [str(row.bits), *([str(row.context)] if padded else []), row.method]
        empty = [DIFFERS, *[NOTHING] * (len(columns) - 1)]
        content.append([*left, *(cells(row.figures) if row.figures else empty)])
    return Sheet(title, [*names, *columns], len(names), content, note)


def difference_lines(rows: Sequence[Row]) -> list[str]:
    """For each row without figures where its text first differs."""
    lines = []
    for row in rows:
        if not row.differences:
            continue
        first = row.differences[0]
        apart = (
            "one of the texts ends there"
            if first.margin is None
            else f"plain decoding's two likeliest are {first.margin:.4f} nats apart there"
        )
        place = f"{row.bits} bits" + (f", context {row.context}" if row.context else "")
        whose = "the tokens of its first run" if row.method == PLAIN else "plain decoding's tokens"
        lines.append(
            f"(*) {row.method}, {place}: not {whose} on {len(row.differences)} "
            f"of {row.prompts} prompts, first at token {first.position + 1} of {first.prompt} "
            f"({apart})"
        )
    return lines


def accepted(figures: Figures) -> str:
    """Each proposer's proposals and the share of them that was accepted."""
    parts = [
        f"{who} {share:.0%} of {figures.proposed[who]}" for who, share in figures.acceptance.items()
    ]
    return ", ".join(parts) or NOTHING


def spread(values: Spread | None, form: str) -> str:
    """A median with its least and most."""
    if values is None:
        return NOTHING
    median, low, high = (format(value, form) for value in values)
    return f"{median} ({low}–{high})"


def megabytes(count: float) -> str:
    """Bytes as MB, with a decimal where they are few."""
    return f"{count / MB:,.0f}" if count >= 10 * MB else f"{count / MB:.1f}"


def number(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash where nothing was measured."""
    return NOTHING if value is None else format(value, form)
