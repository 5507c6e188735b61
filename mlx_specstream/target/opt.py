"""OPT (Zhang et al., arXiv 2205.01068), which mlx-lm lacks: a definition in mlx-lm's form.

Positions are learned and added to the embeddings once, so nothing in the blocks depends on where
a row sits. Modules have the names of mlx-lm's other models; ``sanitize`` maps the checkpoint's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import (
    BaseModelArgs,
    create_attention_mask,
    scaled_dot_product_attention,
)

from ..errors import SpecStreamError

# The first rows of OPT's position table belong to no position.
POSITION_OFFSET = 2

# What a checkpoint's modules are called here; the others keep their names.
_RENAMED = {
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn_layer_norm": "input_layernorm",
    "layers.final_layer_norm": "post_attention_layernorm",
    "final_layer_norm": "norm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}


@dataclass
class ModelArgs(BaseModelArgs):
    """An OPT checkpoint's configuration, in its own words.

    Raises:
        SpecStreamError: If it asks for what this definition does not have.
    """

    model_type: str = "opt"
    vocab_size: int = 50272
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    ffn_dim: int = 3072
    max_position_embeddings: int = 2048
    do_layer_norm_before: bool = True
    word_embed_proj_dim: int | None = None
    activation_function: str = "relu"
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True
    tie_word_embeddings: bool = True
    _remove_final_layer_norm: bool = False

    def __post_init__(self) -> None:
        if self.word_embed_proj_dim not in (None, self.hidden_size):
            raise SpecStreamError(
                f"an OPT model with projected embeddings (word_embed_proj_dim "
                f"{self.word_embed_proj_dim}, hidden_size {self.hidden_size}, as in opt-350m) "
                "is not supported: use another size"
            )
        if self.activation_function != "relu":
            raise SpecStreamError(
                f"an OPT model with '{self.activation_function}' in place of relu is not supported"
            )

    @property
    def num_key_value_heads(self) -> int:
        """Every head has keys of its own."""
        return self.num_attention_heads

    @property
    def intermediate_size(self) -> int:
        """What other models call ``ffn_dim``."""
        return self.ffn_dim


class Attention(nn.Module):
    """Attention without rotations: ``(batch, rows, hidden) -> (batch, rows, hidden)``."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        size, bias = args.hidden_size, args.enable_bias
        self.n_heads = self.n_kv_heads = args.num_attention_heads
        self.scale = (size // self.n_heads) ** -0.5
        self.q_proj = nn.Linear(size, size, bias=bias)
        self.k_proj = nn.Linear(size, size, bias=bias)
        self.v_proj = nn.Linear(size, size, bias=bias)
        self.o_proj = nn.Linear(size, size, bias=bias)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        batch, rows, size = x.shape
        queries, keys, values = (
            projection(x).reshape(batch, rows, self.n_heads, -1).transpose(0, 2, 1, 3)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        output = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask
        )
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(batch, rows, size))


class MLP(nn.Module):
    """Two maps with a ReLU between them."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.up_proj = nn.Linear(args.hidden_size, args.ffn_dim, bias=args.enable_bias)
        self.down_proj = nn.Linear(args.ffn_dim, args.hidden_size, bias=args.enable_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.relu(self.up_proj(x)))


class TransformerBlock(nn.Module):
    """Attention and MLP, each normed on its way in, or (``do_layer_norm_before`` false) out."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.norm_first = args.do_layer_norm_before
        self.self_attn = Attention(args)
        self.mlp = MLP(args)
        affine = args.layer_norm_elementwise_affine
        self.input_layernorm = nn.LayerNorm(args.hidden_size, affine=affine)
        self.post_attention_layernorm = nn.LayerNorm(args.hidden_size, affine=affine)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if self.norm_first:
            x = x + self.self_attn(self.input_layernorm(x), mask, cache)
            return x + self.mlp(self.post_attention_layernorm(x))
        x = self.input_layernorm(x + self.self_attn(x, mask, cache))
        return self.post_attention_layernorm(x + self.mlp(x))


class OPTModel(nn.Module):
    """The trunk: embeddings, blocks, and the final norm where there is one."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        positions = args.max_position_embeddings + POSITION_OFFSET
        self.embed_positions = nn.Embedding(positions, args.hidden_size)
        self.layers = [TransformerBlock(args) for _ in range(args.num_hidden_layers)]
        self.norm = None
        if args.do_layer_norm_before and not args._remove_final_layer_norm:
            affine = args.layer_norm_elementwise_affine
            self.norm = nn.LayerNorm(args.hidden_size, affine=affine)

    def positions(self, positions: mx.array) -> mx.array:
        """What positions add to an embedding, ``(…,) int32 -> (…, hidden)``.

        Positions beyond the table (proposals that can never be committed, and the padding in
        front of a batch) take its ends: what lies outside must not be read.
        """
        last = self.embed_positions.weight.shape[0] - 1 - POSITION_OFFSET
        return self.embed_positions(mx.clip(positions, 0, last) + POSITION_OFFSET)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        cache = cache or [None] * len(self.layers)
        offset = 0 if cache[0] is None else cache[0].offset
        positions = mx.array(offset).reshape(-1, 1) + mx.arange(inputs.shape[1])
        hidden = self.embed_tokens(inputs) + self.positions(positions)
        mask = create_attention_mask(hidden, cache[0])
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            hidden = layer(hidden, mask, layer_cache)
        return hidden if self.norm is None else self.norm(hidden)


class Model(nn.Module):
    """OPT with its head, as mlx-lm's loops take it."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.model = OPTModel(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        hidden = self.model(inputs, cache)
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(hidden)
        return self.lm_head(hidden)

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """A checkpoint's weights (``model.decoder.…`` or ``decoder.…``) under our names."""
        if self.args.tie_word_embeddings:
            weights.pop("lm_head.weight", None)
        return {_renamed(name): value for name, value in weights.items()}

    @property
    def layers(self) -> list[TransformerBlock]:
        """The transformer blocks, bottom first."""
        return self.model.layers


def _renamed(name: str) -> str:
    """``model.decoder.layers.3.fc1.bias`` -> ``model.layers.3.mlp.up_proj.bias``."""
    if "decoder." not in name:
        return name
    rest = name.rpartition("decoder.")[2]
    parts = rest.split(".")
    if parts[0] == "layers":
        module = ".".join(parts[2:-1])
        ours = _RENAMED.get(f"layers.{module}", _RENAMED.get(module, module))
        return ".".join(["model.layers", parts[1], ours, parts[-1]])
    module = ".".join(parts[:-1])
    return ".".join(["model", _RENAMED.get(module, module), parts[-1]])
