"""Recordings as files, and the commands that make and replay them."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
from recorded import PROMPT, made_up, repetitive, table
from tiny import TINY, streams_of

from mlx_specstream import Sampling, SpecStreamError
from mlx_specstream.benchmarking import simulate_command
from mlx_specstream.benchmarking.chips import published
from mlx_specstream.benchmarking.prompts import Prompt
from mlx_specstream.benchmarking.record import record, stream_ranks
from mlx_specstream.benchmarking.recording import Recording, shipped
from mlx_specstream.benchmarking.simulation import simulate
from mlx_specstream.decode.costs import CostCurve
from mlx_specstream.session import Session
from mlx_specstream.speculation import Speculation
from mlx_specstream.streams.folder import StreamSet

# Files and commands -----------------------------------------------------------------------------


def test_a_recording_comes_back_as_it_was(tmp_path):
    for name in ("r.json", "r.json.gz"):
        made_up().save(tmp_path / name)
        assert Recording.load(tmp_path / name) == made_up()
    first = (tmp_path / "r.json.gz").read_bytes()
    made_up().save(tmp_path / "r.json.gz")
    assert (tmp_path / "r.json.gz").read_bytes() == first


def changed(**prompt) -> bytes:
    content = {"format": 1, **vars(made_up())}
    content["prompts"] = [vars(made_up().prompts[0]) | prompt]
    return json.dumps(content).encode()


def whole(**changes) -> bytes:
    return json.dumps(json.loads(changed()) | changes).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nothing",
        b"[]",
        b'{"format": 2}',
        b'{"format": 1, "prompts": []}',
        b"\x1f\x8b damaged",
        changed(tokens=[]),
        changed(lookup=[2, 1, 0]),
        changed(lookup=[99, 1, 0, 0, 2, 1]),
        changed(filled=[2, 0, 0, 0, 0, 0]),
        changed(streams=[[0, 0]] * 5),
        changed(streams=[[0]] * 6),
        changed(streams=[[0, 8]] * 6),
        changed(extra=1),
        changed(prompt_tokens="ten"),
        changed(prompt_tokens=0),
        changed(tokens=["a"] * 6),
        changed(tokens=7),
        changed(id=3),
        changed(streams=[3] * 6),
        whole(rates=[1]),
        whole(rates=[[0.5], ["a"]]),
        whole(rates=[[0.5]]),
        whole(rates=7),
        whole(temp=10**400),
        whole(gamma="two"),
        whole(gamma=None),
        whole(lookups="ngram|magic"),
        whole(lookups=3),
        b"[" * 100_000,
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(SpecStreamError, match="not a recording") as error:
        simulate_command.main("simulate", ["--recording", str(path)])
    assert "\n" not in str(error.value)


def test_missing_and_damaged_files_and_curves(tmp_path):
    made_up().save(tmp_path / "r.json")
    good = ["--recording", str(tmp_path / "r.json")]
    (tmp_path / "bad.json").write_text("{}")
    packed = gzip.compress(changed())
    (tmp_path / "bad.json.gz").write_bytes(packed[:-9])
    (tmp_path / "torn.json.gz").write_bytes(packed[:20] + bytes(range(99, 160)) + packed[80:])
    for arguments, words in (
        (["--recording", str(tmp_path / "absent")], "cannot read"),
        (["--recording", str(tmp_path / "bad.json.gz")], "not a recording"),
        (["--recording", str(tmp_path / "torn.json.gz")], "not a recording"),
        ([*good, "--curve", "m9"], "m3-max"),
        ([*good, "--curve", str(tmp_path / "bad.json")], "not a cost curve"),
        ([*good, "--json", str(tmp_path / "r.json" / "out")], "cannot write"),
        ([*good, "--curves", "all"], "--help"),
    ):
        with pytest.raises(SpecStreamError, match=words):
            simulate_command.main("simulate", arguments)


def test_the_command_predicts_and_says_so(tmp_path, capsys):
    repetitive().save(tmp_path / "r.json.gz")
    arguments = ["--recording", str(tmp_path / "r.json.gz"), "--json", str(tmp_path / "out.json")]
    simulate_command.main("simulate", arguments)
    told = capsys.readouterr().out
    assert "PREDICTION, not a measurement" in told
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["what"] == "PREDICTION, not a measurement"
    by_name = {curve["name"]: curve for curve in content["curves"]}
    assert set(by_name) == set(published())
    assert by_name["m1-m2"]["overall"]["speedup"] == pytest.approx(1.0)
    assert by_name["m5-max"]["overall"]["speedup"] > 1.5
    for name, each in published().items():
        assert each.source.startswith("https://")
        assert f"{name}: " in told

    curve = CostCurve.from_ratios({1: 1.0, 8: 1.2}, 0.05, 0.1)
    curve.about = {"device": "a desk", "mlx": "0.32"}
    curve.save(tmp_path / "mine.json")
    simulate_command.main("simulate", [*arguments, "--curve", str(tmp_path / "mine.json")])
    told = capsys.readouterr().out
    assert "measured on a desk, 0.32" in told
    assert "Trees chosen" in told
    assert "best fixed tree" in told


def test_the_worst_prompt_is_in_the_table_and_every_prompt_in_the_json(tmp_path, capsys):
    good = repetitive().prompts
    bad = replace(good[0], id="unlucky", category="new", lookup=[0] * 60, streams=[[-1] * 3] * 60)
    replace(repetitive(), prompts=[*good, bad]).save(tmp_path / "r.json")
    curve = CostCurve.from_ratios({1: 1.0, 2: 1.1, 3: 1.2, 16: 2.5}, 0.05)
    curve.save(tmp_path / "c.json")
    given = ["--recording", str(tmp_path / "r.json"), "--json", str(tmp_path / "out.json")]
    simulate_command.main("simulate", [*given, "--curve", str(tmp_path / "c.json")])
    told = capsys.readouterr().out
    (one,) = json.loads((tmp_path / "out.json").read_text())["curves"]
    assert [prompt["id"] for prompt in one["prompts"]] == ["0", "1", "2", "unlucky"]
    worst = one["prompts"][-1]
    assert worst["speedup"] < 0.99 and worst["tokens_per_pass"] == 1 and worst["tokens"] == 60
    assert one["overall"]["worst_prompt"] == "unlucky" and one["overall"]["slower"] == 1
    assert one["overall"]["worst_speedup"] == worst["speedup"]
    assert one["by_category"]["k"]["slower"] == 0
    assert f"unlucky {worst['speedup']:.2f}" in told and "under 1.0" in told
    simulate_command.main("simulate", given)
    told = capsys.readouterr().out
    assert "worst prompt" in told and "unlucky 0." in told


class Letters:
    """A tokenizer whose token n is one character."""

    bos_token = None
    eos_token_ids = frozenset({-1})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % 101 for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(0x4E00 + t) for t in tokens)


@pytest.mark.parametrize("temp", [0.0, 0.7])
def test_recording_a_model(tmp_path, temp):
    model = TINY["grouped"]()
    heads = streams_of("grouped", "deferred")
    streams = StreamSet(heads, table(), "s")
    prompts = [Prompt("a", "k", PROMPT), Prompt("b", "", PROMPT[:1])]
    found = record(model, Letters(), "tiny", streams, prompts, 12, temp, 3)
    found.save(tmp_path / "r.json.gz")
    assert Recording.load(tmp_path / "r.json.gz") == found
    assert (found.gamma, found.lookups, found.rides_along) == (3, "ngram|table", True)
    assert found.held_share > 0
    assert found.read_share > 0.5  # two of three layers, adapters and a draft head
    session = Session(model, Letters(), None, Speculation(tree="ngram:3"))
    for prompt, recorded in zip(prompts, found.prompts, strict=True):
        options = Sampling(temp=temp, seed=3)
        told = [r.token for r in session.stream(prompt.tokens, 12, options)]
        assert recorded.tokens == told
        assert recorded.prompt_tokens == len(prompt.tokens)
    alone = record(model, Letters(), "tiny", StreamSet(), prompts[:1], 5)
    assert (alone.gamma, alone.lookups, alone.rates, alone.held_share) == (0, "ngram", None, 0.0)
    assert alone.prompts[0].streams == []
    assert simulate(alone, published()["m5-max"].curve(alone)).overall.prompts == 1


def test_one_token_answers_can_be_recorded():
    heads = streams_of("grouped", "linear")
    assert stream_ranks(heads, PROMPT, [4], Sampling()) == [[-1, -1, -1]]
    assert len(stream_ranks(heads, PROMPT, [4, 5], Sampling())) == 2


def test_the_shipped_recording_is_the_default_models():
    path = shipped()
    if path is None:
        pytest.skip("not in a repository")
    recording = Recording.load(path)
    assert path.stat().st_size < 200_000
    assert recording.model == "SmolLM2-135M-Instruct"
    assert len(recording.prompts) == 20
    assert Path(path).parent.name == "results"
