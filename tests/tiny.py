"""Tiny random models, one per kind of target, and what drives them through the decode loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlx_specstream.decode.loop import Decoder
from mlx_specstream.decode.plan import Branch, TreePlan
from mlx_specstream.decode.planner import FixedPlanner
from mlx_specstream.decode.processors import Sampling
from mlx_specstream.decode.proposers import Context, Proposals, Proposer
from mlx_specstream.decode.report import PassReport
from mlx_specstream.streams import StreamHeads, StreamsConfig, make_streams, randomise
from mlx_specstream.target import Target, TreeCache, TreeLayout
from mlx_specstream.target.cache import extent
from mlx_specstream.target.families import model_classes

VOCAB = 101
BASE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def build(
    seed: int = 0, quantize: bool = False, dtype: mx.Dtype = mx.float32, **changes: object
) -> nn.Module:
    """A random model whose logits have a standard deviation of about 3."""
    config = {**BASE, **changes}
    model_class, args_class = model_classes(config)
    model = model_class(args_class.from_dict(config))
    gemma = str(config["model_type"]).startswith("gemma")
    if "gemma3" in str(config["model_type"]):  # learns from its weights that its head is tied
        getattr(model, "language_model", model).sanitize({})
    rng = np.random.default_rng(seed)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        noise = rng.normal(size=value.shape)
        if name.endswith("norm.weight"):
            noise = (0 if gemma else 1) + 0.1 * noise  # Gemma's norms add one to their weight
        elif name.endswith("bias"):
            noise = 0.3 * noise
        elif "embed" in name or "lm_head" in name:
            noise = 0.35 * noise
        else:
            noise = 1.5 * noise / value.shape[-1] ** 0.5
        weights.append((name, mx.array(noise.astype(np.float32))))
    model.update(tree_unflatten(weights))
    if quantize:
        nn.quantize(model, group_size=32, bits=4)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


FULL, SLIDING = "full_attention", "sliding_attention"
QWEN3 = {"head_dim": 16, "rope_theta": 1e4}
GEMMA3 = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
}
GRANITE = {
    "attention_bias": True,
    "mlp_bias": True,
    "rope_theta": 1e4,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 0.7,
}
LONG_ROPE = {
    "type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 1.5, 2.5, 4.0],
}
EXPERTS = {
    **QWEN3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [2],
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
OPT = {"model_type": "opt", "ffn_dim": 96}

# One or two for each family beyond Llama's own: what tests/test_families.py drives through.
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "qwen2": partial(build, model_type="qwen2"),
    "qwen3": partial(build, model_type="qwen3", **QWEN3),
    "gemma": partial(build, model_type="gemma", head_dim=32),
    "gemma2": partial(
        build,
        model_type="gemma2",
        head_dim=16,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3_text": partial(build, **GEMMA3),
    "gemma3": partial(build, model_type="gemma3", text_config={**BASE, **GEMMA3}, vocab_size=VOCAB),
    "phi3": partial(build, model_type="phi3", tie_word_embeddings=False),
    "phi3_long": partial(
        build,
        model_type="phi3",
        rope_scaling=LONG_ROPE,
        partial_rotary_factor=0.5,
        original_max_position_embeddings=512,
    ),
    "olmo2": partial(build, model_type="olmo2", tie_word_embeddings=False),
    "granite": partial(build, model_type="granite", **GRANITE),
    "qwen3_moe": partial(build, model_type="qwen3_moe", **EXPERTS),
    "mixtral": partial(build, model_type="mixtral", num_local_experts=4),
    "opt": partial(build, **OPT),
    "opt_norms_after": partial(build, **OPT, do_layer_norm_before=False, tie_word_embeddings=False),
    "opt_quantized": partial(build, **OPT, quantize=True),
}

TINY: dict[str, Callable[[], nn.Module]] = {
    "grouped": build,
    "untied": partial(build, tie_word_embeddings=False),
    "ungrouped": partial(build, num_key_value_heads=4),
    "biases": partial(build, attention_bias=True, mlp_bias=True),
    "llama3_rope": partial(build, rope_scaling=LLAMA3),
    "linear_rope": partial(build, rope_scaling={"type": "linear", "factor": 4.0}),
    "sliding": partial(
        build,
        num_hidden_layers=4,
        layer_types=[SLIDING, FULL, SLIDING, SLIDING],
        sliding_window=8,
    ),
    "head_dim": partial(build, head_dim=32),
    "mistral": partial(build, model_type="mistral", tie_word_embeddings=False),
    "smollm3": partial(build, model_type="smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
    "deep": partial(build, num_hidden_layers=24, num_attention_heads=2, num_key_value_heads=1),
    "quantized": partial(build, quantize=True),
    "quantized_untied": partial(build, quantize=True, tie_word_embeddings=False),
    **FAMILIES,
}

# Half precision: equal among themselves bit for bit, but not to a float32 tolerance of mlx-lm.
HALF: dict[str, Callable[[], nn.Module]] = {
    "bfloat16": partial(build, dtype=mx.bfloat16),
    "float16_untied": partial(build, dtype=mx.float16, tie_word_embeddings=False),
    "bfloat16_quantized": partial(build, dtype=mx.bfloat16, quantize=True),
}


@cache
def target_of(name: str) -> Target:
    """The target of a tiny model, made once."""
    return Target.of((TINY | HALF)[name]())


@cache
def streams_of(name: str, kind: str, seed: int = 1) -> StreamHeads:
    """Random ``linear``, ``fused`` or ``deferred`` streams for a tiny model."""
    method = "linear" if kind == "linear" else "attention"
    mode = "deferred" if kind == "deferred" else "fused"
    config = StreamsConfig(method, 3, mode, 2, 4, 8, draft_vocab=tuple(range(90, 9, -1)))
    return randomise(make_streams(config, target_of(name)), seed, scale=0.1)


def text_of(count: int, seed: int = 0) -> list[int]:
    """Random tokens in which short phrases come back, so that lookup has something to find."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(0, VOCAB, 5).tolist() for _ in range(8)]
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += phrases[rng.integers(8)]
    return tokens[:count]


class Oracle:
    """Proposes what plain decoding says, wrong now and then: whole paths get accepted.

    Args:
        text: Prompt and continuation by position.
        wrong: How many ranks may be off: at position s it is rank ``s % wrong`` that is right.
    """

    name = "oracle"
    max_depth = None
    scratch_rows = 0

    def __init__(self, text: list[int], wrong: int = 3):
        self.text = mx.array(text, dtype=mx.int32)
        self.wrong = wrong

    def start(self, target: Target) -> tuple[mx.array, ...]:
        return ()

    def propose(self, branch: Branch, memory: tuple[mx.array, ...], context: Context) -> Proposals:
        depth = TreePlan((branch,)).layout.depth[1:]
        position = context.length + mx.array(depth)
        right = mx.array(branch.ranks) == position * 7 // 5 % self.wrong
        tokens = self.text[mx.minimum(position, self.text.size - 1)]
        tokens = mx.where(right, tokens, (tokens + 1 + mx.array(branch.ranks)) % VOCAB)
        return Proposals(tokens.astype(mx.int32), mx.ones(len(branch), mx.bool_), context.kv)

    def observe(self, memory, output, verdict) -> tuple[mx.array, ...]:
        return memory


def filled(target: Target, tokens: list[int], step: int = 256) -> TreeCache:
    """A cache that holds ``tokens``."""
    cache = target.make_cache(step)
    target.prefill(tokens, cache)
    return cache


def run_tree(model: Target | StreamHeads, cache: TreeCache, tokens: list[int], layout: TreeLayout):
    """One pass over a tree, staged in the cache; returns its ``PassOutput``."""
    needed = cache.length + model.rows_written(layout)
    cache.reserve(needed)
    length = mx.array(cache.length, dtype=mx.int32)
    rows = mx.array(tokens, dtype=mx.int32)
    output = model.forward(rows, cache.kv, layout, length, extent(needed, cache.capacity))
    cache.stage(output.kv, len(layout))
    return output


def reports(
    target: Target,
    prompt: list[int],
    count: int,
    plan: str = "none",
    sampling: Sampling | None = None,
    proposers: tuple[Proposer, ...] = (),
    seed: int = 5,
    compile: bool = False,
) -> list[PassReport]:
    """Decode at least ``count`` tokens after a prompt."""
    cache = filled(target, prompt[:-1])
    planner = FixedPlanner(TreePlan.parse(plan))
    decoder = Decoder(target, proposers, compile)
    seen, made = [], 0
    for report in decoder.decode(prompt, cache, planner, sampling or Sampling(), seed):
        seen.append(report)
        made += len(report.tokens)
        if made >= count:
            break
    return seen


def decoded(target: Target, prompt: list[int], count: int, *args, **options) -> list[int]:
    """The first ``count`` tokens of ``reports``."""
    passes = reports(target, prompt, count, *args, **options)
    return [token for report in passes for token in report.tokens][:count]
