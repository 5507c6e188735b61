"""The law of what is emitted, enumerated exactly on a toy of three tokens.

Gumbel noise picks ``argmin_v e_v / p_v`` with independent exponentials e. For
three tokens only the direction of e matters, which is uniform on a triangle, and every question
asked of it (which token wins under p, in which order q ranks them) is a set of lines through
the triangle's corners. Cutting the triangle along all of them leaves cells in which every answer
is constant; their areas are the exact probabilities of the joint answers.
"""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest
from toy import plan_of, verdict

from mlx_specstream.decode.plan import TreePlan

V = 3
RNG = np.random.default_rng(7)
# p[context] is the target's law after the tokens in context; q the proposer's (a bad one).
CONTEXTS = [c for n in range(3) for c in itertools.product(range(V), repeat=n)]
P = {context: RNG.dirichlet(np.ones(V)) for context in CONTEXTS}
Q = {context: RNG.dirichlet(np.ones(V)) for context in CONTEXTS}

# Exact integration over one position's noise ----------------------------------------------------


def cut(polygon: np.ndarray, line: np.ndarray) -> list[np.ndarray]:
    """The parts of a convex polygon on either side of ``line @ x = 0``."""
    sides = polygon @ line
    parts: tuple[list, list] = ([], [])
    for here, there, a, b in zip(
        polygon, np.roll(polygon, -1, axis=0), sides, np.roll(sides, -1), strict=True
    ):
        for part, sign in zip(parts, (1, -1), strict=True):
            if sign * a >= 0:
                part.append(here)
            if a * b < 0:
                part.append(here + (there - here) * (a / (a - b)))
    return [np.array(part) for part in parts if len(part) > 2 and area(np.array(part)) > 0]


def area(polygon: np.ndarray) -> float:
    """Share of the triangle; coordinates sum to one, so two of them span it."""
    x, y = polygon[:, 0], polygon[:, 1]
    return abs(x @ np.roll(y, -1) - y @ np.roll(x, -1))


def cells(laws: tuple[tuple[float, ...], ...]) -> list[tuple[float, np.ndarray]]:
    """(probability, exponentials inside) of the cells in which the laws' rankings are constant."""
    polygons = [np.eye(V)]
    for law in laws:
        for i, j in itertools.combinations(range(V), 2):
            line = np.zeros(V)
            line[i], line[j] = 1 / law[i], -1 / law[j]
            polygons = [part for polygon in polygons for part in cut(polygon, line)]
    return [(area(polygon), polygon.mean(axis=0)) for polygon in polygons]


@cache
def noise_cells(depth: int) -> list[tuple[float, np.ndarray]]:
    """Cells for the laws of every context of a length, target's and proposer's."""
    at = [c for c in CONTEXTS if len(c) == depth]
    return cells(tuple(tuple(law[c]) for c in at for law in (P, Q)))


def ranked(law: np.ndarray, exponentials: np.ndarray) -> list[int]:
    """Tokens in the order in which the noise makes them win."""
    return np.argsort(exponentials / law).tolist()


def one_pass(plan: TreePlan, past: tuple[int, ...], noise: list, coupled: bool) -> list[int]:
    """What a pass emits after ``past``; ``noise[d]`` is for the position d further on."""
    (branch,) = plan.branches
    contexts, tokens = [past], [0]
    for node, parent in enumerate(branch.parents):
        above = contexts[parent + 1]
        shaken = noise[len(above) - len(past)] if coupled else np.ones(V)
        tokens.append(ranked(Q[above], shaken)[branch.ranks[node]])
        contexts.append((*above, tokens[-1]))
    said = [ranked(P[c], noise[len(c) - len(past)])[0] if len(c) < 2 else 0 for c in contexts]
    return verdict(plan, tuple(tokens), tuple(said))


def law_of_two(plan: TreePlan, coupled: bool, keyed_by: str) -> tuple[np.ndarray, float]:
    """The law of the first two tokens, and the tokens the first pass accepts on average."""
    law, accepted = np.zeros((V, V)), 0.0
    for (weight1, e1), (weight2, e2) in itertools.product(noise_cells(0), noise_cells(1)):
        weight = weight1 * weight2
        noise = [e1, e2, e2] if keyed_by == "position" else [e1, e1, e1]
        out = one_pass(plan, (), noise, coupled)
        accepted += weight * (len(out) - 1)
        if len(out) == 1:  # another pass says the second; a pass counter brings it e2, too
            out = [*out, *one_pass(TreePlan((plan.branches[0],)), tuple(out), [e2, e2, e2], False)]
        law[out[0], out[1]] += weight
    return law, accepted


TRUE = np.array([[P[()][a] * P[(a,)][b] for b in range(V)] for a in range(V)])
SHAPES = [(1,), (2,), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3)]


def distance(law: np.ndarray, true: np.ndarray) -> float:
    return 0.5 * np.abs(law - true).sum()


def test_the_cells_areas_are_the_tokens_probabilities():
    for depth in (0, 1):
        assert abs(sum(weight for weight, _ in noise_cells(depth)) - 1) < 1e-13
        for context in (c for c in CONTEXTS if len(c) == depth):
            wins = np.zeros(V)
            for weight, exponentials in noise_cells(depth):
                wins[ranked(P[context], exponentials)[0]] += weight
            assert np.abs(wins - P[context]).max() < 1e-13


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("widths", SHAPES)
def test_position_keyed_sampling_emits_exactly_the_targets_law(widths, coupled):
    law, _ = law_of_two(plan_of(widths), coupled, "position")
    assert distance(law, TRUE) < 1e-12


@pytest.mark.parametrize("widths", [(1,), (2, 1), (3, 2)])
def test_noise_keyed_by_the_pass_would_not(widths):
    law, _ = law_of_two(plan_of(widths), False, "pass")
    assert distance(law, TRUE) > 0.02


@pytest.mark.parametrize("widths", [(1,), (2,), (1, 1), (2, 2)])
def test_acceptance_is_the_sum_of_the_proposed_paths_probabilities(widths):
    expected = 0.0
    for first in ranked(Q[()], np.ones(V))[: widths[0]]:
        expected += P[()][first]
        for second in ranked(Q[(first,)], np.ones(V))[: (*widths, 0)[1]]:
            expected += P[()][first] * P[(first,)][second]
    assert abs(accepted_exactly(plan_of(widths)) - expected) < 1e-12


def accepted_exactly(plan: TreePlan) -> float:
    return law_of_two(plan, False, "position")[1]


def test_a_coupled_proposal_is_accepted_as_often_as_the_theory_says():
    """Two Gumbel samples under one noise agree on j with 1 / sum_i max(p_i/p_j, q_i/q_j)."""
    p, q = P[()], Q[()]
    agree = sum(1 / np.maximum(p / p[j], q / q[j]).sum() for j in range(V))
    accepted = law_of_two(plan_of((1,)), True, "position")[1]
    assert abs(accepted - agree) < 1e-12
    apart = distance(p, q)
    assert (1 - apart) / (1 + apart) <= accepted <= 1 - apart  # Daliri et al., 2408.07978


# Rejection sampling, the classic rule ------------------------------------------------------------


def rejection_law(p: np.ndarray, candidates: list[tuple[float, int]], q: np.ndarray) -> np.ndarray:
    """Leviathan's rule: accept x with min(1, p/q), else sample from max(p - q, 0), normalised."""
    left = np.maximum(p - q, 0)
    left = left / left.sum()
    law = np.zeros(V)
    for weight, x in candidates:
        keep = min(1.0, p[x] / q[x])
        law[x] += weight * keep
        law += weight * (1 - keep) * left
    return law


def test_rejection_is_exact_for_sampled_candidates_and_biased_for_the_likeliest():
    worst = 0.0
    for context in CONTEXTS:
        p, q = P[context], Q[context]
        sampled = [(q[x], x) for x in range(V)]
        assert distance(rejection_law(p, sampled, q), p) < 1e-12
        likeliest = [(1.0, int(q.argmax()))]
        worst = max(worst, distance(rejection_law(p, likeliest, q), p))
    assert worst > 0.2
