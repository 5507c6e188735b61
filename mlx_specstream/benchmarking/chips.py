"""Apple's chips: published bandwidth, memory sizes and costs of passes, each with its source.

All of it is in ``chips.json``; nothing of it was measured by this project.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..decode.costs import CostCurve
from ..errors import UsageError
from .recording import Recording

DATA = Path(__file__).with_name("chips.json")


class Chip(NamedTuple):
    """A chip.

    Args:
        name: As Apple calls it.
        bandwidth: Of its memory, bytes per second.
        memory: Sizes that it is sold with, GiB.
        curve: Name of its cost curve, or None where nobody published one.
        source: Where bandwidth and sizes are from.
    """

    name: str
    bandwidth: float
    memory: tuple[int, ...]
    curve: str | None
    source: str


class Published(NamedTuple):
    """Published costs of passes.

    Args:
        name: What ``--curve`` calls them.
        what: What was measured.
        source: By whom.
        approximate: Whether they are rounded to nothing better than whole numbers.
        costs: By rows of the pass, relative to one over one row.
    """

    name: str
    what: str
    source: str
    approximate: bool
    costs: dict[int, float]

    def curve(self, recording: Recording) -> CostCurve:
        """A cost curve in plain passes, streams included.

        What streams cost is not published. They read a share of the weights once more, with a
        row for each stream, so they are taken to cost that share of a pass over so many rows.
        """
        about = {"name": self.name, "what": self.what, "source": self.source}
        plain = CostCurve.from_ratios(self.costs, 1.0)
        streams = recording.read_share * plain.seconds(max(recording.gamma, 1))
        return CostCurve.from_ratios(self.costs, 1.0, streams, **about)


@cache
def data() -> dict[str, Any]:
    """The file as it is."""
    return json.loads(DATA.read_text(encoding="utf-8"))


def chips() -> list[Chip]:
    """All chips."""
    return [
        Chip(
            *(c["name"], 1e9 * c["bandwidth_gb_s"], tuple(c["memory_gb"]), c["curve"]), c["source"]
        )
        for c in data()["chips"]
    ]


def published() -> dict[str, Published]:
    """All published curves by name."""
    return {
        c["name"]: Published(
            *(c["name"], c["what"], c["source"], c["approximate"]),
            costs={int(rows): float(cost) for rows, cost in c["costs"].items()},
        )
        for c in data()["curves"]
    }


def published_curve(name: str) -> Published:
    """A published curve by its name.

    Raises:
        UsageError: If there is none of that name.
    """
    if name not in published():
        raise UsageError(
            f"there is no file and no published curve '{name}'; the curves are "
            f"{', '.join(published())}, or all"
        )
    return published()[name]


def usable(memory: int) -> float:
    """Bytes that macOS lets the GPU use by default of a machine's memory.

    Args:
        memory: In GiB.
    """
    shares = data()["usable_memory"]
    return memory * 2**30 * shares["up_to_36_gb" if memory <= 36 else "above"]
