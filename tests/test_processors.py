"""Penalties, filters and bias against mlx-lm's own, row by row."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    make_logits_processors,
)
from tiny import Oracle, decoded, reports, target_of, text_of

from mlx_specstream.decode.noise import gumbel_rows
from mlx_specstream.decode.processors import Sampling, choose, penalised, window_counts
from mlx_specstream.decode.proposers import NgramLookup
from mlx_specstream.errors import UsageError
from mlx_specstream.target import TreeLayout

LAYOUT = TreeLayout([-1, 0, 1, 2, 1, 0, 5, 6])
PENALTIES = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.8, "repetition_context_size": 3},
    {"repetition_penalty": 1.3, "repetition_context_size": 0},
    {"presence_penalty": 0.7},
    {"presence_penalty": -0.7, "presence_context_size": 2},
    {"frequency_penalty": 0.6, "frequency_context_size": 4},
    {"frequency_penalty": 0.6, "frequency_context_size": 0},
    {"logit_bias": {3: 4.5, 7: -100.0}},
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_context_size": 5,
        "logit_bias": {0: -2.0, 9: 1.0},
    },
]


def few_tokens(count: int, seed: int) -> list[int]:
    """Tokens out of a small part of the vocabulary: everything repeats."""
    return np.random.default_rng(seed).integers(0, 9, count).tolist()


def by_mlx_lm(options: dict, logits: np.ndarray, history: list[int]) -> np.ndarray:
    """One row through mlx-lm's processors. Its slice ``[-0:]`` is the whole history, too."""
    row = mx.array(logits[None])
    for processor in make_logits_processors(**options):
        row = processor(mx.array(history), row)
    return np.array(row)[0]


@pytest.mark.parametrize("prompt", [1, 2, 19, 40])
@pytest.mark.parametrize("options", PENALTIES, ids=str)
def test_every_row_is_penalised_by_its_own_history_prompt_included(options, prompt):
    text, tokens = few_tokens(prompt, 1), few_tokens(len(LAYOUT), 2)
    tokens[0] = text[-1]
    logits = np.random.default_rng(3).normal(0, 3, (len(LAYOUT), 12)).astype(np.float32)
    # What follows the newest token in the buffer is rubbish and must not be looked at.
    history = mx.array(text + [11] * 30, dtype=mx.int32)
    ours = penalised(
        mx.array(logits),
        Sampling(**options),
        history,
        mx.array(prompt - 1),
        mx.array(tokens, dtype=mx.int32),
        LAYOUT,
    )
    for row in range(len(LAYOUT)):
        path = [tokens[node] for node in LAYOUT.paths[row][1 : LAYOUT.depth[row] + 1]]
        expected = by_mlx_lm(options, logits[row], text + path)
        assert np.abs(np.array(ours)[row] - expected).max() < 1e-5
    assert np.abs(np.array(ours) - logits).max() > 0.1


@pytest.mark.parametrize("window", [0, 1, 4, 50])
def test_counts_of_a_window_are_what_counting_gives(window):
    text, tokens = few_tokens(9, 4), few_tokens(len(LAYOUT), 5)
    tokens[0] = text[-1]
    history, rows = mx.array(text + [8] * 9, dtype=mx.int32), mx.array(tokens, dtype=mx.int32)
    blank = mx.zeros((len(LAYOUT), 9))
    counts = window_counts(blank, window, history, mx.array(8), rows, LAYOUT).tolist()
    for row in range(len(LAYOUT)):
        path = [tokens[node] for node in LAYOUT.paths[row][1 : LAYOUT.depth[row] + 1]]
        seen = (text + path)[-window:]
        assert counts[row] == [seen.count(token) for token in range(9)]


FILTERS = [
    ({"top_p": 0.3}, lambda x: apply_top_p(x, 0.3)),
    ({"top_p": 0.95}, lambda x: apply_top_p(x, 0.95)),
    ({"top_p": 0.001}, lambda x: apply_top_p(x, 0.001)),
    ({"min_p": 0.2}, lambda x: apply_min_p(x, 0.2)),
    ({"top_k": 1}, lambda x: apply_top_k(x, 1)),
    ({"top_k": 5}, lambda x: apply_top_k(x, 5)),
    (
        {"top_p": 0.9, "min_p": 0.05, "top_k": 4},
        lambda x: apply_top_k(apply_min_p(apply_top_p(x, 0.9), 0.05), 4),
    ),
]


@pytest.mark.parametrize("temp", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(("options", "theirs"), FILTERS, ids=lambda v: str(v)[:40])
def test_sampling_chooses_from_mlx_lms_set_by_its_law(options, theirs, temp):
    logits = mx.random.normal((6, 20), scale=2, key=mx.random.key(1))
    kept = np.array(theirs(logits - mx.logsumexp(logits, axis=-1, keepdims=True)))
    for row in range(6):
        noise = gumbel_rows(mx.array(3, mx.uint32), mx.array(1000 * row), 300, 20)
        rows = mx.broadcast_to(logits[row], (300, 20))
        ours = np.array(choose(rows, Sampling(temp=temp, **options), noise))
        # The Gumbel trick on mlx-lm's filtered logits, with the same noise, by hand.
        expected = (kept[row][None] / temp + np.array(noise)).argmax(axis=-1)
        assert (ours == expected).all()
        allowed = set(np.flatnonzero(np.isfinite(kept[row])))
        assert set(ours.tolist()) <= allowed and len(allowed) < 20


def test_no_filter_keeps_every_token():
    logits = mx.zeros((4000, 8))
    noise = gumbel_rows(mx.array(3, mx.uint32), mx.array(0), 4000, 8)
    for options in ({}, {"top_p": 1.0}, {"top_k": 8}, {"top_k": 50}):
        counts = np.bincount(np.array(choose(logits, Sampling(temp=1.0, **options), noise)))
        assert counts.size == 8 and abs(counts - 500).max() < 110


def test_greedy_takes_the_most_likely_token_and_needs_no_noise():
    logits = mx.random.normal((6, 20), key=mx.random.key(1))
    assert choose(logits, Sampling(), None).tolist() == np.array(logits).argmax(-1).tolist()


@pytest.mark.parametrize(
    "bad",
    [
        {"temp": -0.1},
        {"temp": float("nan")},
        {"temp": float("inf")},
        {"temp": 1e-40},  # 1 / temp is not finite in float32
        {"temp": 1e300},  # and here 0, which would let filtered tokens in again
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: float("inf")}},
        {"top_p": 1.1},
        {"top_p": -0.1},
        {"min_p": 2.0},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_context_size": -1},
        {"presence_context_size": -1},
        {"frequency_context_size": -2},
    ],
    ids=str,
)
def test_values_out_of_range_are_usage_errors_that_name_the_option(bad):
    with pytest.raises(UsageError, match=f"{next(iter(bad))} cannot be") as refusal:
        Sampling(**bad)
    assert refusal.value.exit_code == 2


def test_the_signature_tells_apart_what_a_traced_pass_depends_on():
    same = Sampling(temp=0.5, seed=1).signature == Sampling(temp=0.5, seed=2).signature
    assert same
    options = [{}, *PENALTIES, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"temp": 1.0}]
    signatures = [Sampling(**option).signature for option in options]
    assert len(set(signatures)) == len(signatures)


# mlx-lm's plain loop as the judge ----------------------------------------------------------------


def by_generate_step(name: str, prompt: list[int], count: int, options: dict) -> list[int]:
    processors = make_logits_processors(**options)
    steps = generate_step(
        mx.array(prompt), target_of(name).model, max_tokens=count, logits_processors=processors
    )
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("prompt", [1, 19])
@pytest.mark.parametrize("options", [{}, *PENALTIES], ids=str)
def test_greedy_text_equals_mlx_lms_plain_loop_with_the_same_processors(options, prompt):
    """mlx-lm's own speculative loop leaves the prompt out of the history (its 19-token bug)."""
    target, tokens, sampling = target_of("grouped"), text_of(prompt), Sampling(**options)
    expected = by_generate_step("grouped", tokens, 30, options)
    assert decoded(target, tokens, 30, "none", sampling) == expected
    lookup, oracle = NgramLookup(min_length=1), Oracle(tokens + expected)
    made = reports(target, tokens, 30, "oracle:3x2x1,ngram:2", sampling, (lookup, oracle))
    assert [token for report in made for token in report.tokens][:30] == expected
    assert len(made) < 20


def test_text_across_a_sliding_windows_wrap_equals_mlx_lms_plain_loop():
    """mlx-lm's own speculative loop corrupts a rotating cache that wraps (window 8, 60 tokens)."""
    target = target_of("sliding")
    for prompt in (text_of(1), text_of(5), text_of(19)):
        expected = by_generate_step("sliding", prompt, 60, {})
        assert decoded(target, prompt, 60) == expected
        proposers = (NgramLookup(min_length=1), Oracle(prompt + expected))
        made = reports(target, prompt, 60, "ngram:2,oracle:3x2x1", None, proposers)
        assert [token for report in made for token in report.tokens][:60] == expected
        assert len(made) < 40
