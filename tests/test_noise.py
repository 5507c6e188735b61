"""Position-keyed noise: Gumbel, independent, and a pure function of seed and position."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_specstream.decode.noise import fresh_seed, gumbel_rows, seed_key
from mlx_specstream.decode.processors import rows_of_noise
from mlx_specstream.target import TreeLayout

VOCAB = 512


def noise(seed: int, first: int = 0, count: int = 200, vocab: int = VOCAB) -> np.ndarray:
    rows = gumbel_rows(mx.array(seed, mx.uint32), mx.array(first, mx.int32), count, vocab)
    return np.array(rows, dtype=np.float64)


def uniform(gumbel: np.ndarray) -> np.ndarray:
    return np.exp(-np.exp(-gumbel))


def worst_deviation(values: np.ndarray) -> float:
    """Kolmogorov and Smirnov's distance from the uniform law, in units of 1 / sqrt(n)."""
    ordered = np.sort(values.ravel())
    steps = np.arange(1, ordered.size + 1) / ordered.size
    return np.abs(ordered - steps + 0.5 / ordered.size).max() * ordered.size**0.5


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 - 1])
def test_it_is_uniform_when_transformed(seed):
    made = noise(seed)
    assert np.isfinite(made).all()
    assert worst_deviation(uniform(made)) < 2.2  # chance 1e-4
    assert worst_deviation(uniform(made[:, 7])) < 2.2  # one token over the positions
    assert worst_deviation(uniform(made[7])) < 2.2  # one position over the tokens


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """In units of its standard deviation for independent values."""
    return abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * a.size**0.5


def test_positions_seeds_and_tokens_are_independent():
    made = uniform(noise(3, count=201))
    for lag in (1, 2, 100):
        assert correlation(made[:-lag], made[lag:]) < 4.5
        assert correlation(made[:, :-lag], made[:, lag:]) < 4.5
    for other in (2, 4, 3 + (1 << 16), 3 + (1 << 31)):
        assert correlation(made, uniform(noise(other, count=201))) < 4.5
    # Swapping seed and position must not give the same noise either.
    assert correlation(uniform(noise(3, first=9, count=1)), uniform(noise(9, 3, count=1))) < 4.5


def test_winners_of_neighbouring_positions_are_independent():
    wins = noise(8, count=8001, vocab=4).argmax(axis=1)
    table = np.zeros((4, 4))
    np.add.at(table, (wins[:-1], wins[1:]), 1)
    assert ((table - 500) ** 2 / 500).sum() < 44.3  # chi-square, 15 degrees, chance 1e-4


def test_it_depends_on_seed_and_position_only():
    whole = noise(5, first=0, count=40)
    for first, count in ((0, 1), (7, 3), (39, 1), (13, 20)):
        assert (noise(5, first, count) == whole[first : first + count]).all()
    assert (noise(5, 0, 40) == whole).all()
    assert (noise(6, 0, 40) != whole).mean() > 0.99


def test_mlxs_random_state_is_neither_read_nor_moved():
    mx.random.seed(1)
    before = [array.tolist() for array in mx.random.state]
    one = noise(5, count=3)
    assert [array.tolist() for array in mx.random.state] == before
    mx.random.seed(2)
    assert (noise(5, count=3) == one).all()


def test_rows_of_a_tree_take_the_noise_of_their_depth():
    by_depth = mx.array(noise(1, count=3, vocab=5))
    layout = TreeLayout([-1, 0, 1, 0, 3])
    spread = np.array(rows_of_noise(by_depth, layout))
    assert (spread == np.array(by_depth)[[0, 1, 2, 1, 2]]).all()
    chain = rows_of_noise(by_depth, TreeLayout.chain(2))
    assert (np.array(chain) == np.array(by_depth)).all()


def test_seeds_of_any_size_fold_into_32_bits():
    seeds = [0, 1, -1, 2**31, 2**32, 2**40, -(2**40), 10**12]
    keys = [seed_key(seed) for seed in seeds]
    assert all(0 <= key < 2**32 for key in keys) and len(set(keys)) == len(seeds)
    assert [seed_key(seed) for seed in (0, 1, 77, 2**32 - 1)] == [0, 1, 77, 2**32 - 1]
    assert 0 <= fresh_seed() < 2**32 and len({fresh_seed() for _ in range(20)}) == 20
