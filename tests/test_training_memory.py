"""The bound on the memory of training, held against measured peaks."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from tiny import build

from mlx_specstream.streams import StreamsConfig, make_streams
from mlx_specstream.streams.files import identify
from mlx_specstream.target import Target
from mlx_specstream.training.corpus import Corpus, Text
from mlx_specstream.training.memory import training_memory
from mlx_specstream.training.plan import Plan
from mlx_specstream.training.trainer import Trainer
from mlx_specstream.training.trunk import TrunkCache

SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("kind", "sizes", "plan", "length", "layers"),
    [
        ("deferred", (256, 768, 2048, False), (4, 32), 200, 3),
        ("deferred", (256, 768, 2048, True), (4, 32), 200, 3),
        ("deferred", (128, 512, 2048, False), (2, 64), 600, 3),
        ("fused", (256, 512, 4096, False), (1, 16), 900, 2),
        ("linear", (256, 768, 8192, False), (4, 32), 200, 1),
    ],
)
def test_a_step_takes_what_the_bound_says_and_not_much_less(
    kind, sizes, plan, length, layers, tmp_path: Path
):
    hidden, mlp, vocabulary, quantize = sizes
    shape = {"hidden_size": hidden, "intermediate_size": mlp, "vocab_size": vocabulary,
             "head_dim": hidden // 8, **SHAPE}  # fmt: skip
    target = Target.of(build(quantize=quantize, **shape))
    chance = np.random.default_rng(0)
    texts = [Text(chance.integers(0, vocabulary, length).astype(np.int32), 8, "")] * 8
    method = "linear" if kind == "linear" else "attention"
    mode = "deferred" if kind == "deferred" else "fused"
    config = StreamsConfig(method, 3, mode, layers, 16, 64, 32, tuple(range(2048)))
    heads = make_streams(config, target)
    steps = Plan(texts=plan[0], anchors=plan[1], held_out=1)
    trunk = TrunkCache(
        tmp_path / "trunk", target, Corpus(tuple(texts), "h"), layers * (method == "attention")
    )
    trunk.build()
    trainer = Trainer(heads, trunk, steps, tmp_path / "out", identify(target))
    trainer.step()  # makes the optimizer's state and the draft embeddings
    mx.clear_cache()
    bound = training_memory(heads, steps, length)
    # Other tests' models are alive too: what this step adds, and what it found of its own.
    found = mx.get_active_memory()
    mx.reset_peak_memory()
    trainer.step()
    peak = mx.get_peak_memory() - found + bound.target + bound.streams * 3 // 5 + bound.draft
    assert 0.55 * bound.total < peak <= bound.total
