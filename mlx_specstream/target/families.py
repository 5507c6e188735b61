"""What differs between model families, one small adapter each.

The blocks themselves (attention, MLP, norms, rope) stay mlx-lm's own. An adapter says how
tokens are embedded, which layers look through a sliding window, and how the final hidden state
becomes logits. Adding a family: write an adapter, add it to ``FAMILIES``, add a tiny
configuration to ``tests/tiny.py``; the tests pick it up.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import SpecStreamError


class Family:
    """The Llama layout: ``model.embed_tokens``, ``model.layers``, ``model.norm``, tied or own head.

    Args:
        model: An mlx-lm model.
    """

    def __init__(self, model: nn.Module):
        self.model: Any = model
        self.args: Any = model.args
        self.trunk: Any = model.model

    @property
    def layers(self) -> list[Any]:
        """The transformer blocks, bottom first."""
        return self.trunk.layers

    def windows(self) -> list[int | None]:
        """Sliding-window width of each layer in tokens, None for full attention."""
        width = getattr(self.trunk, "sliding_window", None)
        return [width if getattr(layer, "use_sliding", False) else None for layer in self.layers]

    def embed(self, tokens: mx.array) -> mx.array:
        """``(rows,)`` token ids to ``(1, rows, hidden)``."""
        return self.trunk.embed_tokens(tokens[None])

    def norm(self, hidden: mx.array) -> mx.array:
        """The norm before the head, ``(1, rows, hidden)``."""
        return self.trunk.norm(hidden)

    def head(self, hidden: mx.array) -> mx.array:
        """Normed hidden states ``(1, rows, hidden)`` to logits ``(1, rows, vocabulary)``."""
        if self.args.tie_word_embeddings:
            return self.trunk.embed_tokens.as_linear(hidden)
        return self.model.lm_head(hidden)

    def head_rows(self, ids: mx.array) -> nn.Module:
        """The head restricted to some tokens: a matrix (quantized if the head is) of its rows.

        Args:
            ids: Token ids, ``(n,)``.

        Returns:
            A linear layer ``(…, hidden) -> (…, n)``; its rows are copies, ``n`` of them.
        """
        tied = self.args.tie_word_embeddings
        source = self.trunk.embed_tokens if tied else self.model.lm_head
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


# mlx-lm's module name (what its model_type maps to) → adapter.
FAMILIES: dict[str, type[Family]] = {
    "llama": Family,
    "smollm3": Family,
}


def family_of(model: nn.Module) -> Family:
    """The adapter for an mlx-lm model.

    Raises:
        SpecStreamError: If the architecture is not supported, or uses a position encoding that
            cannot be applied row by row.
    """
    name = type(model).__module__.rsplit(".", 1)[-1]
    if name not in FAMILIES:
        raise SpecStreamError(unsupported(getattr(model, "model_type", name)))
    family = FAMILIES[name](model)
    for layer in family.layers:
        if type(layer.self_attn.rope).__name__ == "DynamicNTKScalingRoPE":
            raise SpecStreamError(
                "dynamic NTK rope scaling changes every position as the text grows and cannot "
                "run over a tree: use a checkpoint with another rope_scaling"
            )
    return family


def unsupported(model_type: str) -> str:
    """The one line for an architecture we have no adapter for."""
    known = "llama, mistral, smollm3"
    return f"model type '{model_type}' is not supported (supported: {known}; see docs/models.md)"
