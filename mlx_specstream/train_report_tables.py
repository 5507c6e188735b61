"""The report as tables for people."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from .training.report_memory import Memory
from .training.report_quality import HeldOut
from .training.report_speed import Way


def held_out_table(held_out: HeldOut) -> Table:
    """Rank hit rates by stream."""
    ranks = [f"rank {k + 1}" for k in range(len(held_out.hits[0]))]
    table = _table(f"Quality on {held_out.which}", "stream", *ranks)
    for stream, hits in enumerate(held_out.hits, start=1):
        table.add_row(str(stream), *(f"{share:.1%}" for share in hits))
    expected = held_out.tokens_per_pass.items()
    table.caption = "rank 1 is the accuracy; tokens per pass to expect: " + ", ".join(
        f"{name} {value:.2f}" for name, value in expected
    )
    return table


def live_tables(ways: list[Way]) -> list[Table]:
    """For each temperature: the trees, and their tokens per pass by category if there are some."""
    tables = []
    for temperature in dict.fromkeys(way.temperature for way in ways):
        here = [way for way in ways if way.temperature == temperature]
        tables.append(trees_table(here))
        if len(here[0].by_category) > 1:
            tables.append(categories_table(here))
    return tables


def trees_table(ways: list[Way]) -> Table:
    """The ways of one temperature, a row each."""
    table = _table(
        f"Live decoding, temperature {ways[0].temperature:g}",
        *("tree", "tokens/pass", "identical", "accepted", "ms/pass", "× plain pass"),
        *("predicted ×", "measured ×"),
    )
    for way in ways:
        accepted = ", ".join(f"{who} {share:.0%}" for who, share in way.acceptance.items())
        table.add_row(
            way.way,
            f"{way.tokens_per_pass:.2f}",
            f"{way.identical} of {way.prompts}",
            accepted or "–",
            _number(way.pass_seconds and 1e3 * way.pass_seconds, ".1f"),
            _number(way.cost),
            _number(way.predicted),
            _number(way.measured),
        )
    table.caption = "speed-up over plain decoding; identical: prompts with plain decoding's text"
    return table


def categories_table(ways: list[Way]) -> Table:
    """Tokens per pass of the ways of one temperature, a row for each category of prompts."""
    names = [way.way.replace(",", ", ") for way in ways]
    table = _table(f"Tokens per pass, temperature {ways[0].temperature:g}", "category", *names)
    for category in ways[0].by_category:
        values = [f"{way.by_category[category]:.2f}" for way in ways]
        table.add_row(escape(category) or "(none)", *values)
    return table


def memory_table(memory: Memory) -> Table:
    """Bytes of each part."""
    table = _table(f"Memory (the target is held {memory.form})", "part", "bytes", "of target")
    rows = {
        "target": memory.target,
        "stream heads": memory.heads,
        "draft head": memory.draft_head,
        "n-gram table": memory.table,
        "streams, all": memory.added,
        "peak while measuring": memory.peak,
    }
    for name, value in rows.items():
        table.add_row(name, f"{value:,}", f"{value / memory.target:.2%}")
    return table


def _table(title: str, *columns: str) -> Table:
    """A table whose first column is a name and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if index else "left")
    return table


def _number(value: float | None, form: str = ".2f") -> str:
    """A number, or a dash where nothing was measured."""
    return "–" if value is None else format(value, form)
