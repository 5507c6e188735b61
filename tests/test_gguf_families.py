"""GGUF files of other architectures than llama: exact values, and real models where they are."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, qwen2
from mlx_lm.utils import dequantize_model, load, load_model
from tiny_gguf import greedy, repacked, write_family

from mlx_specstream.conversion import gguf as conversion

MODULES = {"qwen2": qwen2, "gemma3": gemma3_text}


@pytest.mark.parametrize("architecture", MODULES)
def test_mlx_lm_runs_the_repacked_model_as_the_original_weights(tmp_path: Path, architecture: str):
    exact = write_family(tmp_path / "tiny.gguf", architecture)
    folder = repacked(tmp_path / "tiny.gguf", tmp_path / "tiny")
    model, config = load_model(folder)
    plain = dequantize_model(load_model(folder)[0])
    module = MODULES[architecture]
    reference = module.Model(module.ModelArgs.from_dict(config))
    reference.load_weights([(n, mx.array(v)) for n, v in exact.items()], strict=False)
    for name, value in tree_flatten(plain.parameters()):
        np.testing.assert_array_equal(np.array(value), exact[name], err_msg=name)
    if architecture == "gemma3":
        reference.sanitize({})  # tells it that its head is tied
    prompt = list(range(40, 60))
    assert greedy(plain, prompt, 12) == greedy(reference, prompt, 12)
    assert len(greedy(model, prompt, 1)) == 1


def test_what_is_packed_and_what_is_expanded(tmp_path: Path):
    write_family(tmp_path / "tiny.gguf", "qwen2")
    folder = repacked(tmp_path / "tiny.gguf", tmp_path / "tiny")
    weights = mx.load(str(folder / "model.safetensors"))
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    layer = "model.layers.0."
    assert {name.removeprefix(layer) for name in packed if name.startswith(layer)} == {
        "self_attn.q_proj",  # Q4_K
        "self_attn.k_proj",  # Q5_K
        "mlp.up_proj",  # Q5_0
    }
    quantization = json.loads((folder / "config.json").read_text())["quantization"]
    assert quantization["bits"] == 4 and f"{layer}self_attn.q_proj" not in quantization
    assert quantization[f"{layer}self_attn.k_proj"] == {"group_size": 32, "bits": 5}
    assert quantization["model.embed_tokens"] == {"group_size": 32, "bits": 8}


def test_gemma_config(tmp_path: Path):
    write_family(tmp_path / "tiny.gguf", "gemma3")
    config = json.loads(
        (repacked(tmp_path / "tiny.gguf", tmp_path / "tiny") / "config.json").read_text()
    )
    expected = {
        "model_type": "gemma3_text",
        "head_dim": 64,
        "query_pre_attn_scalar": 64,
        "sliding_window": 8,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("expand", [False, True])
def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, expand: bool):
    write_family(tmp_path / "tiny.gguf", "qwen2")
    reader = conversion.read(tmp_path / "tiny.gguf")
    planned = conversion.layout(reader, expand)
    tracemalloc.start()
    try:
        for name, array in conversion.weights(reader, expand):
            assert (array.shape, array.nbytes) == planned.pop(name)[1:]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert planned == {}
    size = sum(entry[2] for entry in conversion.layout(reader, expand).values())
    assert peak < size / 2


def real_file(variable: str) -> Path:
    """A real model's GGUF file, by an environment variable: a check on one's own machine."""
    path = Path(os.environ.get(variable, "none"))
    if not path.is_file():
        pytest.skip(f"{variable} names no GGUF file")
    return path


@pytest.mark.parametrize(
    ("variable", "prompt", "says"),
    [
        ("SPECSTREAM_TEST_QWEN2_GGUF", "What is 2+2?", "4"),
        ("SPECSTREAM_TEST_GEMMA3_GGUF", "One, two, three, four,", "five"),
    ],
)
def test_a_real_model_answers(tmp_path: Path, variable: str, prompt: str, says: str):
    source = real_file(variable)
    model, tokenizer = load(str(repacked(source, tmp_path / "real")))
    model = dequantize_model(model)
    ids = tokenizer.encode(prompt)
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert says in tokenizer.decode(greedy(model, ids, 16))
