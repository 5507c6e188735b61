"""``python -m mlx_specstream.benchmark``: what it measures, refuses to show, and writes."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import build, streams_of, target_of

from mlx_specstream import Sampling, Session, SpecStreamError, Speculation, StreamSet, Target, load
from mlx_specstream import benchmark as command_module
from mlx_specstream.benchmarking import chart, forms, mlx_lm_methods, prompts, rows, saved, tables
from mlx_specstream.benchmarking import measure_command as measuring
from mlx_specstream.benchmarking.arguments import arguments
from mlx_specstream.benchmarking.bandwidth import copy_bandwidth, weights_read
from mlx_specstream.benchmarking.memory import Meter
from mlx_specstream.benchmarking.methods import Decoding, Ours, bytes_of_asking, paid
from mlx_specstream.benchmarking.mlx_lm_methods import MlxLm
from mlx_specstream.benchmarking.prompts import Prompt
from mlx_specstream.benchmarking.schedule import Difference, Run, first_difference, measure
from mlx_specstream.decode.costs import CostCurve
from mlx_specstream.streams import StreamsConfig, make_streams, randomise
from mlx_specstream.training.report_memory import parameter_bytes

SIZE = 14
GREEDY, SAMPLED = Sampling(seed=3), Sampling(temp=0.9, top_k=50, seed=3)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> tuple[Any, Any]:
    return load(tiny_model)


@pytest.fixture(scope="module")
def prompt(tiny) -> list[int]:
    return tiny[1].encode("the thing that they think of then", add_special_tokens=False)


def ways(model: Any, tokenizer: Any, streams: StreamSet = StreamSet()) -> tuple[Ours, list]:
    plain = Ours("plain", model, tokenizer, StreamSet(), Speculation(enabled=False))
    chain = Ours("speculative", model, tokenizer, streams, Speculation(tree="ngram:3"))
    others = [MlxLm(model, tokenizer), MlxLm(model, tokenizer, model, 2)]
    return plain, [chain, *others]


# Forms ------------------------------------------------------------------------------------------


def args_for(folder: Path, *more: str):
    return arguments(["--model", str(folder), *more])


@pytest.mark.parametrize(
    ("bits", "dtype"), [(32, mx.float32), (16, mx.bfloat16), (8, mx.float32), (4, mx.float32)]
)
def test_each_form_holds_what_it_says(tiny_model, tiny, bits, dtype):
    model, _ = forms.load_form(args_for(tiny_model), bits)
    assert forms.held_bits(model) == bits
    assert Target.of(model).dtype == dtype
    assert model._specstream_loaded.bits == (bits if bits < 16 else None)
    assert model._specstream_loaded.nbytes == parameter_bytes(model)
    whole = parameter_bytes(tiny[0])
    assert parameter_bytes(model) / whole == pytest.approx(
        {32: 1, 16: 1 / 2, 8: 9 / 32, 4: 5 / 32}[bits], rel=0.15
    )


def test_a_packed_checkpoint_keeps_its_own_values_and_is_packed_otherwise_from_them(
    tiny_model, tmp_path
):
    weights = arrays_of(build(vocab_size=268, quantize=True))
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"vocab_size": 268, "num_hidden_layers": 3, "tie_word_embeddings": True}
    config["quantization"] = {"group_size": 32, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    four, _ = forms.load_form(args_for(tmp_path), 4)
    eight, _ = forms.load_form(args_for(tmp_path), 8)
    whole, _ = forms.load_form(args_for(tmp_path), 32)
    assert all(mx.array_equal(arrays_of(four)[name], value) for name, value in weights.items())
    exact = arrays_of(whole)["model.layers.0.mlp.up_proj.weight"]
    packed = eight.model.layers[0].mlp.up_proj
    values = mx.dequantize(
        packed.weight, packed.scales, packed.biases, packed.group_size, packed.bits
    )
    assert packed.bits == forms.held_bits(eight) == 8
    assert mx.max(mx.abs(values - exact)).item() < mx.max(mx.abs(exact)).item() / 100


def arrays_of(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def test_without_bits_the_model_is_as_it_loads(tiny_model):
    model, _ = forms.load_form(args_for(tiny_model, "--dtype", "float16"), None)
    assert (forms.held_bits(model), Target.of(model).dtype) == (16, mx.float16)


# Prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [60, 200, 900])
def test_a_prompt_is_padded_to_its_context(tiny, count):
    tokenizer = tiny[1]
    tokens = prompts.padded(tokenizer, "the end", count)
    assert count - 16 < len(tokens) <= count  # a word of this tokenizer is many tokens
    asked = prompts.tokens_of(tokenizer, "the end")
    assert tokens[-5:] == asked[-5:]


def test_a_prompt_that_is_longer_stays_as_it_is(tiny):
    text = "that " * 30
    assert prompts.padded(tiny[1], text, 20) == prompts.tokens_of(tiny[1], text)


def test_neutral_text_does_not_come_back():
    words = prompts.neutral_words(4000)
    sentences = " ".join(words).split(".")[:-1]
    assert len(words) == 4000
    assert len(set(sentences)) == len(sentences)


def test_without_a_file_there_are_prompts_of_several_kinds():
    tasks = prompts.named_tasks(None)
    assert len(tasks) == len({task.category for task in tasks.values()}) > 3


# Memory and bandwidth ---------------------------------------------------------------------------


def test_a_copy_tells_the_bandwidth():
    assert 1e7 < copy_bandwidth(1 << 20, rounds=2) < 1e13


def test_an_embedding_that_is_not_the_head_is_not_read():
    tied, untied = build(), build(tie_word_embeddings=False)
    assert weights_read(tied) == parameter_bytes(tied)
    assert weights_read(untied) == parameter_bytes(untied) - 101 * 64 * 4


def test_streams_are_read_where_they_are_asked_and_deferred_ones_read_the_top_again():
    target = target_of("grouped")
    assert bytes_of_asking(StreamSet(), target) == 0
    fused, deferred = (streams_of("grouped", kind) for kind in ("fused", "deferred"))
    assert bytes_of_asking(StreamSet(fused), target) == fused.memory_bytes()
    top = parameter_bytes(target.model.model.layers[-1])
    assert bytes_of_asking(StreamSet(deferred), target) == deferred.memory_bytes() + 2 * top


def test_the_meter_counts_peaks_beyond_what_was_held_and_apart():
    kept = mx.ones((1 << 20,))
    mx.eval(kept)
    meter = Meter()
    meter.start()
    mx.eval(mx.ones((1 << 22,)))  # 16 MB before the first token
    meter.token()
    more = mx.ones((1 << 19,))
    mx.eval(more)
    meter.token()
    meter.stop()
    assert 16e6 < meter.prefill_peak < 20e6
    assert 2e6 < meter.decode_peak < 4e6
    assert meter.first_seconds > 0 and meter.decode_seconds > 0
    assert meter.cache_bytes >= 16e6


# Methods ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_method_gives_plain_decodings_tokens(tiny, prompt, sampling):
    plain, others = ways(*tiny)
    right = plain.decode(prompt, SIZE, sampling)
    assert right.tokens == tuple(
        r.token for r in Session(*tiny, None, Speculation(enabled=False)).stream(
            prompt, SIZE, sampling
        )
    )  # fmt: skip
    for method in others:
        assert method.decode(prompt, SIZE, sampling).tokens == right.tokens, method.name


def test_a_decoding_counts_passes_proposals_and_bytes(tiny, prompt):
    plain, (chain, theirs, drafted) = ways(*tiny)
    length = len(prompt) + SIZE / 2
    row = 2 * 5 * 2 * 16 * 4  # keys and values, layers, heads, width, float32
    weights, read = parameter_bytes(tiny[0]), weights_read(tiny[0])
    for method in (plain, theirs):
        found = method.decode(prompt, SIZE, GREEDY)
        assert (found.passes, found.first_tokens) == (SIZE, 1)
        assert (found.proposed, found.added, found.cost) == ({}, 0, None)
        assert found.weights == weights
        assert found.pass_bytes == pytest.approx(read + row * length)
        assert found.kv == 256 * row
        assert found.decode_peak > weights
    found = drafted.decode(prompt, SIZE, GREEDY)
    assert found.added == weights
    assert found.proposed == found.accepted == {"draft": 10}
    assert (found.passes, found.first_tokens) == (5, 3)  # it agrees with itself: 3 a pass
    assert found.kv == 2 * 256 * row
    assert found.pass_bytes > 2 * read
    found = chain.decode(prompt, SIZE, GREEDY)
    assert set(found.proposed) == {"ngram"}
    extra = found.passes + found.accepted["ngram"] - SIZE
    assert extra in (0, 1)  # a last pass may be cut before the target's own token


def test_added_bytes_and_costs_are_the_streams_and_the_curves(tiny, prompt):
    streams = StreamSet(streams_for(tiny[0]))
    auto = Ours("speculative", *tiny, streams, Speculation())
    found = auto.decode(prompt, SIZE, GREEDY)
    assert found.added == streams.nbytes
    assert found.cost == pytest.approx(found.passes, rel=1)


def streams_for(model: Any) -> Any:
    return randomise(make_streams(StreamsConfig("linear", 3), Target.of(model)), 1)


def test_what_passes_cost_is_read_off_the_curve():
    curve = CostCurve.from_ratios({1: 1.0, 5: 2.0}, 0.1)
    assert paid({"none": 3, "ngram:4": 2}, curve, 50) == pytest.approx(7.0)
    assert paid({"none": 3}, None, 50) is None


def test_the_margin_is_between_the_two_likeliest(tiny, prompt):
    plain, _ = ways(*tiny)
    said = plain.decode(prompt, 4, GREEDY).tokens
    logits = tiny[0](mx.array([[*prompt, *said[:3]]]))[0, -1]
    second, first = np.sort(np.array(logits))[-2:]
    assert plain.margin(prompt, 3, GREEDY) == pytest.approx(first - second, abs=1e-4)


def test_a_draft_model_of_other_tokens_is_refused(tiny):
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    mlx_lm_methods.check_draft(tiny[1], tiny[1])
    with pytest.raises(SpecStreamError, match="another vocabulary"):
        mlx_lm_methods.check_draft(tiny[1], Other())


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


def decoding(tokens=(1, 2, 3, 4, 5), seconds=1.0, passes=5, first=1, **changes) -> Decoding:
    fields = {
        "first_seconds": 0.5, "cost": None, "proposed": {}, "accepted": {}, "weights": 1000,
        "added": 10, "kv": 100, "prefill_peak": 2000, "decode_peak": 1500, "cache": 50,
        "pass_bytes": 1100.0,
    }  # fmt: skip
    return Decoding(
        tokens=tuple(tokens), decode_seconds=seconds, passes=passes, first_tokens=first,
        **fields | changes,
    )  # fmt: skip


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


def run_of(method, prompt, turn, seconds=1.0, difference=None, bits=4, **changes) -> Run:
    done = decoding(seconds=seconds, **changes)
    return Run(bits, None, method, prompt, f"kind of {prompt}", 8, turn, done, difference)


def some_runs() -> list[Run]:
    """Two prompts, two rounds: plain, ours twice and three times as fast, mlx-lm slower."""
    runs = []
    for prompt, faster in (("p", 2.0), ("q", 3.0)):
        for turn, drift in enumerate((50.0, 1.0, 1.5)):  # the warm-up would spoil all of it
            runs += [
                run_of("plain", prompt, turn, 2.0 * drift),
                run_of(
                    "speculative", prompt, turn, 2.0 * drift / faster, passes=2, cost=2.5,
                    proposed={"ngram": 4, "table": 0}, accepted={"ngram": 3, "table": 0},
                ),
                run_of("mlx-lm", prompt, turn, 2.5 * drift),
            ]  # fmt: skip
    return runs


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


def test_the_markdown_is_a_table_of_github():
    text = tables.speed_sheet(rows.rows_of(some_runs())).markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 3
    assert len({line.count("|") for line in lines}) == 1
    assert lines[1].startswith("| --- | --- | ---: |")


def test_the_picture_has_a_point_for_each_row_with_figures(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
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
    assert len({marker for marker, *_ in looks}) == len({fill for _, fill, *_ in looks}) == 4


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
    parts = ["argv", "versions", "machine", "model", "prompts", "summary", "rows"]
    assert list(found) == parts
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--against plain,llama.cpp", "not 'llama.cpp'"),
        ("--against mlx-lm-draft", "need each other"),
        ("--draft-model x", "need each other"),
        ("--bits 4,5", "--bits takes some of 4, 8, 16, 32, not '4,5'"),
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


def test_a_missing_matplotlib_is_named(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SpecStreamError, match="--plot needs matplotlib"):
        command("--plot r.png")


@pytest.mark.parametrize("word", ["simulate", "fits", "record", "calibrate"])
def test_words_in_front_lead_elsewhere(monkeypatch, word):
    seen = []
    for name in ("simulate_command", "calibrate_command"):
        module: Any = ModuleType(name)
        module.main = lambda *given: seen.append(given)
        monkeypatch.setitem(sys.modules, f"mlx_specstream.benchmarking.{name}", module)
        monkeypatch.setattr(f"mlx_specstream.benchmarking.{name}", module, raising=False)
    monkeypatch.setattr(sys, "argv", ["benchmark", word, "--x"])
    command_module.main()
    assert seen == ([(["--x"],)] if word == "calibrate" else [(word, ["--x"])])


def test_an_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--bits", "5"])
    with pytest.raises(SystemExit) as stop:
        command_module.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: --bits takes some of 4, 8, 16, 32, not '5'\n"
