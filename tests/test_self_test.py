"""The self-test of a streams folder: measured once, and held against other weights on loading."""

from __future__ import annotations

import json
import os
import re
import warnings
from functools import cache
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from test_streams_folder import Tokenizer
from tiny import TINY, VOCAB, build, decoded, filled, run_tree, target_of, text_of

from mlx_specstream import Session, SpecStreamError, Speculation, StreamSet, embedded, shipped
from mlx_specstream import self_test as module
from mlx_specstream.self_test import (
    PROMPT_TOKENS,
    PROMPTS,
    TOKENS,
    add_self_test,
    choose_prompts,
    make_self_test,
)
from mlx_specstream.streams import StreamHeads, StreamsConfig, make_streams
from mlx_specstream.streams.files import identify, save_self_test, save_streams
from mlx_specstream.target import Target, TreeLayout
from mlx_specstream.training.corpus import Text

KINDS = ("linear", "fused", "deferred")
GAMMA = 3
FEW = 3  # texts that a self-test is made of here
OTHERS = {
    "another seed": lambda: build(seed=1),
    "quantized": lambda: build(quantize=True),
    "half precision of another seed": lambda: build(seed=2, dtype=mx.bfloat16),
}


@cache
def texts(name: str = "grouped") -> tuple[Text, ...]:
    """Prompts with a tiny target's greedy answers."""
    return tuple(text(text_of(8 + seed, seed=seed), name=name) for seed in range(12))


def text(prompt: list[int], answer: int = 40, name: str = "grouped") -> Text:
    said = decoded(target_of(name), prompt, answer, "none")
    return Text(np.array([*prompt, *said], dtype=np.int32), len(prompt), "")


@cache
def streams(kind: str, name: str = "grouped") -> StreamHeads:
    """Streams that know which token most often follows which in ``texts``, and nothing else.

    The correction alone says so: with E the embeddings, A = E+ W (E+)T gives E A ET the wanted
    scores W, as nearly as a hidden state of 64 numbers can.
    """
    target = target_of(name)
    config = StreamsConfig(
        "linear" if kind == "linear" else "attention",
        GAMMA,
        "deferred" if kind == "deferred" else "fused",
        2,
        rank=4,
        start_rank=8,
        correction_rank=target.hidden_size,
    )
    heads = make_streams(config, target)
    wanted = np.zeros((VOCAB, VOCAB))
    for said in texts(name):
        np.add.at(wanted, (said.tokens[said.answer - 1 : -1], said.tokens[said.answer :]), 1)
    wanted /= np.maximum(wanted.sum(axis=1, keepdims=True), 1)
    inverse = np.linalg.pinv(np.array(target.family.embed(mx.arange(VOCAB))[0].astype(mx.float32)))
    heads.correction_a = mx.array((1e3 * inverse @ wanted @ inverse.T).astype(np.float32))
    heads.correction_b = mx.eye(target.hidden_size)
    return heads.prepare()


def save(folder, kind="linear", test: bool = True):
    target = target_of("grouped")
    save_streams(folder, streams(kind), identify(target, Tokenizer(), "me/tiny"), {"note": 1})
    if test:
        save_self_test(folder, own(kind))
    return folder


@cache
def own(kind: str) -> dict:
    """What the streams' own target measures."""
    return make_self_test(target_of("grouped"), streams(kind), texts()[:FEW])


def field(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["self_test"]


def counted(target: Target, heads: StreamHeads, test: dict) -> tuple[int, list[int], list[int]]:
    """Passes, proposed and accepted by depth, from plain passes over what the streams say."""
    passes, proposed, accepted = 0, [0] * GAMMA, [0] * GAMMA
    for prompt in test["prompts"]:
        kv, words, known, made = filled(target, prompt[:-1]), list(prompt), None, 0
        while made < test["tokens"]:
            draft: list[int] = []
            if known is not None:
                kv.reserve(kv.length + GAMMA)
                length = mx.array(kv.length, dtype=mx.int32)
                hidden, kv.kv = heads.draft_hidden(
                    known, mx.array(words[-1]), kv.kv, length, kv.capacity
                )
                for base in heads.draft_logits(hidden):
                    above = mx.array([draft[-1] if draft else words[-1]])
                    draft.append(mx.argmax(base + heads.correction(above)[0]).item())
            rows = [words[-1], *draft, *[0] * (GAMMA - len(draft))]
            output = run_tree(heads, kv, rows, TreeLayout.chain(GAMMA))
            said = mx.argmax(target.logits(output.hidden), axis=-1).tolist()
            right = 0
            while right < len(draft) and draft[right] == said[right]:
                right += 1
            kv.commit(list(range(right + 1)))
            known = heads.observed(output, mx.array(right))
            words += said[: right + 1]
            made += right + 1
            passes += 1
            for depth in range(GAMMA):
                proposed[depth] += len(draft) > depth
                accepted[depth] += right > depth
    return passes, proposed, accepted


def warned(load) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load()
    return [str(warning.message) for warning in caught]


@pytest.fixture
def no_measurement(monkeypatch):
    def fail(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(module, "measure", fail)


# Making ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["grouped", "quantized"])
def test_what_is_recorded_is_what_a_direct_count_gives(kind, name):
    target, heads = target_of(name), streams(kind, name)
    test = make_self_test(target, heads, texts(name)[:FEW])
    assert json.loads(json.dumps(test)) == test
    assert (len(test["prompts"]), test["tokens"], test["stop"]) == (FEW, TOKENS, [])
    passes, proposed, accepted = counted(target, heads, test)
    assert (test["passes"], test["proposed"], test["accepted"]) == (passes, proposed, accepted)
    assert proposed == [passes - FEW] * GAMMA
    assert test["tokens_per_pass"] == pytest.approx(1 + sum(accepted) / passes)
    assert test["tokens_per_pass"] > 1.15  # else the streams here would show nothing
    assert test == make_self_test(target, StreamSet(heads=heads), texts(name)[:FEW])


def test_a_continuation_ends_where_its_text_does():
    target, heads = target_of("grouped"), streams("linear")
    full = own("linear")
    said = [decoded(target, prompt, TOKENS, "none") for prompt in full["prompts"]]
    end = said[0][9]
    cut = make_self_test(target, heads, texts()[:FEW], {end, -1, VOCAB})
    assert cut["stop"] == [end] and cut["prompts"] == full["prompts"]
    left = sum((words.index(end) + 1) if end in words else TOKENS for words in said)
    committed = cut["passes"] + sum(cut["accepted"])
    assert left <= committed <= left + FEW * GAMMA < full["passes"] + sum(full["accepted"])


def test_short_prompts_come_first_and_none_is_longer_than_wanted():
    short, long = text_of(PROMPT_TOKENS), text_of(2 * PROMPT_TOKENS, seed=7)
    both = [text(long, 2), text(short, 2), text(short, 3)]
    target = target_of("grouped")
    assert choose_prompts(both, target) == [short, long[-PROMPT_TOKENS:]]
    chosen = choose_prompts([*both, *texts()], target)
    assert chosen == [short, *(text_of(8 + seed, seed=seed) for seed in (1, 3, 5, 7, 9))]
    assert len(chosen) == PROMPTS


def test_prompts_that_the_target_cannot_read_are_refused():
    target, heads = target_of("grouped"), streams("linear")
    beyond = Text(np.array([3, VOCAB, 4, 5], dtype=np.int32), 2, "")
    with pytest.raises(SpecStreamError, match="token 101, but the model's are 0 to 100"):
        make_self_test(target, heads, [*texts(), beyond])
    for nothing in ([], [Text(np.array([4, 5], dtype=np.int32), 0, "")]):
        with pytest.raises(SpecStreamError, match="at least one text with a prompt"):
            make_self_test(target, heads, nothing)
    with pytest.raises(SpecStreamError, match="no streams to make a self-test for"):
        make_self_test(target, StreamSet(), texts())


# In the folder -----------------------------------------------------------------------------------


def test_it_is_added_to_a_folder_that_else_stays_as_it_was(tmp_path):
    save(tmp_path, test=False)
    before = json.loads((tmp_path / "config.json").read_text())
    weights = (tmp_path / "streams.safetensors").read_bytes()
    made = add_self_test(tmp_path, target_of("grouped"), Tokenizer(), texts()[:FEW])
    assert made == own("linear")
    after = json.loads((tmp_path / "config.json").read_text())
    assert after == {**before, "self_test": made}
    assert (tmp_path / "streams.safetensors").read_bytes() == weights
    assert len(list(tmp_path.iterdir())) == 2


def test_it_is_measured_on_the_own_target_alone(tmp_path):
    save(tmp_path, test=False)
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(SpecStreamError, match=r"other weights: measure .* on me/tiny"):
        add_self_test(tmp_path, Target.of(build(seed=1)), Tokenizer(), texts())
    with pytest.raises(SpecStreamError, match="another tokenizer"):
        add_self_test(tmp_path, target_of("grouped"), Tokenizer("xyz"), texts())
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("stage", ["write", "rename"])
def test_a_failed_write_leaves_the_folder_whole(tmp_path, monkeypatch, stage):
    save(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*where):
        raise OSError(28, "No space left on device")

    def half(path, content, *_):
        with open(path, "w") as file:
            file.write(content[:20])
        full()

    with monkeypatch.context() as patch:
        if stage == "write":
            patch.setattr("pathlib.Path.write_text", half)
        else:
            patch.setattr(os, "replace", full)
        with pytest.raises(SpecStreamError, match=r"cannot write the self-test .*No space left"):
            save_self_test(tmp_path, {"prompts": []})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    with pytest.raises(SpecStreamError, match="no streams in"):
        save_self_test(tmp_path / "absent", {})


# On loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_are_silent_and_nothing_is_measured(tmp_path, kind, no_measurement):
    folder = save_unmeasured(tmp_path, kind)
    assert warned(lambda: Session(TINY["grouped"](), Tokenizer(), folder)) == []
    half = build(dtype=mx.bfloat16)
    wide = build(dtype=mx.bfloat16)
    wide.set_dtype(mx.float32)
    identity = identify(Target.of(half), Tokenizer())
    save_streams(folder, streams(kind), identity, {"self_test": "not even looked at"})
    assert warned(lambda: Session(wide, Tokenizer(), folder)) == []


def save_unmeasured(folder, kind):
    identity = identify(target_of("grouped"), Tokenizer(), "me/tiny")
    save_streams(folder, streams(kind), identity, {"self_test": {"prompts": [[1]]}})
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", OTHERS)
def test_other_weights_give_one_warning_with_both_figures(tmp_path, kind, other):
    save(tmp_path, kind)
    test, model = field(tmp_path), OTHERS[other]()
    sessions = []
    said = warned(lambda: sessions.append(Session(model, Tokenizer(), tmp_path)))
    passes, _, accepted = counted(Target.of(model), sessions[0].streams.heads, test)
    here, there = 1 + sum(accepted) / passes, test["tokens_per_pass"]
    assert 1 < here < there - 0.01
    assert said == [
        f"the streams in {tmp_path} were trained for other weights (me/tiny): {here:.2f} tokens "
        f"per pass here, {there:.2f} on their own target; the text stays right"
    ]


def test_streams_that_were_put_to_it_leave_the_text_as_it_is(tmp_path):
    save(tmp_path, "deferred")
    model = OTHERS["quantized"]()
    with pytest.warns(UserWarning, match="the text stays right"):
        session = Session(model, Tokenizer(), tmp_path, Speculation(tree="streams:3"))
    said = [response.token for response in session.stream(text_of(9), 16)]
    assert said == decoded(Target.of(model), text_of(9), 16, "none")


def test_it_is_measured_once_while_the_files_stay_as_they_are(tmp_path, monkeypatch):
    save(tmp_path)
    model = OTHERS["another seed"]()
    assert len(warned(lambda: Session(model, Tokenizer(), tmp_path))) == 1
    with monkeypatch.context() as patch:
        patch.setattr(module, "measure", None)
        assert warned(lambda: Session(model, Tokenizer(), tmp_path)) == []
    save_self_test(tmp_path, {**field(tmp_path), "tokens": 9})
    assert len(warned(lambda: Session(model, Tokenizer(), tmp_path))) == 1


def test_shipped_streams_are_put_to_it_too(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "package" / "shipped.py"))
    place = save(tmp_path / "weights" / shipped.NAMES[embedded.NAME])
    same, tuned = TINY["grouped"](), build(seed=1)
    for model, count in ((same, 0), (tuned, 1)):
        model._specstream_loaded = SimpleNamespace(name=embedded.NAME)
        said = warned(lambda model=model: Session(model, Tokenizer()))
        assert len(said) == count
        assert Session(model, Tokenizer()).proposers == ["ngram", "streams"]
    assert f"{field(place)['tokens_per_pass']:.2f} on their own target" in said[0]


@pytest.mark.parametrize(
    ("changes", "tokenizer", "message"),
    [
        ({"model_type": "smollm3"}, "abc", "made for architecture llama, not smollm3"),
        ({"vocab_size": 90}, "abc", "made for vocab_size 101, not 90"),
        ({"hidden_size": 32}, "abc", "made for hidden_size 64, not 32"),
        ({"seed": 1}, "acb", "made for another tokenizer"),
    ],
)
def test_another_kind_of_target_is_refused_unmeasured(
    tmp_path, changes, tokenizer, message, no_measurement
):
    folder = save_unmeasured(tmp_path, "linear")
    with pytest.raises(SpecStreamError, match=message):
        Session(build(**changes), Tokenizer(tokenizer), folder)


def test_without_a_self_test_acceptance_is_called_unknown(tmp_path, no_measurement):
    save(tmp_path, test=False)
    said = warned(lambda: Session(build(seed=1), Tokenizer(), tmp_path))
    assert said == [
        f"the streams in {tmp_path} were trained for other weights (me/tiny): how many of their "
        "tokens are accepted here is unknown; the text stays right"
    ]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda t: [1], "it is no object"),
        (lambda t: {}, "prompts is no list of 1 to 16"),
        (lambda t: t | {"prompts": []}, "prompts is no list"),
        (lambda t: t | {"prompts": [[1]] * 17}, "prompts is no list"),
        (lambda t: t | {"prompts": [[1], []]}, "a prompt is no list of 1 to 256 tokens"),
        (lambda t: t | {"prompts": [[1] * 257]}, "a prompt is no list of 1 to 256 tokens"),
        (lambda t: t | {"prompts": [[1, VOCAB]]}, "a prompt is no list .* from 0 to 100"),
        (lambda t: t | {"prompts": [[-1]]}, "a prompt is no list .* from 0 to 100"),
        (lambda t: t | {"prompts": [[1.5]]}, "a prompt is no list .* from 0 to 100"),
        (lambda t: t | {"prompts": ["ab"]}, "a prompt is no list .* from 0 to 100"),
        (lambda t: t | {"tokens": 10**9}, "tokens is not 1 to 256"),
        (lambda t: t | {"tokens": True}, "tokens is not 1 to 256"),
        (lambda t: t | {"stop": [VOCAB]}, "stop is no list of tokens"),
        (lambda t: t | {"stop": 2}, "stop is no list of tokens"),
        (lambda t: t | {"passes": 0}, "passes is no count"),
        (lambda t: t | {"accepted": t["accepted"][:-1]}, "accepted is no list of 3 counts"),
        (lambda t: t | {"accepted": None}, "accepted is no list of 3 counts"),
        (lambda t: t | {"tokens_per_pass": 2.9}, "tokens_per_pass does not follow"),
        (lambda t: t | {"tokens_per_pass": float("nan")}, "tokens_per_pass does not follow"),
        (lambda t: t | {"tokens_per_pass": "2"}, "tokens_per_pass does not follow"),
    ],
)
def test_a_damaged_self_test_is_named_and_the_streams_are_used(
    tmp_path, damage, fault, no_measurement
):
    target = target_of("grouped")
    good = {"prompts": [[1, 2]], "tokens": 32, "stop": [], "passes": 20, "tokens_per_pass": 1.65,
            "proposed": [19, 19, 19], "accepted": [8, 4, 1]}  # fmt: skip
    assert module.fault_of(good, target, GAMMA) == ""
    save(tmp_path, test=False)
    save_self_test(tmp_path, damage(good))
    sessions = []
    said = warned(lambda: sessions.append(Session(build(seed=1), Tokenizer(), tmp_path)))
    assert sessions[0].proposers == ["ngram", "streams"]
    assert len(said) == 1 and "\n" not in said[0]
    assert re.search(f"accepted here is unknown, as .*damaged .{fault}", said[0])


def test_a_prompt_that_the_context_cannot_hold_is_named(tmp_path):
    save(tmp_path)
    small = build(seed=1, max_position_embeddings=TOKENS + 5)
    said = warned(lambda: Session(small, Tokenizer(), tmp_path))
    assert len(said) == 1 and f"does not fit a context of {TOKENS + 5}" in said[0]
