"""Repacking GGUF: no value changes, and mlx-lm runs the result."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer

from mlx_specstream import embedded
from mlx_specstream.conversion import gguf as conversion
from mlx_specstream.errors import SpecStreamError

PROSE = (
    "The old harbour had been quiet for years, and the fishermen who remained spoke of it as one "
    "speaks of a friend who has moved away. Every morning Anna walked along the stone pier, "
    "counted the boats, and wrote the number in a small blue book. Some days there were twelve, "
    "some days only seven. She never asked herself why she did it. Her father had done the same, "
    "and his father before him, and the books filled a whole shelf above the kitchen table. In "
    "the winter of the great storm the number was zero for nine days, and on the tenth a single "
    "sail appeared behind the lighthouse, torn and grey, but moving steadily towards the shore."
)


def repacked(source: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    conversion.repack(source, folder)
    return folder


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


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    cache = make_prompt_cache(model)
    tokens, rows = list(prompt), prompt
    for _ in range(count):
        logits = model(mx.array([rows]), cache=cache)
        rows = [int(mx.argmax(logits[0, -1]))]
        tokens += rows
    return tokens[len(prompt) :]


# Blocks


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_repacked_blocks_dequantize_to_exactly_the_same_values(kind: Kind, magnitude: float):
    rng = np.random.default_rng(0)
    weight = (magnitude * rng.normal(size=(24, 128))).astype(np.float32)
    blocks = gguf.quants.quantize(weight, kind)
    packed, scales, biases = conversion.repack_blocks(blocks, kind)
    assert packed.dtype == np.uint32 and scales.dtype == biases.dtype == np.float32
    named = {"w.weight": packed, "w.scales": scales, "w.biases": biases}
    arrays = {name: mx.array(value) for name, value in named.items()}
    values = dequantized(arrays, "w", conversion.BITS[kind.name])
    np.testing.assert_array_equal(values, gguf.quants.dequantize(blocks, kind))


def test_unpermute_worked_example():
    rows = np.array([0, 3, 1, 4, 2, 5])[:, None]
    assert conversion.unpermute(rows, 1)[:, 0].tolist() == [0, 1, 2, 3, 4, 5]


def test_unpermuted_rows_give_the_scores_that_interleaved_rope_gives_in_gguf_order():
    rng = np.random.default_rng(1)
    heads, head_dim, hidden, length = 3, 16, 32, 7
    q, k = (rng.normal(size=(heads * head_dim, hidden)).astype(np.float32) for _ in range(2))
    x = mx.array(rng.normal(size=(length, hidden)).astype(np.float32))

    def scores(q: np.ndarray, k: np.ndarray, traditional: bool) -> np.ndarray:
        def rotated(weight: np.ndarray) -> mx.array:
            rows = (x @ mx.array(weight).T).reshape(1, length, heads, head_dim)
            return mx.fast.rope(
                rows.transpose(0, 2, 1, 3),
                head_dim,
                traditional=traditional,
                base=100000.0,
                scale=1.0,
                offset=5,
            )

        return np.array(rotated(q) @ rotated(k).swapaxes(-1, -2))

    # llama.cpp's rope for this architecture turns neighbouring rows, mlx-lm's turns halves.
    in_gguf = scores(q, k, traditional=True)
    ours = scores(conversion.unpermute(q, heads), conversion.unpermute(k, heads), False)
    np.testing.assert_allclose(ours, in_gguf, rtol=1e-4, atol=1e-3)


# Whole tiny models


@pytest.mark.parametrize(
    ("kind", "embedding_kind", "tied"),
    [
        (Kind.Q4_1, Kind.Q8_0, True),
        (Kind.Q4_0, Kind.Q4_1, False),
        (Kind.Q8_0, Kind.F16, True),
        (Kind.F16, Kind.F32, False),
    ],
)
def test_mlx_lm_runs_the_repacked_model_as_the_original_weights(
    tmp_path: Path, write_tiny_gguf, kind: Kind, embedding_kind: Kind, tied: bool
):
    exact = write_tiny_gguf(tmp_path / "tiny.gguf", kind, embedding_kind, tied=tied)
    folder = repacked(tmp_path / "tiny.gguf", tmp_path / "tiny")
    model, config = load_model(folder)
    plain = dequantize_model(load_model(folder)[0])
    # A model that never saw our code's packing, names aside.
    reference = llama.Model(llama.ModelArgs.from_dict(config))
    reference.load_weights([(name, mx.array(value)) for name, value in exact.items()])

    for name, value in dict(tree_flatten(plain.parameters())).items():
        np.testing.assert_array_equal(np.array(value), exact[name], err_msg=name)
    prompt = [1, 17, 60, 99, 4]
    expected = greedy(reference, prompt, 12)
    assert greedy(plain, prompt, 12) == expected
    assert greedy(model, prompt, 12) == expected


def test_config_names_each_layer_whose_bits_differ(tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    config = conversion.config(conversion.read(tmp_path / "tiny.gguf"))
    eight = {"group_size": 32, "bits": 8}
    assert config["quantization"] == {"group_size": 32, "bits": 4, "model.embed_tokens": eight}
    assert config["quantization_config"] == config["quantization"]
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    assert config["head_dim"] == 16 and config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_tokenizer_loads_with_its_special_tokens_and_template(tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    tokenizer = load_tokenizer(repacked(tmp_path / "tiny.gguf", tmp_path / "tiny"))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the 12"}])
    assert ids[0] == 1 and ids[-1] == 2 == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "<|start|>the 12<|end|>"


def test_other_architectures_are_refused_by_name(tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(SpecStreamError, match="architecture mamba"):
        conversion.read(tmp_path / "tiny.gguf")


def test_other_quantizations_are_refused_by_name(tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf", Kind.Q5_0)
    with pytest.raises(SpecStreamError, match=r"blk.0.attn_q.weight is of type Q5_0"):
        conversion.read(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, write_tiny_gguf, kept: float):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(SpecStreamError, match="truncated"):
        conversion.read(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(SpecStreamError, match="does not exist"):
        conversion.read(tmp_path / "none.gguf")


# The embedded model


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
