"""What a pass costs on one machine: seconds by rows and context, with streams and without.

Only some costs are measured (``calibrate.py``) or published; the others are read off the line
between their neighbours. ``docs/planner.md`` explains what the planner makes of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import SpecStreamError
from ..writing import written_whole
from .plan import TreePlan


class Point(NamedTuple):
    """A measured pass.

    Args:
        rows: Rows of the tree, the root included.
        context: Tokens in the cache.
        streams: Whether streams filled a branch of the tree.
        seconds: Of the whole pass.
    """

    rows: int
    context: int
    streams: bool
    seconds: float


class CostCurve:
    """Seconds of any pass, from those that were measured.

    Args:
        points: The measured passes; one of them is over one row, without streams.
        about: What was measured, and where: names and texts.

    Raises:
        ValueError: If nothing says what a plain pass costs, or a cost is not above 0.
    """

    def __init__(self, points: Iterable[Point], about: dict[str, Any] | None = None):
        self.points = sorted(Point(*point) for point in points)
        self.about = about or {}
        if not any(p.rows == 1 and not p.streams for p in self.points):
            raise ValueError("a cost curve needs the cost of a pass over one row")
        if not all(0 < p.seconds < float("inf") and p.rows > 0 for p in self.points):
            raise ValueError("costs and rows must be above 0")
        plain = [p for p in self.points if not p.streams]
        self._contexts = sorted({p.context for p in plain if p.rows == 1})
        self._first = self._contexts[0]
        self._plain = {c: _line(p for p in plain if p.context == c) for c in self._contexts}
        more = [
            p._replace(seconds=p.seconds - self._without(p.rows, p.context))
            for p in self.points
            if p.streams
        ]
        near = min((p.context for p in more), default=0)
        self._more = _line(p for p in more if p.context == near)

    @classmethod
    def from_ratios(
        cls, ratios: dict[int, float], seconds: float, streams: float = 0.0, **about: Any
    ) -> CostCurve:
        """A curve from published costs relative to a pass over one row.

        Args:
            ratios: Cost of a pass by its rows; 1.0 for one row.
            seconds: Of a pass over one row.
            streams: What streams add to a pass, relative to one over one row.
            about: What this is.
        """
        points = [Point(rows, 0, False, seconds * ratio) for rows, ratio in ratios.items()]
        points.append(Point(1, 0, True, seconds * (1 + streams)))
        return cls(points, about)

    def seconds(self, rows: int, context: int = 0, streams: bool = False) -> float:
        """What a pass takes.

        Args:
            rows: Of the tree, the root included.
            context: Tokens in the cache.
            streams: Whether streams propose.
        """
        seconds = self._without(rows, context)
        if streams and self._more[0]:
            seconds += max(_read(self._more, rows, flat=True), 0.0)
        return seconds

    def of(self, plan: TreePlan, context: int = 0) -> float:
        """Seconds of a pass that verifies a tree."""
        return self.seconds(len(plan.layout), context, "streams" in plan.proposers)

    def ratio(self, plan: TreePlan, context: int = 0) -> float:
        """The same relative to a plain pass, which is the cheapest whatever was measured."""
        return max(self.of(plan, context) / self.seconds(1, context), 1.0)

    def save(self, path: Path) -> None:
        """Write the curve, the whole file or nothing.

        Raises:
            SpecStreamError: If it cannot be written.
        """
        content = {"about": self.about, "points": [p._asdict() for p in self.points]}
        with written_whole(path) as file:
            file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> CostCurve:
        """Read a curve that was saved.

        Raises:
            SpecStreamError: If the file is not one.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            points = [
                Point(int(p["rows"]), int(p["context"]), bool(p["streams"]), float(p["seconds"]))
                for p in content["points"]
            ]
            return cls(points, dict(content["about"]))
        except OSError as error:
            raise SpecStreamError(f"cannot read {path}: {error.strerror or error}") from error
        except (
            ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
        ) as error:  # fmt: skip
            raise SpecStreamError(f"{path} is not a cost curve: {error}") from error

    def _without(self, rows: int, context: int) -> float:
        """What a pass takes without streams, on a line between the two nearest contexts."""
        costs = []
        for measured in self._contexts:
            line = self._plain[measured]
            if len(line[0]) > 1:
                costs.append(_read(line, rows))
            elif measured == self._first:  # nobody knows what rows cost: the worst there is
                costs.append(rows * line[1][0])
            else:  # only one row was measured there: rows cost what they cost elsewhere
                first = self._plain[self._first]
                costs.append(line[1][0] + _read(first, rows) - _read(first, 1))
        return _read((self._contexts, costs), max(context, self._first))


Line = tuple[Sequence[int], Sequence[float]]  # places, in order, and values


def _line(points: Iterable[Point]) -> Line:
    """Costs by rows."""
    by_rows = {point.rows: point.seconds for point in points}
    return (list(by_rows), list(by_rows.values()))


def _read(line: Line, place: float, flat: bool = False) -> float:
    """A line's value between its points; beyond the last it goes on as before, or stays flat."""
    places, values = line
    value = float(np.interp(place, places, values))
    if not flat and len(places) > 1 and place > places[-1]:
        slope = (values[-1] - values[-2]) / (places[-1] - places[-2])
        value += max(slope, 0.0) * (place - places[-1])
    return value
