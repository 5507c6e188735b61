"""``python -m mlx_specstream.benchmark`` as a command: what it writes and refuses."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_specstream import SpecStreamError
from mlx_specstream import benchmark as command_module
from mlx_specstream.benchmarking import measure_command as measuring
from mlx_specstream.benchmarking import saved, tables
from mlx_specstream.benchmarking.methods import Ours

# The command ------------------------------------------------------------------------------------


@pytest.fixture
def command(tiny_model, tmp_path, monkeypatch):
    """Runs the command on the tiny model, in a folder of its own with two prompts."""
    kinds = [{"id": "p1", "category": "[b]odd", "prompt": "the thing that thinks"},
             {"id": "p2", "category": "even", "prompt": "then they"}]  # fmt: skip
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kinds))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda: 1e10)
    return lambda text: measuring.main(["--model", str(tiny_model), *text.split()])


def test_the_command_measures_forms_and_contexts_and_writes_everything(
    command, tiny_model, tmp_path, capsys
):
    pytest.importorskip("matplotlib")
    command(
        f"--prompts p.jsonl --against plain,mlx-lm,mlx-lm-draft --draft-model {tiny_model} "
        "--bits 8,32 --context 64,90 -n 1 --max-tokens 4 --json new/r.json --csv new/r.csv "
        "--plot new/r.png"
    )
    out, err = capsys.readouterr()
    assert out.count("speculative") == out.count("mlx-lm-draft") == 2 * 4
    assert "10.0 GB/s in a copy" in out
    assert "8-bit" in err
    assert sorted(path.name for path in Path("new").iterdir()) == ["r.csv", "r.json", "r.png"]

    found = json.loads(Path("new/r.json").read_text())
    parts = "argv date incomplete versions machine model prompts summary rows"
    assert list(found) == parts.split()
    assert found["incomplete"] is None
    assert found["argv"][:2] == ["--model", str(tiny_model)]
    assert found["machine"]["copy_bandwidth"] == 1e10
    assert [(p["bits"], p["context"], p["id"]) for p in found["prompts"]] == [
        (bits, context, name) for bits in (8, 32) for context in (64, 90) for name in ("p1", "p2")
    ]
    for each in found["prompts"]:
        assert {"category", "tokens_per_pass", "speedup_vs_plain"} <= set(each)
        assert each["identical"] and each["tokens_per_pass"] >= 1
    summary = found["summary"]
    assert summary["prompts"] == summary["identical"] == 8
    assert set(summary["geometric_means"]) == set(saved.RATIOS)
    assert summary["worst_prompt"]["id"] in ("p1", "p2")
    assert [(f["bits"], f["context"]) for f in summary["forms"]] == [
        (8, 64), (8, 90), (32, 64), (32, 90)
    ]  # fmt: skip
    assert len(found["rows"]) == 16

    lines = list(csv.DictReader(Path("new/r.csv").read_text().splitlines()))
    assert len(lines) == 4 * 2 * 4 * 2  # forms and contexts, prompts, methods, runs
    assert all(float(line["first_seconds"]) > 0 for line in lines)
    for line in lines:
        assert line["machine"] == found["machine"]["device"]
        assert line["date"] == found["date"]
        assert line["mlx"] == found["versions"]["mlx"]
        assert line["mlx_lm"] == found["versions"]["mlx-lm"]
        assert line["mlx_specstream"] == found["versions"]["mlx-specstream"]


def test_the_markdown_can_be_pasted(command, capsys):
    command("--prompts p.jsonl -n 1 --max-tokens 4 --against plain --markdown --streams none")
    out, _ = capsys.readouterr()
    assert "`python -m mlx_specstream.benchmark --model" in out
    assert out.count("| 32 | speculative |") == out.count("| 32 | plain |") == 2
    assert "━" not in out and "| 32 | mlx-lm |" not in out


def test_sampled_texts_are_compared_too(command, capsys):
    command("--prompts p.jsonl -n 1 --max-tokens 8 --temp 0.8 --seed 5")
    assert tables.DIFFERS not in capsys.readouterr().out


def test_another_text_of_ours_ends_in_an_error_after_the_tables(command, capsys, monkeypatch):
    honest = Ours.decode

    def lying(self, *rest):
        found = honest(self, *rest)
        wrong = self.name == "speculative"
        return replace(found, tokens=(*found.tokens[:-1], -1)) if wrong else found

    monkeypatch.setattr(Ours, "decode", lying)
    with pytest.raises(SpecStreamError, match="please report"):
        command("--prompts p.jsonl -n 1 --max-tokens 4 --against plain --json r.json")
    out, _ = capsys.readouterr()
    assert tables.DIFFERS in out and "2 of 2 prompts, first at token 4 of p1" in out
    found = json.loads(Path("r.json").read_text())
    assert found["summary"]["identical"] == 0
    assert found["summary"]["worst_prompt"] is None


def test_plain_decoding_that_differs_from_itself_is_not_blamed_on_speculation(command, monkeypatch):
    honest, calls = Ours.decode, []

    def unsteady(self, *rest):
        found = honest(self, *rest)
        if self.name != "plain":
            return found
        calls.append(self.name)
        return replace(found, tokens=(*found.tokens[:-1], -len(calls)))

    monkeypatch.setattr(Ours, "decode", unsteady)
    with pytest.raises(SpecStreamError, match="plain decoding itself") as caught:
        command("--prompts p.jsonl -n 1 --max-tokens 4 --against plain")
    assert "speculative" not in str(caught.value)


# Stopped before the end -------------------------------------------------------------------------


def stopped_at(monkeypatch, call: int, error: BaseException) -> None:
    """Let one decoding of the benchmark, counted over all its runs, end in an error."""
    honest, calls = Ours.decode, []

    def decode(self, *rest):
        calls.append(self.name)
        if len(calls) == call:
            raise error
        return honest(self, *rest)

    monkeypatch.setattr(Ours, "decode", decode)


@pytest.mark.parametrize(
    ("error", "words", "code"),
    [
        (KeyboardInterrupt(), "interrupted", 130),
        (SpecStreamError("there is no such thing", 2), "there is no such thing", 2),
        (RuntimeError("[malloc]\nno memory"), "[malloc] no memory", 1),
    ],
    ids=["ctrl-c", "ours", "mlx"],
)
def test_what_was_finished_is_kept_when_measuring_stops(
    command, capsys, monkeypatch, error, words, code
):
    # 4 runs of a prompt, 8 of a form: the second form stops in its second prompt.
    stopped_at(monkeypatch, 15, error)
    files = "--json r.json --csv r.csv"
    with pytest.raises(SpecStreamError) as caught:
        command(f"--prompts p.jsonl --bits 8,32 -n 1 --max-tokens 4 --against plain {files}")
    assert caught.value.exit_code == code
    assert str(caught.value) == f"{words} (after 14 of 16 runs: those were kept)"
    told, _ = capsys.readouterr()
    assert "(incomplete)" in told
    found = json.loads(Path("r.json").read_text())
    assert found["incomplete"] == words
    assert [(p["bits"], p["id"]) for p in found["prompts"]] == [(8, "p1"), (8, "p2"), (32, "p1")]
    assert [row["prompts"] for row in found["rows"]] == [2, 2, 1, 1]
    assert len(list(csv.DictReader(Path("r.csv").read_text().splitlines()))) == 14


def test_runs_of_no_whole_prompt_are_kept_as_they_are(command, capsys, monkeypatch):
    stopped_at(monkeypatch, 2, KeyboardInterrupt())
    with pytest.raises(SpecStreamError, match="after 1 of 8 runs"):
        command("--prompts p.jsonl -n 1 --max-tokens 4 --against plain --json r.json --csv r.csv")
    assert json.loads(Path("r.json").read_text())["rows"] == []
    assert len(Path("r.csv").read_text().splitlines()) == 2
    assert capsys.readouterr().out == ""


def test_where_nothing_was_measured_nothing_is_written(command, monkeypatch):
    stopped_at(monkeypatch, 1, KeyboardInterrupt())
    with pytest.raises(SpecStreamError, match=r"^interrupted$") as caught:
        command("--prompts p.jsonl -n 1 --max-tokens 4 --against plain --json r.json")
    assert caught.value.exit_code == 130
    assert not Path("r.json").exists()


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--against plain,llama.cpp", "not 'llama.cpp'"),
        ("--against mlx-lm-draft", "need each other"),
        ("--draft-model x", "need each other"),
        ("--bits 4,5", "--bits takes some of 4, 8, 16, 32, not '4,5'"),
        ("--bits=", "--bits takes some of"),
        ("--bits= --dtype float16", "--bits takes some of"),
        ("--context=", "--context: '' is not"),
        ("--bits ²", "--bits takes some of"),
        ("--bits 4 --dtype float16", "leave --dtype"),
        ("--bits 4 --no-dequantize", "leave --dtype"),
        ("--context 128,many", "--context: 'many' is not"),
        ("--context 0", "--context: '0' is not"),
        ("--streams absent", "there is no streams folder absent"),
        ("--prompts absent.jsonl", "there is no file"),
        ("--prompts empty.jsonl", "holds no prompt"),
        ("--prompts odd.jsonl", "neither a prompt nor messages"),
        ("--prompts broken.jsonl", "cannot read"),
        ("--json p.jsonl/r.json", "cannot write"),
        ("--csv p.jsonl/r.csv", "cannot write"),
        ("--plot p.jsonl/r.png", "cannot write"),
        ("--temp -1", "temp cannot be -1"),
        ("-n 0", "not a whole number above 0"),
        ("--max-tokens 0", "not a whole number above 0"),
    ],
)
def test_what_cannot_be_measured_is_one_line_before_anything_is_loaded(
    command, monkeypatch, given, message
):
    monkeypatch.setattr(measuring, "load_form", lambda *a: pytest.fail("loaded"))
    Path("empty.jsonl").write_text("\n")
    Path("odd.jsonl").write_text('{"question": "a"}\n')
    Path("broken.jsonl").write_text('{"prompt": \n')
    with pytest.raises(SpecStreamError, match=message.replace("(", r"\(")) as caught:
        command(given)
    assert "\n" not in str(caught.value)


def test_a_context_that_the_model_does_not_have_is_refused(command):
    with pytest.raises(SpecStreamError, match="the 2048 that the model has"):
        command("--context 2000 --max-tokens 100")
    with pytest.raises(SpecStreamError, match=r"^answers of 4000 tokens .* need more"):
        command("--max-tokens 4000")


def test_a_missing_matplotlib_is_named(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SpecStreamError, match="--plot needs matplotlib"):
        command("--plot r.png")


@pytest.mark.parametrize("word", ["simulate", "fits", "record", "calibrate", "draw"])
def test_words_in_front_lead_elsewhere(monkeypatch, word):
    seen = []
    for name in ("simulate_command", "calibrate_command", "draw_command"):
        module: Any = ModuleType(name)
        module.main = lambda *given: seen.append(given)
        monkeypatch.setitem(sys.modules, f"mlx_specstream.benchmarking.{name}", module)
        monkeypatch.setattr(f"mlx_specstream.benchmarking.{name}", module, raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmark", word, "--x"])
    command_module.main()
    assert seen == ([(["--x"],)] if word in ("calibrate", "draw") else [(word, ["--x"])])


def test_an_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--bits", "5"])
    with pytest.raises(SystemExit) as stop:
        command_module.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: --bits takes some of 4, 8, 16, 32, not '5'\n"
