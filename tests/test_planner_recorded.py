"""The planner on recorded answers of the default model, at published costs: never much slower."""

from __future__ import annotations

import pytest

from mlx_specstream.benchmarking.chips import published
from mlx_specstream.benchmarking.recording import Recording, shipped
from mlx_specstream.benchmarking.simulation import simulate


@pytest.mark.parametrize("name", sorted(published()))
def test_no_answer_gets_much_slower(name):
    path = shipped()
    assert path is not None
    recording = Recording.load(path)
    answers = simulate(recording, published()[name].curve(recording)).planned
    assert min(answer.speedup for answer in answers) > 0.95
