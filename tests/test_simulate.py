"""Recording what proposals would have been right, and replaying it by a cost curve."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tiny import TINY, decoded, reports, streams_of, target_of, text_of

from mlx_specstream import Sampling, SpecStreamError
from mlx_specstream.benchmarking import simulate_command
from mlx_specstream.benchmarking.chips import published
from mlx_specstream.benchmarking.prompts import Prompt
from mlx_specstream.benchmarking.record import lookups_right, record, stream_ranks
from mlx_specstream.benchmarking.recording import RecordedPrompt, Recording, shipped
from mlx_specstream.benchmarking.replay import Clock, RecordedShadow, along, passes
from mlx_specstream.benchmarking.simulation import Outcome, simulate, with_tree
from mlx_specstream.decode.costs import CostCurve
from mlx_specstream.decode.evidence import LookupShadow
from mlx_specstream.decode.plan import Branch, TreePlan
from mlx_specstream.decode.planner import FixedPlanner
from mlx_specstream.decode.promise import Chance
from mlx_specstream.decode.proposers import NgramLookup, StreamProposer, TableProposer
from mlx_specstream.session import Session
from mlx_specstream.speculation import Speculation
from mlx_specstream.streams.folder import StreamSet
from mlx_specstream.streams.ngram_table import NgramTable

PROMPT = text_of(30, seed=3)
COUNT = 70  # tokens of an answer
COMPARED = 50  # passes beyond this position could have run past the recorded end


@cache
def table() -> NgramTable:
    """Of other texts of the model, and of pieces of the recorded ones: it is right now and then."""
    target = target_of("grouped")
    texts = [decoded(target, text_of(9, seed), 40) for seed in range(4)]
    for temp in (0.0, 0.8):
        answer = decoded(target, PROMPT, COUNT, "none", Sampling(temp=temp))
        texts += [answer[12:24], answer[38:52]]
    return NgramTable.build([*texts, PROMPT[10:]], 101)


@cache
def tiny_recording(kind: str, temp: float = 0.0) -> Recording:
    """A recorded answer of a tiny model; ``kind`` as in ``streams_of``."""
    target, heads = target_of("grouped"), streams_of("grouped", kind)
    sampling = Sampling(temp=temp, seed=5)
    answer = decoded(target, PROMPT, COUNT, "none", sampling)
    right, filled = lookups_right([NgramLookup(), TableProposer(table())], target, PROMPT, answer)
    ranks = stream_ranks(heads, PROMPT, answer, sampling)
    prompt = RecordedPrompt("one", "k", len(PROMPT), answer, right, filled, ranks)
    return Recording(
        "tiny", temp, 5, "ngram|table", 3, None, heads.rides_along, 0.2, 0.05, [prompt]
    )


def made_up(**changes) -> Recording:
    """An answer of six tokens; streams are right at its fourth."""
    prompt = RecordedPrompt(
        id="a",
        category="k",
        prompt_tokens=10,
        tokens=[1, 2, 3, 4, 5, 6],
        lookup=[2, 1, 0, 0, 2, 1],
        filled=[0, 0, -1, 1, 0, 0],
        streams=[[-1, -1], [0, 0], [2, 0], [1, 0], [-1, 0], [0, -1]],
    )
    return replace(
        Recording("m", 0.0, 0, "ngram|table", 2, [[0.5, 0.2], [0.4]], True, 0.2, 0.05, [prompt]),
        **changes,
    )


def replayed(recording: Recording, tree: str) -> list[tuple[int, int]]:
    """Context and committed tokens of every pass with one tree."""
    planner = FixedPlanner(TreePlan.parse(tree))
    made = passes(recording, recording.prompts[0], planner, lambda plan, context: 1.0, Clock())
    return [(one.context, one.committed) for one in made]


# What is recorded is what decoding does ---------------------------------------------------------


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["linear", "fused", "deferred"])
@pytest.mark.parametrize("tree", ["ngram|table:7", "ngram|table:3,streams:8x2x1", "streams:4x1"])
def test_a_replayed_tree_makes_the_passes_that_decoding_makes(kind, temp, tree):
    recording = tiny_recording(kind, temp)
    target, streams = target_of("grouped"), streams_of("grouped", kind)
    proposers = (NgramLookup(), TableProposer(table()), StreamProposer(streams))
    seen = []

    class Watcher(FixedPlanner):
        def observe(self, plan, report):
            seen.append(report)

    clock, planner = Clock(), Watcher(TreePlan.parse(tree))
    passes(recording, recording.prompts[0], planner, lambda plan, context: 1.0, clock)
    really = reports(target, PROMPT, COUNT, tree, Sampling(temp=temp, seed=5), proposers)
    place = 0
    for simulated, real in zip(seen, really, strict=False):
        if place >= COMPARED:
            break
        assert simulated.tokens == real.tokens, place
        assert simulated.branches == real.branches, place
        place += len(real.tokens)
    assert place >= COMPARED
    assert clock.seconds == len(seen)


def test_the_tiny_answers_have_something_to_tell():
    for kind in ("linear", "fused", "deferred"):
        prompt = tiny_recording(kind).prompts[0]
        assert {0, 1} <= set(prompt.filled)
        assert max(prompt.lookup) > 3
        assert all(max(ranks) > 0 for ranks in zip(*prompt.streams, strict=True))
        assert prompt.streams[0] == [-1, -1, -1]


def test_the_recorded_shadow_judges_as_the_lookups_on_the_host_do():
    prompt = tiny_recording("linear").prompts[0]
    ours, theirs = (
        RecordedShadow(prompt, Chance(0.3, 0.6)),
        LookupShadow(2, 4, table(), Chance(0.3, 0.6)),
    )
    ours.learn(PROMPT)
    theirs.learn(PROMPT)
    for token in prompt.tokens:
        ours.judge(token)
        theirs.judge(token)
        assert ours.chance == theirs.chance


# Replaying, by hand -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ("none", [(10 + n, 1) for n in range(6)]),
        ("ngram|table:1", [(10, 2), (12, 1), (13, 1), (14, 2)]),
        ("ngram|table:4", [(10, 3), (13, 1), (14, 2)]),
        ("streams:1", [(10, 1), (11, 2), (13, 1), (14, 1), (15, 1)]),
        ("streams:2x1", [(10, 1), (11, 3), (14, 1), (15, 1)]),
        ("ngram|table:2,streams:2x1", [(10, 3), (13, 3)]),
    ],
)
def test_passes_by_hand(tree, expected):
    assert replayed(made_up(), tree) == expected


def test_fused_streams_know_nothing_after_a_pass_without_them():
    recording = made_up(rides_along=False)

    class Turns(FixedPlanner):
        def plan(self):
            self._plan, self.other = self.other, self._plan
            return self._plan

    planner = Turns(TreePlan.parse("streams:1"))
    planner.other = TreePlan()
    made = passes(recording, recording.prompts[0], planner, lambda plan, context: 1.0, Clock())
    assert [one.committed for one in made] == [1] * 6
    assert replayed(recording, "streams:1")[1] == (11, 2)


def test_along_a_tree():
    branch = Branch.of_paths("streams", [(0, 0), (0, 1), (2,)])
    assert along(branch, [0, 1, 0]) == (0, 1)
    assert along(branch, [2, 0]) == (2,)
    assert along(branch, [1]) == along(branch, [-1, 0]) == along(branch, []) == ()


@pytest.mark.parametrize("tree", ["ngram:4", "streams:1x1x1", "ngram|table:16"])
def test_a_tree_that_was_not_recorded_is_refused(tree):
    with pytest.raises(SpecStreamError, match="record"):
        replayed(made_up(), tree)


# What is predicted ------------------------------------------------------------------------------


def repetitive() -> Recording:
    """Three answers in which lookups and streams are right nearly everywhere."""
    count = 60
    lookup = [min(15, count - n) if n % 10 else 0 for n in range(count)]
    prompts = [
        RecordedPrompt(
            *(str(number), "k", 20, list(range(count)), lookup, [0] * count),
            streams=[[-1, -1, -1], *([[0, 0, 0]] * (count - 1))],
        )
        for number in range(3)
    ]
    return Recording("m", 0.0, 0, "ngram|table", 3, None, True, 0.2, 0.05, prompts)


def test_where_rows_cost_as_much_as_passes_nothing_is_proposed():
    linear = CostCurve.from_ratios({1: 1.0, 16: 16.0}, 0.05, 0.2)
    found = simulate(repetitive(), linear)
    assert found.menu == []
    assert found.trees == {"none": 1.0}
    assert found.overall == Outcome(3, 1.0, pytest.approx(1.0))
    assert str(found.best_fixed) == "none"


def test_where_rows_cost_nothing_the_speed_up_is_the_tokens_per_pass():
    flat = CostCurve.from_ratios({1: 1.0, 20: 1.0}, 0.05)
    found = simulate(repetitive(), flat)
    assert found.overall.tokens_per_pass > 5
    assert found.overall.speedup == pytest.approx(found.overall.tokens_per_pass, rel=0.05)
    assert found.fixed_overall.speedup >= 0.99 * found.overall.speedup
    assert sum(found.trees.values()) == pytest.approx(1)
    assert list(found.by_category) == ["k"]


def test_a_fixed_tree_costs_what_the_curve_says():
    costs = CostCurve.from_ratios({1: 1.0, 2: 1.5}, 2.0)
    (one,) = with_tree(made_up(), costs.of, TreePlan.parse("ngram|table:1"))
    assert one.seconds == pytest.approx(4 * 3.0)
    assert one.plain_seconds == pytest.approx(6 * 2.0)
    assert one.speedup == pytest.approx(1.0)


def test_a_curve_that_does_not_price_streams_is_replayed_without_them():
    costs = CostCurve([(1, 0, False, 1.0), (16, 0, False, 1.1)])
    found = simulate(repetitive(), costs)
    assert found.overall.speedup > 2
    assert not any("streams" in tree for tree in found.trees)


def test_streams_of_a_published_curve_cost_their_share_of_a_pass_over_their_rows():
    curve = published()["m1-m2"].curve(made_up())
    plain = curve.seconds(1)
    assert curve.seconds(1, 0, True) == pytest.approx(plain * (1 + 0.2 * 2))  # two streams
    assert curve.seconds(6) == pytest.approx(6 * plain)


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
    (tmp_path / "bad.json.gz").write_bytes(gzip.compress(b"{}")[:-9])
    for arguments, words in (
        (["--recording", str(tmp_path / "absent")], "cannot read"),
        (["--recording", str(tmp_path / "bad.json.gz")], "not a recording"),
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
