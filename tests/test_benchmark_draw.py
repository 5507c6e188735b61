"""The benchmark's picture: labels that can be read, and drawing what was saved."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations

import pytest
from benchmarked import some_runs

from mlx_specstream import SpecStreamError
from mlx_specstream.benchmarking import chart, draw_command, labels, rows, saved
from mlx_specstream.benchmarking.schedule import Difference

pytest.importorskip("matplotlib")


def test_the_picture_has_a_point_for_each_row_with_figures(tmp_path, monkeypatch):
    drawn = []
    honest = chart._points
    monkeypatch.setattr(
        chart, "_points", lambda axis, name, some: (drawn.append((name, len(some))),
                                                    honest(axis, name, some))
    )  # fmt: skip
    some = rows.rows_of([replace(r, bits=b) for b in (4, 16) for r in some_runs()])
    some[-1] = replace(some[-1], figures=None, differences=(Difference("p", 0, 0.1),))
    chart.draw(tmp_path / "m.png", "title", some)
    assert drawn == [("plain", 2), ("speculative", 2), ("mlx-lm", 1)]
    assert (tmp_path / "m.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    chart.draw(tmp_path / "m.png", "nothing", [some[-1]])


def test_no_two_methods_look_alike():
    looks = list(chart.LOOKS.values())
    assert len({marker for marker, _ in looks}) == len({fill for _, fill in looks}) == 4


# Labels -----------------------------------------------------------------------------------------


def test_labels_cover_neither_each_other_nor_markers():
    # Four methods at nearly one place, and two in corners of the frame.
    at = [(100, 100), (103, 102), (101, 95), (108, 99), (5, 5), (395, 295)]
    points = [labels.Point("16 bits", x, y, y - 9, y + 9) for x, y in at]
    frame = labels.Box(0, 0, 400, 300)
    boxes = []
    for point, (dx, dy) in zip(points, labels.places(points, frame), strict=True):
        middle = (point.x + dx, point.y + dy)
        half = (labels.WIDE * len(point.text) / 2, labels.HIGH / 2)
        boxes.append(
            labels.Box(*(m - h for m, h in zip(middle, half, strict=True)),
                       *(m + h for m, h in zip(middle, half, strict=True)))
        )  # fmt: skip
    size = labels.MARKER
    markers = [labels.Box(x - size, y - size, x + size, y + size) for x, y in at]
    assert all(box.outside(frame) < 1e-6 for box in boxes)
    assert all(one.shared(other) < 1e-6 for one, other in combinations(boxes, 2))
    assert all(box.shared(marker) < 1e-6 for box in boxes for marker in markers)


def test_boxes_share_and_stick_out():
    box = labels.Box(0, 0, 4, 2)
    assert box.shared(labels.Box(3, 1, 9, 9)) == 1
    assert box.shared(labels.Box(4, 0, 9, 9)) == 0
    assert box.outside(labels.Box(0, 0, 3, 2)) == 2


# From a file ------------------------------------------------------------------------------------


def saved_file(path, incomplete=None) -> list[rows.Row]:
    made = rows.rows_of(some_runs())
    made[2] = replace(made[2], figures=None, differences=(Difference("p", 0, 0.1),))
    saved.write_json(path, saved.content_of(some_runs(), made, 1e10, [], "tiny", incomplete))
    return made


def test_what_was_saved_is_drawn_as_it_was(tmp_path, monkeypatch):
    drawn = []
    honest = chart.draw
    monkeypatch.setattr(chart, "draw", lambda *given: (drawn.append(given), honest(*given)))
    made = saved_file(tmp_path / "r.json")
    draw_command.main(["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "new/m.png")])
    ((path, title, found),) = drawn
    assert found == made
    assert title.startswith("tiny on ") and "mlx-lm" in title and "incomplete" not in title
    assert path.read_bytes()[:4] == b"\x89PNG"
    saved_file(tmp_path / "r.json", "interrupted")
    assert draw_command.read(tmp_path / "r.json")[0].endswith("(incomplete)")


def test_what_was_not_saved_by_it_is_refused_in_one_line(tmp_path):
    path = tmp_path / "r.json"
    saved_file(path)
    content = json.loads(path.read_text())
    row = content["rows"][0]
    for wrong in (
        "", "[]", "{}", "[" * 100_000, '{"rows": 3}',
        json.dumps(content | {"rows": [row | {"method": "magic"}]}),
        json.dumps(content | {"rows": [row | {"figures": {"weights": 1}}]}),
        json.dumps(content | {"rows": [row | {"figures": row["figures"] | {"weights": "a"}}]}),
        json.dumps(content | {"rows": [row | {"figures": row["figures"] | {"decode_tps": [1]}}]}),
        json.dumps(content | {"versions": {}}),
    ):  # fmt: skip
        path.write_text(wrong)
        with pytest.raises(SpecStreamError, match="not what --json wrote") as caught:
            draw_command.main(["--json", str(path), "--plot", str(tmp_path / "m.png")])
        assert "\n" not in str(caught.value)
    with pytest.raises(SpecStreamError, match="cannot read"):
        draw_command.main(["--json", str(tmp_path / "no"), "--plot", str(tmp_path / "m.png")])
    with pytest.raises(SpecStreamError, match="--plot"):
        draw_command.main(["--json", str(path)])
