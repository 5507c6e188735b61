"""The benchmark's schedule, differences, rows and tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from benchmarked import decoding, run_of, some_runs

from mlx_specstream.benchmarking import rows, saved, tables
from mlx_specstream.benchmarking.methods import Decoding
from mlx_specstream.benchmarking.prompts import Prompt
from mlx_specstream.benchmarking.schedule import Difference, first_difference, measure

# The schedule -----------------------------------------------------------------------------------


class Fake:
    """A method that says what it is told."""

    def __init__(self, name: str, tokens: Callable[[int], tuple[int, ...]], calls: list[str]):
        self.name, self._tokens, self._calls = name, tokens, calls

    def decode(self, prompt, max_tokens, sampling) -> Decoding:
        self._calls.append(self.name)
        return decoding(self._tokens(len(self._calls)))

    def margin(self, prompt, position, sampling) -> float:
        self._calls.append(f"margin at {position}")
        return 0.25


def test_methods_take_turns_after_one_run_that_is_not_timed():
    calls: list[str] = []
    plain, a, b = (Fake(name, lambda _: (1, 2), calls) for name in ("plain", "a", "b"))
    some = [Prompt("p", "", [1]), Prompt("q", "", [1])]
    runs = measure(plain, [a, b], some, bits=4, rounds=3)  # type: ignore[arg-type]
    orders = [calls[n : n + 3] for n in range(0, len(calls), 3)]
    assert orders[0] == orders[4] == ["plain", "a", "b"]
    assert [order[0] for order in orders[1:4]] == ["a", "b", "plain"]
    assert [order[0] for order in orders[5:]] == ["b", "plain", "a"]
    assert [run.round for run in runs[::3]] == [0, 1, 2, 3] * 2
    assert [run.timed for run in runs[:6]] == [False] * 3 + [True] * 3
    assert not any(run.difference for run in runs)


def test_a_difference_is_found_in_any_run_and_its_margin_once():
    calls: list[str] = []
    plain = Fake("plain", lambda _: (1, 2, 3), calls)
    other = Fake("a", lambda call: (1, 9, 3) if call > 4 else (1, 2, 3), calls)
    some: Any = ([other], [Prompt("p", "", [1])])
    runs = measure(plain, *some, bits=4, rounds=3)  # type: ignore[arg-type]
    found = [run.difference for run in runs if run.method == "a"]
    assert found[0] is None and found[-1] == Difference("p", 1, 0.25)
    assert calls.count("margin at 1") == 1


def test_a_text_that_ends_before_plain_decodings_differs_where_it_ends():
    calls: list[str] = []
    plain, short, long = (
        Fake(name, lambda _, n=n: (1, 2, 3, 4)[:n], calls)
        for name, n in (("plain", 3), ("short", 2), ("long", 4))
    )
    some: Any = ([short, long], [Prompt("p", "", [1])])
    runs = measure(plain, *some, bits=4, rounds=1)  # type: ignore[arg-type]
    found = {run.method: run.difference for run in runs}
    assert found["short"] == Difference("p", 2, 0.25)
    assert found["long"] == Difference("p", 3, None)


@pytest.mark.parametrize(
    ("ours", "theirs", "at"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1, 2), (1,), 1), ((1,), (1, 2), 1)],
)
def test_where_texts_differ(ours, theirs, at):
    assert first_difference(ours, theirs) == at


# Rows -------------------------------------------------------------------------------------------


def test_a_row_has_medians_ratios_of_a_round_and_the_prediction():
    plain, ours, theirs = rows.rows_of(some_runs())
    assert [row.method for row in (plain, ours, theirs)] == ["plain", "speculative", "mlx-lm"]
    figures = ours.figures
    assert figures.speedup_vs_plain == pytest.approx(6**0.5)
    assert figures.speedup_vs_mlx_lm == pytest.approx(6**0.5 * 1.25)
    assert plain.figures.speedup_vs_plain == pytest.approx(1)
    assert theirs.figures.speedup_vs_plain == pytest.approx(0.8)
    assert (figures.tokens_per_pass, figures.passes) == (2.5, 4)
    assert figures.acceptance == {"ngram": 0.75}
    assert figures.predicted == pytest.approx(2.0)
    assert plain.figures.predicted is None
    assert plain.figures.decode_tps.median == pytest.approx(5 / 3)  # of 2 and 4/3 a second
    assert plain.figures.decode_tps[1:] == pytest.approx((4 / 3, 2))
    assert plain.figures.prompt_tps.median == pytest.approx(16)
    assert plain.figures.read_rate == pytest.approx(4 * 4 * 1100 / 10)
    assert figures.decode_peak == 1500


def test_a_row_whose_text_differed_anywhere_has_no_figures():
    runs = some_runs()
    for place, run in enumerate(runs):
        if (run.method, run.prompt, run.round) == ("speculative", "q", 0):
            runs[place] = replace(run, difference=Difference("q", 3, 0.01))
    plain, ours, _ = rows.rows_of(runs)
    assert plain.figures is not None
    assert ours.figures is None and ours.differences == (Difference("q", 3, 0.01),)
    objects = {o["id"]: o for o in saved.prompt_objects(runs)}
    assert objects["p"]["identical"] and not objects["q"]["identical"]
    assert objects["p"]["speedup_vs_plain"] == pytest.approx(2)
    for name in saved.RATIOS:
        assert objects["q"][name] is None
    summary = saved.summary_of(list(objects.values()))
    assert (summary["prompts"], summary["identical"]) == (2, 1)
    assert summary["counted"]["speedup_vs_plain"] == 1

    speed, memory = tables.speed_sheet([plain, ours]), tables.memory_sheet([plain, ours], 1e9)
    for sheet in (speed, memory):
        assert sheet.rows[1][2] == tables.DIFFERS
        assert set(sheet.rows[1][3:]) == {tables.NOTHING}
    (line,) = tables.difference_lines([plain, ours])
    assert "1 of 2 prompts, first at token 4 of q" in line and "0.0100 nats" in line


def test_where_mlx_lm_differs_its_prompt_is_not_compared():
    runs = some_runs()
    for place, run in enumerate(runs):
        if (run.method, run.prompt) == ("mlx-lm", "q"):
            runs[place] = replace(run, difference=Difference("q", 0, None))
    _, ours, theirs = rows.rows_of(runs)
    assert theirs.figures is None
    assert ours.figures.speedup_vs_mlx_lm == pytest.approx(2 * 1.25)
    assert "on which its text is the same" in tables.speed_sheet([ours, theirs]).note
    assert "one of the texts ends there" in tables.difference_lines([theirs])[0]
    summary = saved.summary_of(saved.prompt_objects(runs))
    assert summary["identical"] == 2
    assert summary["counted"] == {
        "tokens_per_pass": 2, "speedup_vs_plain": 2, "speedup_vs_mlx_lm": 1
    }  # fmt: skip
    assert summary["worst_prompt"]["id"] == "p"


def test_an_answer_of_one_pass_has_no_speed():
    runs = [run_of(m, "p", t, first=5, passes=1) for m in ("plain", "speculative") for t in (0, 1)]
    for row in rows.rows_of(runs):
        assert row.figures.decode_tps is row.figures.speedup_vs_plain is None
    assert tables.speed_sheet(rows.rows_of(runs)).rows[0][4] == tables.NOTHING


def test_plain_decoding_is_not_said_to_differ_from_itself_as_others_do():
    runs = some_runs()
    runs[3] = replace(runs[3], difference=Difference("p", 2, 0.1))
    plain, *_ = rows.rows_of(runs)
    assert plain.method == "plain" and plain.figures is None
    assert "not the tokens of its first run on 1 of 2" in tables.difference_lines([plain])[0]


def test_the_markdown_is_a_table_of_github():
    text = tables.speed_sheet(rows.rows_of(some_runs())).markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 3
    assert len({line.count("|") for line in lines}) == 1
    assert lines[1].startswith("| --- | --- | ---: |")
