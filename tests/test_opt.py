"""OPT, our own definition: transformers' logits (Llama's too), and checkpoints as published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.utils import load_model
from tiny import decoded, filled, run_tree, target_of, text_of

from mlx_specstream import SpecStreamError, load, stream_generate
from mlx_specstream.target import Target, TreeLayout
from mlx_specstream.target.families import model_classes

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-4


def golden(name: str):
    """A checkpoint that transformers wrote, in float32, with its tokens and logits."""
    model, _ = load_model(GOLDEN / name, get_model_classes=model_classes)
    model.set_dtype(mx.float32)
    expected = mx.load(str(GOLDEN / name / "expected.safetensors"))
    return model, expected["tokens"].tolist(), np.array(expected["logits"])


@pytest.mark.parametrize("name", ["opt", "opt-norms-after", "llama3"])
def test_logits_are_those_of_transformers(name):
    model, tokens, expected = golden(name)
    assert np.abs(np.array(model(mx.array([tokens]))[0]) - expected).max() < TOLERANCE
    target = Target.of(model)
    cache = filled(target, tokens[:30])
    output = run_tree(target, cache, tokens[30:], TreeLayout.chain(len(tokens) - 31))
    ours = np.array(target.logits(output.hidden))
    assert np.abs(ours - expected[30:]).max() < TOLERANCE
    assert expected.std() > 1  # else a wrong model would be close, too


@pytest.fixture
def checkpoint(tmp_path: Path, embedded_model: Path) -> Path:
    """The golden OPT with a tokenizer, as one would download it."""
    folder = shutil.copytree(GOLDEN / "opt", tmp_path / "opt")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded_model / name, folder)
    return folder


def configure(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_checkpoint_loads_and_its_head_is_tied(checkpoint):
    model, _ = load(checkpoint, dtype="float32")
    _, tokens, expected = golden("opt")
    assert np.abs(np.array(model(mx.array([tokens]))[0]) - expected).max() < TOLERANCE
    assert Target.of(model).context == 64


def test_names_without_their_first_part_and_a_stored_head_load_too(checkpoint):
    file = checkpoint / "model.safetensors"
    weights = {name.removeprefix("model."): value for name, value in mx.load(str(file)).items()}
    assert all(name.startswith("decoder.") for name in weights)
    weights["lm_head.weight"] = weights["decoder.embed_tokens.weight"]
    mx.save_safetensors(str(file), weights)
    before = golden("opt")[0].parameters()
    after = load(checkpoint, dtype="float32")[0].parameters()
    assert mx.array_equal(
        before["model"]["layers"][1]["mlp"]["up_proj"]["bias"],
        after["model"]["layers"][1]["mlp"]["up_proj"]["bias"],
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"word_embed_proj_dim": 16}, "projected embeddings.*16.*32.*opt-350m"),
        ({"activation_function": "gelu"}, "'gelu' in place of relu"),
    ],
)
def test_what_our_definition_lacks_is_refused_before_weights_are_read(checkpoint, changes, message):
    configure(checkpoint, **changes)
    (checkpoint / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(SpecStreamError, match=message):
        load(checkpoint)


def test_a_text_up_to_the_last_position_is_the_same_with_proposals(checkpoint):
    model, tokenizer = load(checkpoint)
    prompt = golden("opt")[1][:20]
    texts = [
        [r.token for r in stream_generate(model, tokenizer, prompt, -1, compile=False, **how)]
        for how in ({"speculation": False}, {"tree": "ngram:6"}, {"tree": "ngram:2x2"})
    ]
    assert len(texts[0]) == 64 - 20
    assert texts[1] == texts[2] == texts[0]


@pytest.mark.parametrize("name", ["opt", "opt_norms_after"])
def test_mlx_lms_own_loop_writes_the_same_text(name):
    target, prompt = target_of(name), text_of(19)
    steps = generate_step(mx.array(prompt), target.model, max_tokens=30)
    theirs = [int(token) for token, _ in steps]
    assert decoded(target, prompt, 30) == theirs


def test_rows_of_a_padded_batch_have_their_own_positions():
    model = target_of("opt").model
    long, short = text_of(9), text_of(6, seed=2)
    caches = [BatchKVCache([0, 3]) for _ in model.layers]
    together = model(mx.array([long, [0, 0, 0, *short]]), caches)
    for row, text in enumerate((long, short)):
        alone = model(mx.array([text]))[0]
        np.testing.assert_allclose(
            np.array(together[row, -len(text) :]), np.array(alone), atol=TOLERANCE
        )


def test_proposals_beyond_the_last_position_read_nothing_outside():
    model, tokens, _ = golden("opt")
    target = Target.of(model)
    text = (tokens + tokens)[:63]
    cache = filled(target, text)
    rows = [tokens[0], *range(8)]
    logits = np.array(target.logits(run_tree(target, cache, rows, TreeLayout.chain(8)).hidden))
    alone = np.array(model(mx.array([[*text, tokens[0]]]))[0, -1])
    assert np.abs(logits[0] - alone).max() < TOLERANCE
    assert np.isfinite(logits).all()
