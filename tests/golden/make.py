"""Makes the golden files: tiny random checkpoints and the logits transformers computes with them.

    python tests/golden/make.py

Not part of the tests, which read the files beside this script. It needs PyTorch and transformers,
which this project does not: the files here came from PyTorch 1.13 (Debian's python3-torch, CPU)
and transformers 4.44.2, in float32. Weights are float16 numbers, so that half the bytes hold them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file

VOCAB, TOKENS = 64, 48
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT = {**COMMON, "ffn_dim": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "opt": (transformers.OPTForCausalLM, transformers.OPTConfig(**OPT)),
    "opt-norms-after": (
        transformers.OPTForCausalLM,
        transformers.OPTConfig(**OPT, do_layer_norm_before=False),
    ),
    "llama3": (
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig(
            **COMMON,
            intermediate_size=64,
            num_key_value_heads=2,
            max_position_embeddings=256,
            rope_theta=500000.0,
            rope_scaling=LLAMA3,
            tie_word_embeddings=False,
        ),
    ),
}


def randomise(model: torch.nn.Module, chance: np.random.Generator) -> None:
    """Weights of a size that makes every part of the model matter, as float16 numbers."""
    for name, parameter in model.named_parameters():
        values = chance.normal(size=tuple(parameter.shape))
        if "norm" in name and name.endswith("weight"):
            values = 1 + 0.2 * values
        elif name.endswith("bias") or "embed" in name:
            values = 0.4 * values
        else:
            values = 1.5 * values / parameter.shape[-1] ** 0.5
        parameter.data = torch.tensor(values.astype(np.float16).astype(np.float32))


def main() -> None:
    for number, (name, (kind, config)) in enumerate(MODELS.items()):
        chance = np.random.default_rng(number)
        model = kind(config).eval()
        randomise(model, chance)
        model.tie_weights()
        tokens = chance.integers(3, VOCAB, TOKENS)
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None])).logits[0].numpy()
        folder = Path(__file__).parent / name
        model.half().save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        expected = {"tokens": tokens.astype(np.int32), "logits": logits}
        save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    main()
