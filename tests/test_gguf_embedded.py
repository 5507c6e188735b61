"""The default model out of its GGUF file: exact values, its text, its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer
from tiny_gguf import greedy

from mlx_specstream import embedded

PROSE = (
    "The old harbour had been quiet for years, and the fishermen who remained spoke of it as one "
    "speaks of a friend who has moved away. Every morning Anna walked along the stone pier, "
    "counted the boats, and wrote the number in a small blue book. Some days there were twelve, "
    "some days only seven. She never asked herself why she did it. Her father had done the same, "
    "and his father before him, and the books filled a whole shelf above the kitchen table. In "
    "the winter of the great storm the number was zero for nine days, and on the tenth a single "
    "sail appeared behind the lighthouse, torn and grey, but moving steadily towards the shore."
)


def dequantized(weights: dict[str, mx.array], name: str, bits: int) -> np.ndarray:
    values = mx.dequantize(
        weights[f"{name}.weight"],
        weights[f"{name}.scales"],
        weights[f"{name}.biases"],
        group_size=32,
        bits=bits,
    )
    return np.array(values)


def load_weights(folder: Path) -> dict[str, mx.array]:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    return weights


@pytest.mark.parametrize(
    "text",
    [
        "What is the capital of France?",
        "In 1984 there were 12,345.67 of them; 007 & 3.14159 too.",
        "def f(x: int) -> str:\n    return f'{x!r}'  # a\tcomment\n\n\n",
        "Ça, c'est l'été à Genève; señor Müller søker smørbrød.",
        "👋🏽 emoji 🤖, 中文字符, русский, हिन्दी, العربية",
        "  leading, trailing   and\r\nwindows\r\n lines  ",
        '{"a": [1, 2, {"b": null}], "c": "\\u00e9"}',
        "²³ ½ Ⅷ ٣",
        "\x00\x07 control",
        "<|im_start|>user\nHi<|im_end|>\n",
        "",
    ],
)
def test_text_survives_the_tokenizer(embedded_model: Path, text: str):
    tokenizer = load_tokenizer(embedded_model)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_digits_are_split_and_special_tokens_are_single(embedded_model: Path):
    tokenizer = load_tokenizer(embedded_model)
    assert [tokenizer.decode(t) for t in tokenizer.encode("2026")] == ["2", "0", "2", "6"]
    assert tokenizer.encode("<|im_start|>x<|im_end|>")[::2] == [1, 2]
    assert tokenizer.eos_token_ids == {2} and tokenizer.bos_token_id == 1


def test_embedded_weights_are_exactly_the_gguf_values(embedded_model: Path):
    source = embedded.find_gguf()
    assert source is not None
    weights = load_weights(embedded_model)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(source).tensors}
    assert len(weights) == len(tensors) + 2 * 211

    def original(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    def exact(theirs: str, ours: str, bits: int, heads: int = 0):
        value = original(theirs)
        if heads:
            value = value.reshape(heads, 32, 2, -1).transpose(0, 2, 1, 3).reshape(value.shape)
        np.testing.assert_array_equal(dequantized(weights, ours, bits), value, err_msg=ours)

    exact("token_embd", "model.embed_tokens", 8)
    for i in (0, 29):
        layer = f"model.layers.{i}"
        exact(f"blk.{i}.attn_q", f"{layer}.self_attn.q_proj", 4, heads=9)
        exact(f"blk.{i}.attn_k", f"{layer}.self_attn.k_proj", 4, heads=3)
        exact(f"blk.{i}.attn_v", f"{layer}.self_attn.v_proj", 4)
        exact(f"blk.{i}.attn_output", f"{layer}.self_attn.o_proj", 4)
        exact(f"blk.{i}.ffn_gate", f"{layer}.mlp.gate_proj", 4)
        exact(f"blk.{i}.ffn_up", f"{layer}.mlp.up_proj", 4)
        exact(f"blk.{i}.ffn_down", f"{layer}.mlp.down_proj", 4)
        norm = weights[f"{layer}.input_layernorm.weight"]
        np.testing.assert_array_equal(np.array(norm), original(f"blk.{i}.attn_norm"))


@pytest.fixture(scope="module")
def dequantized_model(embedded_model: Path):
    model, tokenizer = (
        dequantize_model(load_model(embedded_model)[0]),
        load_tokenizer(embedded_model),
    )
    mx.eval(model.parameters())
    return model, tokenizer


def test_the_embedded_model_knows_the_capital_of_france(dequantized_model):
    model, tokenizer = dequantized_model
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
    )
    answer = greedy(model, prompt, 8)
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_quantized_and_dequantized_forms_agree_on_perplexity_and_greedy_text(
    embedded_model: Path, dequantized_model
):
    """One pass of the slow 4-bit kernel judges both: rows 0..133 prose, then a greedy text.

    Each of its rows names the same next token as the text has, so its own greedy text from the
    prose is that text.
    """
    plain, tokenizer = dequantized_model
    quantized, _ = load_model(embedded_model)
    prose = tokenizer.encode(PROSE)
    tokens = prose + greedy(plain, prose, 32)

    def run(model: nn.Module) -> tuple[float, mx.array]:
        logits = model(mx.array([tokens]))[0]
        losses = nn.losses.cross_entropy(logits[: len(prose) - 1], mx.array(prose[1:]))
        return float(mx.exp(losses.mean())), logits[len(prose) - 1 : -1]

    (perplexity, _), (quantized_perplexity, logits) = run(plain), run(quantized)
    assert len(prose) == 134
    assert perplexity == pytest.approx(29.8256, rel=1e-4)
    assert quantized_perplexity == pytest.approx(perplexity, rel=1e-4)
    top_two = mx.topk(logits, 2, axis=-1)
    margins = np.array(mx.abs(top_two[:, 0] - top_two[:, 1]))
    chosen = mx.argmax(logits, axis=-1).tolist()
    assert chosen == tokens[len(prose) :], f"smallest top-two margin: {margins.min()}"


def test_repacked_config_is_valid_json(embedded_model: Path):
    config = json.loads((embedded_model / "config.json").read_text())
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 30
    assert config["quantization"]["model.embed_tokens"] == {"group_size": 32, "bits": 8}
