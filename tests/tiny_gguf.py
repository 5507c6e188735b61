"""Tiny GGUF files of the qwen2 and gemma3 architectures, and what reads the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Kind
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from tokenizers.pre_tokenizers import ByteLevel

from mlx_specstream.conversion.gguf import repack

HIDDEN, MLP, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 6
MATRICES = {  # GGUF's name: mlx-lm's name, rows, columns, and how the tests store it
    "attn_q": ("self_attn.q_proj", HIDDEN, HIDDEN, Kind.Q4_K),
    "attn_k": ("self_attn.k_proj", HIDDEN // 2, HIDDEN, Kind.Q5_K),
    "attn_v": ("self_attn.v_proj", HIDDEN // 2, HIDDEN, Kind.Q6_K),
    "attn_output": ("self_attn.o_proj", HIDDEN, HIDDEN, Kind.Q3_K),
    "ffn_gate": ("mlp.gate_proj", MLP, HIDDEN, Kind.Q2_K),
    "ffn_up": ("mlp.up_proj", MLP, HIDDEN, Kind.Q5_0),
    "ffn_down": ("mlp.down_proj", HIDDEN, MLP, Kind.BF16),
}
NORMS = {
    "qwen2": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
    },
}
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def repacked(source: Path, folder: Path) -> Path:
    """A GGUF file's MLX folder."""
    folder.mkdir(exist_ok=True)
    repack(source, folder)
    return folder


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """What a model continues with."""
    cache = make_prompt_cache(model)
    tokens, rows = list(prompt), prompt
    for _ in range(count):
        logits = model(mx.array([rows]), cache=cache)
        rows = [int(mx.argmax(logits[0, -1]))]
        tokens += rows
    return tokens[len(prompt) :]


def random_blocks(kind: Kind, rows: int, columns: int, scale: float = 0.1) -> np.ndarray:
    """A random matrix as ``kind``. K-quants the gguf package only reads: those are random bits."""
    rng = np.random.default_rng(rows + columns)
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(rng.normal(0, scale, (rows, columns)).astype("f4"), kind)
    length, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // length, size), np.uint8)
    count = 1 if kind in (Kind.Q3_K, Kind.Q6_K) else 2
    where = slice(0, 4) if kind in (Kind.Q4_K, Kind.Q5_K) else slice(size - 2 * count, size)
    floats = (scale / 1000 * rng.normal(size=(rows, columns // length, count))).astype(np.float16)
    blocks[..., where] = floats.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_family(path: Path, architecture: str) -> dict[str, np.ndarray]:
    """A random model of 6 layers; returns its exact values by mlx-lm's names."""
    writer = gguf.GGUFWriter(path, architecture)
    gemma = architecture == "gemma3"
    count = add_sentence_piece(writer, ["▁t", "he", "▁the"]) if gemma else add_byte_level(writer)
    values: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(3)

    def add(theirs: str, ours: str, rows: int, columns: int, kind: Kind) -> None:
        blocks = random_blocks(kind, rows, columns)
        values[f"{ours}.weight"] = gguf.quants.dequantize(blocks, kind)
        writer.add_tensor(f"{theirs}.weight", blocks, raw_dtype=kind)

    def add_vector(theirs: str, ours: str, length: int, stored_more: float) -> None:
        vector = (rng.integers(-64, 64, length) / 256).astype(np.float32)  # exact with 1 added
        values[ours] = vector
        writer.add_tensor(theirs, vector + np.float32(stored_more))

    add("token_embd", "model.embed_tokens", count, HIDDEN, Kind.Q8_0)
    more = 1.0 if gemma else 0.0
    add_vector("output_norm.weight", "model.norm.weight", HIDDEN, more)
    for i in range(LAYERS):
        for theirs, (ours, rows, columns, kind) in MATRICES.items():
            add(f"blk.{i}.{theirs}", f"model.layers.{i}.{ours}", rows, columns, kind)
            if theirs in ("attn_q", "attn_k", "attn_v") and not gemma:
                bias = f"model.layers.{i}.{ours}.bias"
                add_vector(f"blk.{i}.{theirs}.bias", bias, rows, 0.0)
        for theirs, ours in NORMS[architecture].items():
            length = HIDDEN // HEADS if ".q_" in ours or ".k_" in ours else HIDDEN
            add_vector(f"blk.{i}.{theirs}.weight", f"model.layers.{i}.{ours}.weight", length, more)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    if gemma:
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_sliding_window(8)
    finish(writer)
    return values


def add_byte_level(
    writer: gguf.GGUFWriter,
    pieces: Sequence[str] = ("th", "the", "Ġt", "Ġthe"),
    merges: Sequence[str] = ("t h", "th e", "Ġ t", "Ġ the"),
    split: str = "qwen2",
) -> int:
    """A byte-level BPE vocabulary; returns how many tokens it has."""
    tokens = [*sorted(ByteLevel.alphabet()), *pieces, "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(len(tokens) - 1)
    return len(tokens)


def add_sentence_piece(
    writer: gguf.GGUFWriter,
    pieces: Sequence[str],
    scores: Sequence[float] | None = None,
    *,
    space_prefix: bool = False,
    defined: Sequence[str] = (),
) -> int:
    """A SentencePiece vocabulary as Gemma's; returns how many tokens it has."""
    letters = sorted({letter for piece in pieces for letter in piece} - set(pieces))
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokens = [*special, *defined, *BYTES, *pieces, *letters]
    fixed = len(special) + len(defined) + len(BYTES)
    scores = [-float(i) for i in range(len(pieces))] if scores is None else list(scores)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * fixed + scores + [-1e4 - i for i in range(len(letters))])
    kinds = [3, 3, 3, 2] + [4] * len(defined) + [6] * 256 + [1] * (len(tokens) - fixed)
    writer.add_token_types(kinds)
    for i, add in enumerate(("pad", "eos", "bos", "unk")):
        getattr(writer, f"add_{add}_token_id")(i)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(space_prefix)
    return len(tokens)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write out what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
