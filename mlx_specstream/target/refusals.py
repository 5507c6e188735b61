"""Which models cannot be targets, and why: said by name, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# A state that every token overwrites can neither branch over a tree nor forget rejected rows.
RECURRENT = frozenset({
    "baichuan_m1", "bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3", "bamba",
    "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_k3", "kimi_linear", "lfm2",
    "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "plamo2", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm",
    "zamba", "zamba2",
})  # fmt: skip
RECURRENT_LAYERS = frozenset({"linear_attention", "mamba", "recurrent", "conv"})
ENCODER_DECODER = frozenset({
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt",
    "led", "longt5", "m2m_100", "marian", "mbart", "mt5", "nllb-moe", "pegasus", "plbart",
    "prophetnet", "speech_to_text", "switch_transformers", "t5", "t5gemma", "umt5", "whisper",
})  # fmt: skip


def unsupported(
    model_type: str, supported: Iterable[str], config: Mapping[str, Any] | None = None
) -> str:
    """The one line for an architecture that we have no adapter for.

    Args:
        model_type: As ``config.json`` names it.
        supported: The types that there are adapters for.
        config: The rest of the configuration, where it is at hand.
    """
    why = reason(model_type, config or {})
    known = ", ".join(sorted(supported))
    return (
        f"model type '{model_type}' is not supported{': ' if why else ''}{why} "
        f"(supported: {known}; see docs/models.md)"
    )


def reason(model_type: str, config: Mapping[str, Any]) -> str:
    """Why a model can never be a target; empty where only an adapter is missing."""
    layers = config.get("layer_types")
    kinds = set(map(str, layers)) if isinstance(layers, list) else set()
    if model_type in RECURRENT or kinds & RECURRENT_LAYERS:
        return "some of its layers keep a recurrent state, which a tree of proposals cannot share"
    if model_type in ENCODER_DECODER or config.get("is_encoder_decoder") is True:
        return "it is an encoder-decoder, and only decoders can be targets"
    return ""
