"""Text through proposals equals text without them, token for token, whatever is proposed."""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import pytest
from tiny import HALF, Oracle, decoded, filled, reports, streams_of, target_of, text_of

from mlx_specstream.decode.loop import Decoder
from mlx_specstream.decode.plan import TreePlan
from mlx_specstream.decode.processors import Sampling
from mlx_specstream.decode.proposers import NgramLookup, StreamProposer

COUNT = 30
PROMPTS = {1: [17], 19: text_of(19), 600: text_of(600)}
TEMPERATURES = (0.0, 0.7, 1.0)
STREAM_KINDS = ("linear", "fused", "deferred")
ORACLE, NGRAM, TREE, MIXED = "oracle:3x2x1", "ngram:4", "streams:2x2x1", "ngram:3,streams:2x1x1"
PROPOSALS = [
    ("ngram", NGRAM),
    ("ngram", "ngram:1"),
    ("ngram", "ngram:2,ngram:2x1"),
    ("oracle", "oracle:4"),
    ("oracle", ORACLE),
    ("oracle", "ngram:2,oracle:3x1x2"),
    *((kind, plan) for kind in STREAM_KINDS for plan in ("streams:3", TREE, MIXED)),
    *((kind, "oracle:2x1,streams:1,ngram:3,streams:2x2") for kind in STREAM_KINDS),
]
OTHERS = [
    *("untied", "sliding", "llama3_rope", "smollm3", "quantized"),
    *("opt", "gemma3_text", "gemma2", "phi3", "granite", "qwen3_moe", "mixtral"),
]
OPTIONS = {
    "windowed_repetition": {"repetition_penalty": 1.4, "repetition_context_size": 5},
    "whole_repetition": {"repetition_penalty": 1.3, "repetition_context_size": 0},
    "presence_and_frequency": {
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "frequency_context_size": 0,
        "presence_context_size": 3,
    },
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 4},
    "min_p": {"min_p": 0.1},
    "bias": {"logit_bias": {3: 4.0, 50: -100.0, 77: 1.5}},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.02,
        "logit_bias": {9: 2.0},
    },
}


@cache
def plain(name: str, prompt: int, option: str | None, temp: float, seed: int = 5) -> list[int]:
    sampling = Sampling(temp=temp, **OPTIONS.get(option, {}))
    return decoded(target_of(name), PROMPTS[prompt], COUNT, "none", sampling, seed=seed)


def proposers_for(name: str, kind: str, prompt: int, expected: list[int]) -> tuple:
    lookup, oracle = NgramLookup(min_length=1), Oracle(PROMPTS[prompt] + expected)
    if kind in STREAM_KINDS:
        return lookup, oracle, StreamProposer(streams_of(name, kind))
    return lookup, oracle


def check(name, kind, plan, prompt, temp, option=None, **how) -> float:
    """Demand identity; returns tokens per pass."""
    expected = plain(name, prompt, option, temp)
    sampling = Sampling(temp=temp, **OPTIONS.get(option, {}))
    made = reports(
        target_of(name),
        PROMPTS[prompt],
        COUNT,
        plan,
        sampling,
        proposers_for(name, kind, prompt, expected),
        **how,
    )
    tokens = [token for report in made for token in report.tokens]
    assert tokens[:COUNT] == expected
    return len(tokens) / len(made)


@pytest.mark.parametrize("temp", TEMPERATURES)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(("kind", "plan"), PROPOSALS)
def test_any_proposals_leave_the_text_as_it_is(kind, plan, prompt, temp):
    rate = check("grouped", kind, plan, prompt, temp)
    if "oracle" in plan:
        assert rate > 1.25  # else nothing was accepted and nothing has been tested


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", STREAM_KINDS)
def test_other_kinds_of_target_are_preserved_too(name, kind, temp):
    rate = check(name, kind, "oracle:3x2x1,ngram:2,streams:2x1", 19, temp)
    assert rate > 1.25


@pytest.mark.parametrize(("prompt", "temp"), [(1, 0.8), (19, 0.0), (19, 0.8)])
@pytest.mark.parametrize(
    ("kind", "plan"),
    [("ngram", NGRAM), ("oracle", ORACLE), ("fused", MIXED), ("deferred", TREE)],
)
@pytest.mark.parametrize("option", OPTIONS)
def test_penalties_filters_and_bias_see_each_rows_own_history(option, kind, plan, prompt, temp):
    check("grouped", kind, plan, prompt, temp, option)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_text(option):
    """Otherwise the test above would prove nothing about it."""
    temp = 0.0 if "penalty" in str(OPTIONS[option]) or "bias" in option else 1.0
    assert plain("grouped", 19, option, temp) != plain("grouped", 19, None, temp)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_every_seed_has_its_own_text_and_proposals_keep_it(seed):
    sampling = Sampling(temp=1.0)
    target, prompt = target_of("grouped"), PROMPTS[19]
    expected = plain("grouped", 19, None, 1.0, seed=seed)
    assert expected != plain("grouped", 19, None, 1.0, seed=7)
    oracle = Oracle(prompt + expected)
    again = decoded(target, prompt, COUNT, ORACLE, sampling, (oracle,), seed=seed)
    assert again == expected


@pytest.mark.parametrize(
    ("kind", "plan", "temp", "option"),
    [
        ("ngram", "none", 0.0, None),
        ("oracle", ORACLE, 0.7, "windowed_repetition"),
        ("fused", MIXED, 1.0, None),
        ("deferred", "streams:2x2x1,oracle:3x1", 0.7, None),
    ],
)
def test_compiled_passes_give_the_same_text(kind, plan, temp, option):
    check("grouped", kind, plan, 19, temp, option, compile=True)


def test_compiled_passes_survive_a_growing_cache():
    """Buffers grow in the middle: the traced pass must not go on with the old ones."""
    target, prompt = target_of("grouped"), text_of(250)
    expected = decoded(target, prompt, 30)
    oracle = Oracle(prompt + expected)
    assert decoded(target, prompt, 30, ORACLE, None, (oracle,), compile=True) == expected


def test_a_cache_that_grows_in_mid_pass_changes_nothing():
    target, prompt = target_of("sliding"), text_of(245)
    expected = decoded(target, prompt, 60)
    for kind in STREAM_KINDS:
        proposers = (Oracle(prompt + expected), StreamProposer(streams_of("sliding", kind)))
        plan = "oracle:4x1,streams:2x2x1"
        assert decoded(target, prompt, 60, plan, None, proposers) == expected


def test_plans_may_change_from_pass_to_pass():
    target, prompt = target_of("grouped"), PROMPTS[19]
    expected = plain("grouped", 19, None, 0.7)
    plans = ["none", MIXED, NGRAM, TREE, "oracle:3x2x1", "streams:1"]

    class Changing:
        turn = 0

        def plan(self):
            self.turn += 1
            return TreePlan.parse(plans[self.turn % len(plans)])

        def observe(self, plan, report):
            assert set(report.owners) <= {*plan.owners}

    for kind in STREAM_KINDS:
        proposers = proposers_for("grouped", kind, 19, expected)
        tokens: list[int] = []
        decoder, cache = Decoder(target, proposers), filled(target, prompt[:-1])
        for report in decoder.decode(prompt, cache, Changing(), Sampling(temp=0.7), 5):
            tokens += report.tokens
            if len(tokens) >= COUNT:
                break
        assert tokens[:COUNT] == expected


@pytest.mark.parametrize("name", ["grouped", "sliding", "smollm3"])
def test_sampled_text_is_what_the_definition_says(name):
    """The token at position s is argmax(log p / temp + Gumbel(seed, s)), p from mlx-lm's model."""
    target, text, temp, seed = target_of(name), text_of(19), 0.7, 5
    said = decoded(target, text, 12, NGRAM, Sampling(temp=temp), (NgramLookup(1),), seed=seed)
    for token in said:
        scores = target.model(mx.array([text]))[0, -1] / temp
        key = mx.array([seed, len(text)], dtype=mx.uint32)
        assert token == mx.argmax(scores + mx.random.gumbel(scores.shape, key=key)).item()
        text = [*text, token]


def test_sampling_leaves_mlxs_random_state_alone():
    mx.random.seed(123)
    before = [array.tolist() for array in mx.random.state]
    check("grouped", "fused", MIXED, 19, 1.0, "all")
    assert [array.tolist() for array in mx.random.state] == before


@pytest.mark.parametrize("name", HALF)
@pytest.mark.parametrize(("kind", "plan"), [("ngram", NGRAM), *((k, TREE) for k in STREAM_KINDS)])
@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_half_precision_targets_with_float32_streams(name, kind, plan, temp):
    check(name, kind, plan, 19, temp)


@pytest.mark.parametrize("name", HALF)
def test_fused_streams_leave_the_main_rows_in_the_targets_dtype(name):
    target = target_of(name)
    cache = filled(target, text_of(20))
    streams = streams_of(name, "fused")
    layout = TreePlan.parse(TREE).layout
    tokens = mx.array(text_of(len(layout), seed=3))
    length = mx.array(cache.length)
    runs = [model.forward(tokens, cache.kv, layout, length, 64) for model in (target, streams)]
    assert runs[0].hidden.dtype == runs[1].hidden.dtype == target.dtype
    assert mx.array_equal(runs[0].hidden, runs[1].hidden)
