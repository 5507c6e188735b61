"""Labels beside points of a picture, moved apart so that none covers another or a marker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

SIZE = 8  # of the type, in points; so are all lengths here
WIDE, HIGH = 0.56 * SIZE, 1.25 * SIZE  # of a letter, and of a line
MARKER = 5.0  # half a marker, with room around it
BAR = 2.5  # half an error bar's width
# Where a label may begin to look for its place: from a marker, nearest first.
RINGS = (8, 16, 26, 38, 52, 68)
FAR = 12  # a label farther from its marker gets a line to it


class Point(NamedTuple):
    """A marker with its label, and the ends of its error bar."""

    text: str
    x: float
    y: float
    low: float
    high: float


class Box(NamedTuple):
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def shared(self, other: Box) -> float:
        """The area that two have in common."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(width, 0) * max(height, 0)

    def outside(self, other: Box) -> float:
        """The area of this that is not in another."""
        return (self.right - self.left) * (self.top - self.bottom) - self.shared(other)


def places(points: Sequence[Point], frame: Box) -> list[tuple[float, float]]:
    """Where each label's middle goes, from its point: near it, and covering as little as can be.

    Args:
        points: The markers.
        frame: What labels should stay in.
    """
    markers = [
        part
        for _, x, y, low, high in points
        for part in (
            Box(x - MARKER, y - MARKER, x + MARKER, y + MARKER),
            Box(x - BAR, low, x + BAR, high),
        )
    ]
    taken: list[Box] = []
    found = []

    def covered(box: Box) -> int:
        area = sum(box.shared(other) for other in (*markers, *taken)) + box.outside(frame)
        return round(100 * area)  # what is all but equal is equal: then the nearest is best

    for text, x, y, *_ in points:
        width = WIDE * len(text)
        choices = [(place, _box(x, y, place, width)) for place in _around(width)]
        place, box = min(choices, key=lambda choice: covered(choice[1]))
        taken.append(box)
        found.append(place)
    return found


def _box(x: float, y: float, place: tuple[float, float], width: float) -> Box:
    """A label's box, its middle at a place from its marker."""
    left, bottom = x + place[0] - width / 2, y + place[1] - HIGH / 2
    return Box(left, bottom, left + width, bottom + HIGH)


def _around(width: float) -> Iterator[tuple[float, float]]:
    """Where the middle of a label of some width may go, from its marker; the nearest first."""
    for away in RINGS:
        x, y = away + width / 2, away + HIGH / 2
        yield from ((x, 0), (-x, 0), (0, y), (0, -y))
        beside = MARKER + width / 2  # above or below, and beside
        yield from ((beside, y), (-beside, y), (beside, -y), (-beside, -y))


def put(axis: Any, points: Sequence[Point]) -> None:
    """Write labels beside points; the axis has its final limits and place.

    Args:
        axis: matplotlib's.
        points: In the axis's own numbers.
    """
    scale = 72 / axis.figure.dpi

    def placed(point: Point) -> Point:
        x, y = axis.transData.transform((point.x, point.y))
        low, high = (axis.transData.transform((point.x, end))[1] for end in point[3:])
        return Point(point.text, *(scale * length for length in (x, y, low, high)))

    window = axis.get_window_extent()
    frame = Box(*(scale * end for end in (window.x0, window.y0, window.x1, window.y1)))
    found = places([placed(point) for point in points], frame)
    for point, (dx, dy) in zip(points, found, strict=True):
        far = max(abs(dx) - WIDE * len(point.text) / 2, abs(dy) - HIGH / 2) > FAR
        axis.annotate(
            point.text,
            (point.x, point.y),
            textcoords="offset points",
            xytext=(dx, dy),
            ha="center",
            va="center",
            fontsize=SIZE,
            zorder=1.5,  # below the markers
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.4},
            arrowprops={"arrowstyle": "-", "color": "0.5", "linewidth": 0.6} if far else None,
        )
