"""Which GGUF architectures are known, and how each becomes a model that mlx-lm has.

One entry an architecture: the names of its tensors, what llama.cpp's converter did to their
values, and what ``config.json`` says beyond the common shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gguf import GGUFReader, ReaderTensor

from mlx_specstream.errors import SpecStreamError

from . import gguf_rope
from .gguf_metadata import architecture, decimal, head_dim, heads, integer, of_model, value

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA = {
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
_GEMMA3 = _LLAMA | {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True)
class Architecture:
    """How one architecture is read.

    Args:
        model_type: mlx-lm's name of it.
        class_name: transformers' name of its model class.
        layer: mlx-lm's name of each part of a layer, by GGUF's.
        biased: Parts that have a bias.
        permuted: Whether rows of q and k are in the order of interleaved rope.
        norm_offset: What was added to the weights of the norms.
        config: Its own entries of ``config.json``.
    """

    model_type: str
    class_name: str
    layer: dict[str, str]
    config: Callable[[GGUFReader], dict[str, Any]]
    biased: tuple[str, ...] = ()
    permuted: bool = False
    norm_offset: float = 0.0

    def mlx_name(self, name: str) -> str:
        """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``.

        Raises:
            SpecStreamError: The model that mlx-lm has knows no such tensor.
        """
        match name.split("."):
            case [top, "weight"] if top in _TOP:
                return f"{_TOP[top]}.weight"
            case ["blk", layer, part, kind] if part in self.layer:
                if kind == "weight" or (kind == "bias" and part in self.biased):
                    return f"model.layers.{layer}.{self.layer[part]}.{kind}"
        raise SpecStreamError(f"the GGUF file has a tensor {name}, which is not supported")


def of(reader: GGUFReader) -> Architecture:
    """The entry for a file.

    Raises:
        SpecStreamError: There is none, or the file has a variant that the entry does not cover.
    """
    name = architecture(reader)
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise SpecStreamError(
            f"the GGUF file is of architecture {name}; only {known} are supported"
        )
    if of_model(reader, "rope.dimension_count", head_dim(reader)) != head_dim(reader):
        raise SpecStreamError(
            "the GGUF file rotates a part of each head only, which is not supported"
        )
    return ARCHITECTURES[name]


def tensors(reader: GGUFReader) -> list[tuple[ReaderTensor, str]]:
    """A file's weights with their names in mlx-lm.

    Raises:
        SpecStreamError: See :func:`of` and :meth:`Architecture.mlx_name`.
    """
    known = of(reader)
    return [
        (tensor, known.mlx_name(tensor.name))
        for tensor in reader.tensors
        if tensor.name != gguf_rope.TENSOR  # no weight: it says how positions are scaled
    ]


def config(reader: GGUFReader) -> dict[str, Any]:
    """``config.json`` of a file's model, without its quantization."""
    entry, (query, key_value) = of(reader), heads(reader)
    return {
        "architectures": [entry.class_name],
        "model_type": entry.model_type,
        "hidden_size": integer(reader, "embedding_length"),
        "num_hidden_layers": integer(reader, "block_count"),
        "intermediate_size": integer(reader, "feed_forward_length"),
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "head_dim": head_dim(reader),
        "rms_norm_eps": decimal(reader, "attention.layer_norm_rms_epsilon", 1e-5),
        "rope_theta": decimal(reader, "rope.freq_base", 10000.0),
        "max_position_embeddings": integer(reader, "context_length"),
        "vocab_size": len(value(reader, "tokenizer.ggml.tokens")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": value(reader, "tokenizer.ggml.bos_token_id", None),
        "eos_token_id": _ends(reader),
        "pad_token_id": value(reader, "tokenizer.ggml.padding_token_id", None),
        "torch_dtype": "float32",
        "dtype": "float32",
        **gguf_rope.scaling(reader),
        **entry.config(reader),
    }


def _ends(reader: GGUFReader) -> int | list[int] | None:
    """The token that ends a text; where another one ends a turn, both."""
    found = [value(reader, f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot")]
    ends = list(dict.fromkeys(end for end in found if end is not None))
    return ends if len(ends) > 1 else ends[0] if ends else None


def _llama(reader: GGUFReader) -> dict[str, Any]:
    return {
        "rope_traditional": False,
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
    }


def _qwen2(reader: GGUFReader) -> dict[str, Any]:
    return {"rope_traditional": False, "hidden_act": "silu", "use_sliding_window": False}


def _gemma3(reader: GGUFReader) -> dict[str, Any]:
    # The scale of attention is not in the file. It is one over the root of the head's length,
    # but in the 27B model (the one of 62 layers), where it is the hidden size per head.
    per_head = integer(reader, "embedding_length") // heads(reader)[0]
    return {
        "query_pre_attn_scalar": per_head
        if integer(reader, "block_count") == 62
        else head_dim(reader),
        "sliding_window": integer(reader, "attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": decimal(reader, "rope.freq_base_swa", 10000.0),
        "hidden_activation": "gelu_pytorch_tanh",
    }


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA, _llama, permuted=True),
    "qwen2": Architecture(
        "qwen2", "Qwen2ForCausalLM", _LLAMA, _qwen2, biased=("attn_q", "attn_k", "attn_v")
    ),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA3, _gemma3, norm_offset=1.0),
}
