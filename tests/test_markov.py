"""Many runs of a Markov chain through proposals: chi-square on the law of their first tokens."""

from __future__ import annotations

import itertools
from collections import defaultdict
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from toy import plan_of, verdict

from mlx_specstream.decode.noise import gumbel_rows
from mlx_specstream.decode.processors import Sampling, choose

WORDS, EOS, RUNS, SPAN = 5, 4, 5000, 7
LOGITS = np.random.default_rng(3).normal(0, 1.2, (WORDS, WORDS)).astype(np.float32)
DRAFT = np.random.default_rng(4).normal(0, 1.2, (WORDS, WORDS)).astype(np.float32)
SAMPLING = Sampling(temp=0.8, top_k=3)


@cache
def runs_noise() -> np.ndarray:
    """Noise ``(runs, positions, words)``: run r's text sits at positions ``r * SPAN …``."""
    rows = gumbel_rows(mx.array(11, mx.uint32), mx.array(0), RUNS * SPAN, WORDS)
    return np.array(rows).reshape(RUNS, SPAN, WORDS)


def markov_pass(widths, coupled: bool, roots: np.ndarray, noise: np.ndarray) -> list[list[int]]:
    """A pass of every run: what it emits after its root; noise is ``(runs, depths, words)``."""
    plan = plan_of(widths)
    (branch,), depth = plan.branches, plan.layout.depth
    tokens = [roots]
    for node, parent in enumerate(branch.parents):
        scores = DRAFT[tokens[parent + 1]] / SAMPLING.temp
        scores = scores + coupled * noise[:, depth[node + 1] - 1]
        tokens.append(np.argsort(-scores, axis=-1)[:, branch.ranks[node]])
    rows = np.stack(tokens, axis=1)
    logits = mx.array(LOGITS[rows].reshape(-1, WORDS))
    said = choose(logits, SAMPLING, mx.array(noise[:, depth].reshape(-1, WORDS)))
    answers = np.array(said).reshape(rows.shape).tolist()
    pairs = zip(rows.tolist(), answers, strict=True)
    return [verdict(plan, tuple(row), tuple(answer)) for row, answer in pairs]


def simulate(widths, coupled=True, keyed="position") -> tuple[np.ndarray, np.ndarray]:
    """The first three tokens of every run (EOS repeats), and what its first pass accepted."""
    depths = len(widths) + 1
    texts: list[list[int]] = [[0] for _ in range(RUNS)]
    for turn in range(3):
        going = [run for run in range(RUNS) if len(texts[run]) < 4]
        first = np.array([len(texts[run]) for run in going])
        position = first[:, None] + np.arange(depths)
        if keyed == "pass":
            position = np.full_like(position, turn)
        noise = runs_noise()[np.array(going)[:, None], position]
        roots = np.array([texts[run][-1] for run in going])
        emitted = markov_pass(widths, coupled, roots, noise)
        if turn == 0:
            accepted = np.array([len(tokens) - 1 for tokens in emitted])
        for run, tokens in zip(going, emitted, strict=True):
            texts[run] += tokens
    text = np.array([tokens[1:4] for tokens in texts])
    return np.where(np.cumsum(text == EOS, axis=1) > 0, EOS, text), accepted


def truncated() -> np.ndarray:
    """The chain's law after top-k and temperature, in float64."""
    scores = LOGITS.astype(np.float64) / SAMPLING.temp
    kept = scores >= np.sort(scores, axis=-1)[:, -SAMPLING.top_k, None]
    weights = np.where(kept, np.exp(scores), 0)
    return weights / weights.sum(-1, keepdims=True)


def law_of_three() -> np.ndarray:
    p, law = truncated(), np.zeros((WORDS,) * 3)
    end = np.eye(WORDS)[EOS]
    for a, b in itertools.product(range(WORDS), repeat=2):
        after_a = end if a == EOS else p[a]
        law[a, b] = p[0, a] * after_a[b] * (end if EOS in (a, b) else p[b])
    return law


def chi_square_excess(text: np.ndarray) -> float:
    """Chi-square against the law, over its threshold for a chance of 1e-4."""
    law = law_of_three()
    counts: dict = defaultdict(int)
    for row in map(tuple, text.tolist()):
        counts[row] += 1
    assert all(law[row] > 0 for row in counts), "a token that truncation forbids"
    cells = np.argwhere(law * RUNS > 5)
    expected = np.array([law[tuple(cell)] * RUNS for cell in cells])
    observed = np.array([counts[tuple(cell)] for cell in cells])
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(cells) - 1
    assert freedom > 10
    spread = 2 / (9 * freedom)  # Wilson and Hilferty
    return statistic / (freedom * (1 - spread + 3.719 * spread**0.5) ** 3)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("widths", [(1,), (2, 1), (3, 2), (1, 1, 1)])
def test_the_first_three_tokens_follow_the_chains_law(widths, coupled):
    text, _ = simulate(widths, coupled)
    assert chi_square_excess(text) < 1


def test_the_chi_square_notices_noise_keyed_by_the_pass():
    text, _ = simulate((2, 1), coupled=False, keyed="pass")
    assert chi_square_excess(text) > 3


def test_every_tree_gives_the_same_runs():
    one, _ = simulate((1,), coupled=False)
    for widths in ((2, 1), (3, 2)):
        assert (simulate(widths)[0] == one).all()


@pytest.mark.parametrize("widths", [(1,), (2, 1), (3, 2)])
def test_measured_acceptance_is_the_sum_of_the_paths_probabilities(widths):
    _, accepted = simulate(widths, coupled=False)
    p, best = truncated(), np.argsort(-DRAFT, axis=-1)
    expected = 0.0
    for a in best[0, : widths[0]]:
        expected += p[0, a] + sum(p[0, a] * p[a, b] for b in best[a, : (*widths, 0)[1]])
    margin = 4 * accepted.std() / RUNS**0.5
    assert margin < 0.05 and abs(accepted.mean() - expected) < margin
