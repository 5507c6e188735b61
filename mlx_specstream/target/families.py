"""What differs between model families, one small adapter each.

The blocks themselves (attention, MLP, norms, rope) stay mlx-lm's own, or ours in mlx-lm's form
where mlx-lm has none. An adapter says how tokens are embedded, which layers look through a sliding
window, and how the final hidden state becomes logits. Adding a family: docs/models.md.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from ..errors import SpecStreamError
from . import opt
from .refusals import unsupported


class Family:
    """The Llama layout: ``model.embed_tokens``, ``model.layers``, ``model.norm``, tied or own head.

    Args:
        model: An mlx-lm model.
    """

    # Whether rows are sent to experts: every row of a tree may then read weights of its own.
    sparse = False

    def __init__(self, model: nn.Module):
        self.model: Any = model
        self.args: Any = model.args
        self.trunk: Any = model.model

    @property
    def layers(self) -> list[Any]:
        """The transformer blocks, bottom first."""
        return self.trunk.layers

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values in a layer."""
        return self.args.num_key_value_heads

    @property
    def head_dim(self) -> int:
        """Width of a head's keys and values."""
        own = getattr(self.args, "head_dim", None)
        return own or self.args.hidden_size // self.args.num_attention_heads

    @property
    def mlp_width(self) -> int:
        """Activations between the maps of a row's MLP."""
        return self.args.intermediate_size

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding matrix."""
        return self.args.tie_word_embeddings

    @property
    def head_matrix(self) -> Any:
        """The module whose weight makes logits: the embedding or the head."""
        return self.trunk.embed_tokens if self.tied else self.model.lm_head

    def windows(self) -> list[int | None]:
        """Sliding-window width of each layer in tokens, None for full attention."""
        width = getattr(self.trunk, "sliding_window", None)
        return [width if getattr(layer, "use_sliding", False) else None for layer in self.layers]

    def embed(self, tokens: mx.array) -> mx.array:
        """What tokens are wherever they stand: ``(rows,)`` ids to ``(1, rows, hidden)``."""
        return self.trunk.embed_tokens(tokens[None])

    def enter(self, tokens: mx.array, positions: mx.array) -> mx.array:
        """What enters the first block, ``(1, rows, hidden)``.

        Args:
            tokens: ``(rows,)`` ids.
            positions: ``(rows,)`` int32; of use where positions are learned and added here.
        """
        return self.embed(tokens)

    def norm(self, hidden: mx.array) -> mx.array:
        """The norm before the head, ``(1, rows, hidden)``."""
        return self.trunk.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        """Normed hidden states ``(1, rows, hidden)`` to logits ``(1, rows, vocabulary)``."""
        matrix = self.head_matrix
        return self.scaled(matrix.as_linear(hidden) if self.tied else matrix(hidden))

    def scaled(self, logits: mx.array) -> mx.array:
        """What becomes of the head's product, element by element: nothing here."""
        return logits

    def head_rows(self, ids: mx.array) -> nn.Module:
        """The head's matrix for some tokens only (quantized if the head is), before ``scaled``.

        Args:
            ids: Token ids, ``(n,)``.

        Returns:
            A linear layer ``(…, hidden) -> (…, n)``; its rows are copies, ``n`` of them.
        """
        source = self.head_matrix
        rows = source.weight.shape[0]
        if isinstance(source, (nn.QuantizedEmbedding, nn.QuantizedLinear)):
            head: nn.Module = nn.QuantizedLinear(
                64, 8, bias=False, group_size=source.group_size, bits=source.bits, mode=source.mode
            )
        else:
            head = nn.Linear(1, 1, bias=False)
        for name, value in source.items():
            if isinstance(value, mx.array) and value.shape[0] == rows:
                head[name] = value[ids]
        head.freeze()
        return head


class Gemma(Family):
    """Gemma 1: embeddings grow by the root of their width, and the head is always tied."""

    @property
    def tied(self) -> bool:
        return True

    def embed(self, tokens: mx.array) -> mx.array:
        return super().embed(tokens) * self.args.hidden_size**0.5


class Gemma2(Gemma):
    """Gemma 2: soft caps on logits. In mlx-lm's definition every layer has full attention."""

    def scaled(self, logits: mx.array) -> mx.array:
        most = self.args.final_logit_softcapping
        return mx.tanh(logits / most) * most


class Gemma3(Family):
    """Gemma 3's text model: most layers look through a window."""

    @property
    def tied(self) -> bool:
        return self.model.tie_word_embeddings

    def windows(self) -> list[int | None]:
        width = self.args.sliding_window
        return [width if layer.self_attn.is_sliding else None for layer in self.layers]

    def embed(self, tokens: mx.array) -> mx.array:
        embedded = super().embed(tokens)
        # In bfloat16 first: the model was trained with the rounded root.
        return embedded * mx.array(self.args.hidden_size**0.5, mx.bfloat16).astype(embedded.dtype)


class Gemma3Multimodal(Gemma3):
    """Gemma 3 as it is published with an image tower, which mlx-lm leaves out."""

    def __init__(self, model: nn.Module):
        super().__init__(model.language_model)


class Granite(Family):
    """Granite: factors on embeddings and logits; those within the blocks are mlx-lm's business."""

    def embed(self, tokens: mx.array) -> mx.array:
        return super().embed(tokens) * self.args.embedding_multiplier

    def scaled(self, logits: mx.array) -> mx.array:
        return logits / self.args.logits_scaling


class Experts(Family):
    """A mixture of experts: mlx-lm's router and experts, row by row."""

    sparse = True

    @property
    def mlp_width(self) -> int:
        one = getattr(self.args, "moe_intermediate_size", self.args.intermediate_size)
        return one * self.args.num_experts_per_tok


class OPT(Family):
    """OPT: learned positions added to the embeddings, and perhaps no final norm."""

    def enter(self, tokens: mx.array, positions: mx.array) -> mx.array:
        return self.embed(tokens) + self.trunk.positions(positions)[None]

    def norm(self, hidden: mx.array) -> mx.array:
        return hidden if self.trunk.norm is None else self.trunk.norm(hidden)


# Name of the module that defines the model (mlx-lm's, or one of OWN) → adapter.
FAMILIES: dict[str, type[Family]] = {
    "gemma": Gemma,
    "gemma2": Gemma2,
    "gemma3": Gemma3Multimodal,
    "gemma3_text": Gemma3,
    "granite": Granite,
    "llama": Family,
    "mixtral": Experts,
    "olmo2": Family,
    "opt": OPT,
    "phi3": Family,
    "qwen2": Family,
    "qwen3": Family,
    "qwen3_moe": Experts,
    "smollm3": Family,
}

# Definitions of our own, by model type.
OWN: dict[str, ModuleType] = {"opt": opt}


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """The classes of a configuration's model and arguments: ours where there is one."""
    own = OWN.get(config["model_type"])
    return (own.Model, own.ModelArgs) if own else mlx_lm_utils._get_classes(config)


def adapter_for(config: dict[str, Any]) -> type[Family]:
    """The adapter for a model folder's configuration.

    Raises:
        SpecStreamError: If the architecture, or what the configuration asks of it, is not
            supported.
    """
    model_type = config["model_type"]
    name = mlx_lm_utils.MODEL_REMAPPING.get(model_type, model_type)
    if name not in FAMILIES:
        raise SpecStreamError(unsupported(model_type, _supported(), config))
    if model_type in OWN:
        OWN[model_type].ModelArgs.from_dict(config)
    return FAMILIES[name]


def family_of(model: nn.Module) -> Family:
    """The adapter for an mlx-lm model.

    Raises:
        SpecStreamError: If the architecture is not supported, or uses a position encoding that
            cannot be applied row by row.
    """
    name = type(model).__module__.rsplit(".", 1)[-1]
    if name not in FAMILIES:
        raise SpecStreamError(unsupported(getattr(model, "model_type", name), _supported()))
    family = FAMILIES[name](model)
    for layer in family.layers:
        if type(getattr(layer.self_attn, "rope", None)).__name__ == "DynamicNTKScalingRoPE":
            raise SpecStreamError(
                "dynamic NTK rope scaling changes every position as the text grows and cannot "
                "run over a tree: use a checkpoint with another rope_scaling"
            )
    return family


def _supported() -> set[str]:
    """Model types that have an adapter, for people."""
    return {*FAMILIES, "mistral"}
