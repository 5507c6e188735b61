"""``python -m mlx_specstream.train report``: what it measures, and what it writes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import decoded, streams_of, target_of, text_of

from mlx_specstream import Sampling, SpecStreamError, options, stream_generate, train, train_report
from mlx_specstream import train_report_live as live
from mlx_specstream.benchmarking.prompts import ids_of
from mlx_specstream.speculation import Speculation, decoder_for, menu_of
from mlx_specstream.streams import StreamsConfig, make_streams, randomise
from mlx_specstream.streams.files import identify, save_streams, tokenizer_hash
from mlx_specstream.streams.folder import StreamSet, save_table
from mlx_specstream.streams.ngram_table import NgramTable
from mlx_specstream.train_report_live import Prompt
from mlx_specstream.training.corpus import Corpus, Text, answers, templated
from mlx_specstream.training.distill import read_prompts
from mlx_specstream.training.evaluate import evaluate
from mlx_specstream.training.plan import Plan
from mlx_specstream.training.report_memory import measure_memory
from mlx_specstream.training.report_quality import held_out_in_training, measure_held_out
from mlx_specstream.training.report_speed import AUTO, PLAIN, Run, summarise
from mlx_specstream.training.trainer import Trainer
from mlx_specstream.training.trunk import TrunkCache
from mlx_specstream.writing import written_whole

PROMPT, SIZE = 8, 16


class Letters:
    """A tokenizer whose token n is one character, with a chat template."""

    bos_token = None
    eos_token_ids = frozenset({-1})
    eos_token_id = 0

    def get_vocab(self) -> dict[str, int]:
        return {chr(0x4E00 + n): n for n in range(101)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % 101 for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(0x4E00 + t) for t in tokens)

    def apply_chat_template(self, messages: list, add_generation_prompt: bool) -> list[int]:
        return [90, *self.encode(messages[0]["content"]), 91]


HASH = tokenizer_hash(Letters())
WORDS = {"one": "tell me tell me", "two": "abcabcabcabcab"}


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    texts = []
    for seed in range(20):
        prompt = text_of(PROMPT, seed=seed)
        said = decoded(
            target_of("grouped"), prompt, 9 + seed, "none", Sampling(temp=0.5), seed=seed
        )
        texts.append(Text(np.array([*prompt, *said], dtype=np.int32), PROMPT, "k"))
    return Corpus(tuple(texts), HASH)


@pytest.fixture(scope="module")
def streams(corpus: Corpus) -> StreamSet:
    table = NgramTable.build(answers(corpus), 101, 4)
    return StreamSet(streams_of("grouped", "fused"), table, "tiny")


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    kinds = {"one": "a", "two": "b"}
    return [Prompt(n, kinds[n], templated(Letters(), text)) for n, text in WORDS.items()]


@pytest.fixture(scope="module")
def runs(streams: StreamSet, prompts: list[Prompt]) -> list[Run]:
    model = target_of("grouped").model
    return live.measure_live(model, Letters(), streams, prompts, [0.0, 0.9], SIZE, seed=7)


# Held-out text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "fused"])
def test_quality_is_that_of_the_texts_training_held_out(kind, corpus, tmp_path):
    target = target_of("grouped")
    config = StreamsConfig("linear" if kind == "linear" else "attention", layers=2, rank=4)
    heads = randomise(make_streams(config, target), 2)
    trunk = TrunkCache(tmp_path / "trunk", target, corpus, 0 if kind == "linear" else 2)
    trunk.build()
    trainer = Trainer(heads, trunk, Plan(held_out=5, seed=3), tmp_path / "out", identify(target))
    save_streams(tmp_path / "out", heads, identify(target), {"training": trainer.summary()})
    expected = evaluate(heads, trunk, trainer.valid)
    seen = []
    found = measure_held_out(
        heads, corpus, tmp_path / "out", progress=lambda *counts: seen.append(counts)
    )
    assert held_out_in_training(tmp_path / "out", corpus) == sorted(trainer.valid)
    assert (found.texts, found.recorded) == (5, True)
    assert found.hits == expected.hits.tolist()
    assert found.tokens_per_pass == expected.tokens_per_pass
    assert found.accuracy == expected.accuracy
    tokens = sum(len(corpus.texts[n].tokens) for n in trainer.valid)
    assert seen[-1] == (tokens, tokens)


def test_the_last_texts_are_taken_where_no_training_is_recorded(corpus, tmp_path):
    target, heads = target_of("grouped"), streams_of("grouped", "linear")
    trunk = TrunkCache(tmp_path / "trunk", target, corpus, 0)
    trunk.build()
    save_streams(tmp_path / "out", heads, identify(target))
    for folder in (None, tmp_path / "absent", tmp_path / "out"):
        found = measure_held_out(heads, corpus, folder, texts=4)
        assert (found.texts, found.recorded) == (4, False)
        assert found.hits == evaluate(heads, trunk, range(16, 20)).hits.tolist()


def test_texts_too_short_to_predict_in_are_refused(corpus):
    short = Corpus(tuple(t._replace(tokens=t.tokens[: PROMPT + 3]) for t in corpus), HASH)
    with pytest.raises(SpecStreamError, match="no text to measure on"):
        measure_held_out(streams_of("grouped", "linear"), short, None)


# Live decoding ----------------------------------------------------------------------------------


def test_the_trees_are_those_that_auto_chooses_from_and_the_streams_alone(streams):
    target = target_of("grouped")
    menu = menu_of(decoder_for(target, streams, Speculation()), Speculation())
    trees = live.fixed_trees(target, streams)
    assert trees[: len(menu)] == [str(plan) for plan in menu]
    assert {"streams:3", "streams:3x2x2"} <= set(trees)
    assert all(tree.startswith("ngram:") for tree in live.fixed_trees(target, StreamSet()))


def test_a_run_counts_what_generating_counts(runs, streams, prompts):
    model = target_of("grouped").model
    for run in runs:
        if run.way == AUTO:  # what it proposes depends on the clock
            continue
        number = [p.name for p in prompts].index(run.prompt)
        given = {"speculation": False} if run.way == PLAIN else {"tree": run.way}
        *_, last = stream_generate(
            model, Letters(), prompts[number].tokens, SIZE, streams=streams,
            temp=run.temperature, seed=7 + number, **given,
        )  # fmt: skip
        assert (run.tokens, run.passes) == (
            SIZE, {"none" if run.way == PLAIN else run.way: last.passes}
        )  # fmt: skip
        assert (run.proposed, run.accepted) == (last.proposed, last.accepted)
        assert len(run.pass_seconds) == last.passes - 1
        assert sum(run.pass_seconds) < run.seconds
    assert any(sum(run.accepted.values()) for run in runs)


def test_every_way_is_run_and_only_the_second_runs_are_timed(runs, streams, prompts):
    trees = live.fixed_trees(target_of("grouped"), streams)
    assert len(runs) == 2 * len(prompts) * (len(trees) + 4)
    assert [run.way for run in runs[: len(trees) + 2]] == [PLAIN, *trees, AUTO]
    timed = [run.way for run in runs if run.timed]
    assert timed == [AUTO, PLAIN, PLAIN, AUTO] * 2


def test_every_text_is_plain_decodings(runs, prompts):
    assert all(run.same for run in runs)
    assert all(way.identical == way.prompts == len(prompts) for way in summarise(runs))


def test_a_text_that_differs_is_noticed(streams, prompts):
    model = target_of("grouped").model
    session = live.WatchedSession(model, Letters(), streams, live.speculation_of("streams:3"))
    said, run = live.decode(session, prompts[0], Sampling(), SIZE, "streams:3", False, None)
    wrong = [*said[:-1], said[-1] + 1]
    _, other = live.decode(session, prompts[0], Sampling(), SIZE, "streams:3", False, wrong)
    assert run.same and not other.same
    (way,) = summarise([run, replace(run, prompt="another"), other])
    assert way.identical == 1  # one of its two runs differs


def test_nothing_to_decode_is_refused(streams, prompts):
    for some, temperatures in ((prompts, []), ([], [0.0])):
        with pytest.raises(SpecStreamError, match="at least one"):
            live.measure_live(None, None, streams, some, temperatures)


# What the runs come to --------------------------------------------------------------------------


def run_of(prompt, way, passes, seconds, pass_seconds, timed=True) -> Run:
    fields = {
        "prompt": str(prompt),
        "category": "odd" if prompt % 2 else "even",
        "temperature": 0.0,
        "proposed": {"ngram": 20, "streams": 0},
        "accepted": {"ngram": 5, "streams": 0},
        "same": True,
    }
    times = {"seconds": seconds, "pass_seconds": pass_seconds}
    return Run(way=way, passes=passes, timed=timed, tokens=12, **times, **fields)


def test_predicted_and_measured_speed_up_follow_from_the_runs():
    cold = {"timed": False}
    runs = [
        run_of(1, PLAIN, {"none": 12}, 99.0, [0.1] * 11, **cold),
        run_of(1, "ngram:4", {"ngram:4": 4}, 99.0, [0.2] * 3, **cold),
        run_of(1, AUTO, {"none": 9, "ngram:4": 1}, 99.0, [9.0] * 9, **cold),
        run_of(1, PLAIN, {"none": 12}, 1.2, [0.1] * 11),
        run_of(1, AUTO, {"none": 3, "ngram:4": 3}, 0.9, [0.1] * 5),
        run_of(2, PLAIN, {"none": 12}, 99.0, [0.1] * 11, **cold),
        run_of(2, "ngram:4", {"ngram:4": 6}, 99.0, [0.2] * 5, **cold),
        run_of(2, AUTO, {"none": 12}, 99.0, [9.0] * 11, **cold),
        run_of(2, PLAIN, {"none": 12}, 1.2, [0.1] * 11),
        run_of(2, AUTO, {"none": 1, "ngram:4": 4}, 0.7, [0.2] * 4),
    ]
    tree, auto = summarise(runs)
    assert (tree.way, tree.tokens, tree.passes, tree.prompts) == ("ngram:4", 24, 10, 2)
    assert tree.tokens_per_pass == pytest.approx(2.4)
    assert tree.by_category == {"odd": 3.0, "even": 2.0}
    assert tree.acceptance == {"ngram": 0.25}  # nobody asked the streams
    assert tree.cost == pytest.approx(2.0)
    assert tree.predicted == pytest.approx(1.2)
    assert tree.measured is None
    assert auto.measured == pytest.approx(2.4 / 1.6)
    assert auto.predicted == pytest.approx(24 / (4 + 7 * 2))


def test_no_pass_time_gives_no_prediction():
    runs = [run_of(0, PLAIN, {"none": 1}, 1.0, []), run_of(0, "ngram:4", {"ngram:4": 1}, 1.0, [])]
    (way,) = summarise(runs)
    assert (way.pass_seconds, way.cost, way.predicted) == (None, None, None)


# Memory -----------------------------------------------------------------------------------------


def test_memory_is_the_bytes_of_the_arrays(streams):
    model = target_of("grouped").model
    memory = measure_memory(model, "float32", streams)
    heads = streams.heads
    assert memory.target == sum(a.size * 4 for _, a in tree_flatten(model.parameters()))
    assert memory.heads == sum(a.size * 4 for _, a in tree_flatten(heads.parameters()))
    draft = len(heads.config.draft_vocab)
    assert memory.draft_head == 4 * draft * (64 + heads.config.correction_rank)
    assert memory.table == streams.table.marks.nbytes + streams.table.chains.nbytes
    assert memory.added == streams.nbytes
    assert memory.share == pytest.approx(streams.nbytes / memory.target)
    assert measure_memory(model, "float32", StreamSet()).added == 0


# The command ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory, corpus, streams) -> Path:
    """Files for the command: streams, a corpus, prompts."""
    folder = tmp_path_factory.mktemp("report")
    identity = identify(target_of("grouped"), Letters())
    training = {"held_out": [text.digest for text in corpus.texts[3:9]]}
    save_streams(folder / "streams", streams.heads, identity, {"training": training})
    save_table(folder / "streams", streams.table, 101, HASH)
    corpus.save(folder / "c.npz")
    rows = [
        {"id": "p1", "category": "[b]odd", "prompt": WORDS["one"]},
        {"id": "p2", "category": "even", "prompt": WORDS["two"]},
    ]
    (folder / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def command(place, monkeypatch):
    """Runs the command on the tiny model, in the folder of the files above."""
    monkeypatch.setattr(options, "load", lambda *a, **k: (target_of("grouped").model, Letters()))
    monkeypatch.chdir(place)
    return lambda text: train_report.main(text.split())


def test_the_command_writes_tables_json_and_a_picture(command, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "new" / "r.json", tmp_path / "new" / "r.png"
    command(f"--streams streams --data c.npz --prompts p.jsonl --temps 0,0.8 --max-tokens 12 "
            f"--json {file} --png {picture}")  # fmt: skip
    out, err = capsys.readouterr()
    for said in ("6 texts held out in training", "predicted", "measured", "2 of 2", "[b]odd",
                 "ngram|table:15", "streams:3x2x2", "n-gram table"):  # fmt: skip
        assert said in out
    assert "answers" in err
    assert sorted(p.name for p in file.parent.iterdir()) == ["r.json", "r.png"]

    found = json.loads(file.read_text())
    parts = "versions machine model streams settings held_out live runs memory"
    assert list(found) == parts.split()
    assert found["versions"]["mlx"] == mx.__version__
    assert found["streams"] == "streams"
    quality = found["held_out"]
    assert (quality["texts"], quality["recorded"]) == (6, True)
    assert quality["accuracy"] == [hits[0] for hits in quality["hits"]]
    trees = [w["way"] for w in found["live"] if w["temperature"] == 0.0]
    assert {"streams:3", "streams:3x2x2", "auto"} < set(trees)
    assert [(w["temperature"], w["way"]) for w in found["live"]] == [
        (t, tree) for t in (0.0, 0.8) for tree in trees
    ]
    for way in found["live"]:
        mine = [r for r in found["runs"]
                if (r["temperature"], r["way"]) == (way["temperature"], way["way"])
                and (r["timed"] or way["way"] != "auto")]  # fmt: skip
        assert [r["prompt"] for r in mine] == ["p1", "p2"]
        assert way["tokens"] == sum(r["tokens"] for r in mine) == 24
        assert way["passes"] == sum(sum(r["passes"].values()) for r in mine)
        assert way["tokens_per_pass"] == way["tokens"] / way["passes"]
        assert list(way["by_category"]) == ["[b]odd", "even"]
        assert way["identical"] == way["prompts"] == 2
        assert way["way"] == "auto" or way["predicted"] == pytest.approx(
            way["tokens_per_pass"] / way["cost"]
        )
        assert (way["measured"] is not None) == (way["way"] == "auto")
    memory = found["memory"]
    assert memory["form"] == "float32"
    assert memory["added"] == memory["heads"] + memory["draft_head"] + memory["table"]
    assert memory["peak"] >= memory["target"]

    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"


def test_repeated_texts_count_once_as_they_do_in_training(command, corpus, place, tmp_path):
    texts = [text for text in corpus.texts for _ in range(2)]
    Corpus(tuple(texts), HASH).save(place / "twice.npz")
    found = []
    for name in ("c", "twice"):
        command(f"--streams streams --data {name}.npz --json {tmp_path / name}.json")
        found.append(json.loads((tmp_path / f"{name}.json").read_text())["held_out"])
    assert found[0] == found[1]


def test_without_data_and_prompts_it_tells_of_memory(command, capsys):
    command("--streams none")
    out, err = capsys.readouterr()
    assert "target" in out and "Live" not in out and "texts" not in out
    assert "give --data" in err


def test_the_word_report_leads_to_it_and_errors_end_in_one_line(command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "report", "--temps", "warm"])
    with pytest.raises(SystemExit) as stop:
        train.main()
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert err == "error: --temps takes temperatures like 0,0.7, not 'warm'\n"
    monkeypatch.setattr(sys, "argv", ["train", "report", "--streams", "none"])
    train.main()
    assert "Memory" in capsys.readouterr().out


def test_ids_that_are_not_one_each_become_numbers(tmp_path):
    path = tmp_path / "p.jsonl"
    for second, names in (({"id": "b"}, ["a", "b"]), ({"id": "a"}, ["1", "2"]), ({}, ["1", "2"])):
        rows = [{"id": "a", "prompt": "first "}, {"prompt": "second", **second}]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert ids_of(path, read_prompts(path)) == names


def test_a_text_that_differs_ends_in_an_error_after_the_report(command, capsys, monkeypatch):
    honest = live.decode

    def lying(session, prompt, sampling, size, way, *rest):
        said, run = honest(session, prompt, sampling, size, way, *rest)
        return said, replace(run, same=run.same and (way, prompt.name) != ("ngram|table:15", "p2"))

    monkeypatch.setattr(live, "decode", lying)
    with pytest.raises(SpecStreamError, match="1 texts differ"):
        command("--streams streams --prompts p.jsonl --temps 0 --max-tokens 6")
    assert "1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--temps , --prompts p.jsonl", "--temps takes temperatures"),
        ("--prompts absent.jsonl", "there is no file"),
        ("--prompts empty.jsonl", "holds no prompt"),
        ("--prompts odd.jsonl", "neither a prompt nor messages"),
        ("--prompts long.jsonl", "prompt 1 has 3002 tokens but the context holds 2048"),
        ("--data absent.npz", "there is no corpus"),
        ("--data other.npz --streams streams", "another tokenizer"),
        ("--data c.npz --streams none", "--data measures stream heads and there are none"),
        ("--streams absent", "no streams in"),
        ("--png r.png", "nothing to draw"),
        ("--json p.jsonl/r.json", "cannot write"),
        ("--json streams", "cannot write"),
        ("--max-tokens 0", "not a whole number above 0"),
    ],
)
def test_what_cannot_be_measured_is_one_line(command, corpus, place, given, message):
    (place / "empty.jsonl").write_text("\n")
    (place / "odd.jsonl").write_text('{"question": "a"}\n')
    (place / "long.jsonl").write_text(json.dumps({"prompt": "a" * 3000}) + "\n")
    replace(corpus, tokenizer="other").save(place / "other.npz")
    with pytest.raises(SpecStreamError, match=message) as caught:
        command(given)
    assert "\n" not in str(caught.value)


def test_a_file_stays_as_it_was_where_writing_fails(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("before")
    with pytest.raises(SpecStreamError, match="disk is full"), written_whole(path) as file:
        file.write_text("half of it")
        raise OSError(28, "the disk is full")
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert path.read_text() == "before"


def test_a_missing_matplotlib_is_named_before_anything_is_measured(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(options, "load", lambda *a, **k: pytest.fail("measured"))
    with pytest.raises(SpecStreamError) as caught:
        command("--prompts p.jsonl --png r.png")
    assert "pip install 'mlx-specstream[report]'" in str(caught.value)
