"""A llama-architecture GGUF file into an MLX model folder, without changing a value.

GGUF's Q4_0, Q4_1 and Q8_0 blocks hold 32 weights and a scale each, so they are MLX affine
quantization with group size 32 in another byte order: a weight is ``scale * q + bias`` in both.
Re-quantizing would lose accuracy; repacking loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.constants import GGMLQuantizationType, TokenType
from safetensors.numpy import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from mlx_specstream.errors import SpecStreamError

Array = npt.NDArray[Any]

GROUP_SIZE = 32
BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read(path: Path) -> GGUFReader:
    """Open a GGUF file and check that it is one we can repack.

    Raises:
        SpecStreamError: The file is missing, truncated, of another architecture, or has a tensor
            whose name or type has no exact counterpart.
    """
    if not path.is_file():
        raise SpecStreamError(f"{path} does not exist")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader walks raw offsets: a short file fails anywhere
        raise SpecStreamError(
            f"{path} is truncated or not a GGUF file; install or copy it again"
        ) from error
    architecture = _value(reader, "general.architecture", "none")
    if architecture != "llama":
        raise SpecStreamError(f"{path} is of architecture {architecture}; only llama is supported")
    if _value(reader, "llama.rope.scaling.type", "none") != "none":
        raise SpecStreamError(f"{path} scales its rope, which is not supported from GGUF")
    if _value(reader, "llama.rope.dimension_count", _head_dim(reader)) != _head_dim(reader):
        raise SpecStreamError(f"{path} rotates a part of each head only, which is not supported")
    for tensor in reader.tensors:
        _mlx_name(tensor)
        if tensor.tensor_type.name not in ("F32", "F16", *BITS):
            raise SpecStreamError(
                f"{path}: {tensor.name} is of type {tensor.tensor_type.name}; only F32, F16, "
                f"{', '.join(BITS)} can be repacked without changing a value"
            )
    return reader


def weights(reader: GGUFReader) -> Iterator[tuple[str, Array]]:
    """Every tensor under mlx-lm's names.

    Yields:
        For a quantized (rows, columns) tensor ``name.weight`` uint32 (rows, columns * bits / 32),
        ``name.scales`` and ``name.biases`` float32 (rows, columns / 32); else ``name.weight`` in
        its own float32 or float16.
    """
    heads = {"attn_q": _int(reader, "attention.head_count"), "attn_k": _kv_heads(reader)}
    for tensor in reader.tensors:
        name = _mlx_name(tensor)
        data = np.asarray(tensor.data)
        if (permuted := heads.get(tensor.name.split(".")[-2])) is not None:
            data = unpermute(data, permuted)
        if tensor.tensor_type.name in BITS:
            packed, scales, biases = repack_blocks(data, tensor.tensor_type)
            yield f"{name}.weight", packed
            yield f"{name}.scales", scales
            yield f"{name}.biases", biases
        else:
            yield f"{name}.weight", data


def unpermute(rows: Array, heads: int) -> Array:
    """Rows of a q or k projection from GGUF's order back to the order mlx-lm's rope expects.

    GGUF interleaves the two halves of each head. For one head of size 6, rows that GGUF stores as
    ``[0 3 1 4 2 5]`` come back as ``[0 1 2 3 4 5]``. A quantized row stays whole, so this serves
    raw blocks as well as plain numbers.

    Args:
        rows: (heads * head_dim, anything).
    """
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def repack_blocks(rows: Array, kind: GGMLQuantizationType) -> tuple[Array, Array, Array]:
    """GGUF blocks of 32 weights as MLX affine groups of 32, value for value.

    Args:
        rows: uint8 (rows, bytes), whole blocks of ``kind``: Q4_0, Q4_1 or Q8_0.

    Returns:
        ``weight`` uint32 (rows, columns * bits / 32), the first element in the lowest bits, and
        ``scales`` and ``biases`` (rows, columns / 32). Those are float32: 128 * scale can exceed
        float16, and the CPU kernels are 8 times faster with them than with bfloat16.
    """
    head = 4 if kind == GGMLQuantizationType.Q4_1 else 2
    block = head + GROUP_SIZE * BITS[kind.name] // 8
    blocks = np.ascontiguousarray(rows).reshape(len(rows), -1, block)
    numbers = np.ascontiguousarray(blocks[..., :head]).view(np.float16).astype(np.float32)
    body = blocks[..., head:]
    scales = numbers[..., 0]
    if kind == GGMLQuantizationType.Q8_0:
        packed = body ^ np.uint8(128)  # int8 q as uint8 q + 128
        biases = -128 * scales
    else:
        # Byte i holds elements i (low) and i + 16 (high); MLX wants neighbours in one byte.
        elements = np.concatenate([body & 15, body >> 4], axis=-1)
        packed = elements[..., 0::2] | elements[..., 1::2] << 4
        biases = numbers[..., 1] if kind == GGMLQuantizationType.Q4_1 else -8 * scales
    packed = np.ascontiguousarray(packed).reshape(len(rows), -1).view(np.uint32)
    return packed, np.ascontiguousarray(scales), np.ascontiguousarray(biases)


def config(reader: GGUFReader) -> dict[str, Any]:
    """The ``config.json`` that mlx-lm loads the repacked weights with."""
    kinds = {_mlx_name(tensor): tensor.tensor_type.name for tensor in reader.tensors}
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4}
    quantization |= {
        name: {"group_size": GROUP_SIZE, "bits": BITS[kind]}
        for name, kind in kinds.items()
        if BITS.get(kind, 4) != 4
    }
    result = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _int(reader, "embedding_length"),
        "num_hidden_layers": _int(reader, "block_count"),
        "intermediate_size": _int(reader, "feed_forward_length"),
        "num_attention_heads": _int(reader, "attention.head_count"),
        "num_key_value_heads": _kv_heads(reader),
        "head_dim": _head_dim(reader),
        "rms_norm_eps": _float(reader, "llama.attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": _float(reader, "llama.rope.freq_base", 10000.0),
        "rope_traditional": False,
        "max_position_embeddings": _int(reader, "context_length"),
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "tie_word_embeddings": "lm_head" not in kinds,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id", None),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id", None),
        "pad_token_id": _value(reader, "tokenizer.ggml.padding_token_id", None),
        "torch_dtype": "float32",
        "dtype": "float32",
    }
    if any(kind in BITS for kind in kinds.values()):
        result |= {"quantization": quantization, "quantization_config": quantization}
    return result


def tokenizer(reader: GGUFReader) -> Tokenizer:
    """The byte-level BPE tokenizer kept in the metadata.

    Raises:
        SpecStreamError: The metadata asks for another kind of tokenizer.
    """
    kind = _value(reader, "tokenizer.ggml.model", "none")
    split = _value(reader, "tokenizer.ggml.pre", "none")
    if kind != "gpt2" or split not in ("smollm", "gpt-2"):
        raise SpecStreamError(
            f"the GGUF file has a {kind} tokenizer with {split} splitting; "
            "only gpt2 with smollm or gpt-2 is supported"
        )
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _value(reader, "tokenizer.ggml.merges")]
    result = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    result.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if split == "smollm"
        else byte_level
    )
    result.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, _value(reader, "tokenizer.ggml.token_type"), strict=True):
        if type_ in (TokenType.CONTROL, TokenType.USER_DEFINED):
            special = type_ == TokenType.CONTROL
            result.add_tokens([AddedToken(token, special=special, normalized=False)])
    if _value(reader, "tokenizer.ggml.add_bos_token", False):
        first = _value(reader, "tokenizer.ggml.bos_token_id")
        result.post_processor = processors.TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    return result


def tokenizer_config(reader: GGUFReader) -> dict[str, Any]:
    """The ``tokenizer_config.json`` beside it, with the special tokens and chat template."""
    tokens = _value(reader, "tokenizer.ggml.tokens")
    result: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _int(reader, "context_length"),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for ours, theirs in names.items():
        index = _value(reader, f"tokenizer.ggml.{theirs}_token_id", None)
        if index is not None:
            result[f"{ours}_token"] = tokens[index]
    template = _value(reader, "tokenizer.chat_template", None)
    return result if template is None else result | {"chat_template": template}


def repack(source: Path, folder: Path, progress: Callable[[float], None] | None = None) -> None:
    """Write ``source`` as an MLX model folder: weights, config, tokenizer.

    Args:
        source: A GGUF file of the llama architecture.
        folder: An existing folder.
        progress: Called with the fraction done, 0 to 1.

    Raises:
        SpecStreamError: See :func:`read` and :func:`tokenizer`.
        OSError: The folder cannot be written.
    """
    report = progress or (lambda fraction: None)
    reader = read(source)
    report(0.2)  # parsing the vocabulary takes about as long as the weights
    tokenizer_json = tokenizer(reader).to_str(pretty=False)
    report(0.4)
    packed: dict[str, Array] = {}
    for name, value in weights(reader):
        packed[name] = value
        report(0.4 + 0.4 * len(packed) / (3 * len(reader.tensors)))
    (folder / "model.safetensors").write_bytes(save(packed, metadata={"format": "mlx"}))
    _write_json(folder / "config.json", config(reader))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(reader))
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    report(1.0)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _mlx_name(tensor: ReaderTensor) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj``."""
    match tensor.name.split("."):
        case [top, "weight"] if top in _TOP:
            return _TOP[top]
        case ["blk", layer, part, "weight"] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}"
    raise SpecStreamError(f"the GGUF file has a tensor {tensor.name}, which is not supported")


_REQUIRED = object()


def _value(reader: GGUFReader, key: str, default: Any = _REQUIRED) -> Any:
    field = reader.get_field(key)
    if field is not None:
        return field.contents()
    if default is _REQUIRED:
        raise SpecStreamError(f"the GGUF file lacks {key}")
    return default


def _int(reader: GGUFReader, key: str) -> int:
    return int(_value(reader, f"llama.{key}"))


def _float(reader: GGUFReader, key: str, default: float) -> float:
    """The shortest decimal that is the stored float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(_value(reader, key, default))))


def _kv_heads(reader: GGUFReader) -> int:
    heads = _int(reader, "attention.head_count")
    return int(_value(reader, "llama.attention.head_count_kv", heads))


def _head_dim(reader: GGUFReader) -> int:
    even = _int(reader, "embedding_length") // _int(reader, "attention.head_count")
    return int(_value(reader, "llama.attention.key_length", even))
