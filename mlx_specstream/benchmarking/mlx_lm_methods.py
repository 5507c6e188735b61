"""How mlx-lm decodes a prompt, timed: by itself, or with a draft model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ..decode.noise import gumbel_rows, seed_key
from ..decode.processors import Sampling, choose
from ..errors import UsageError
from ..streams.files import tokenizer_hash
from ..training.report_memory import parameter_bytes
from .bandwidth import mean_context, weights_read
from .memory import Meter
from .methods import Decoding

MLX_LM, MLX_LM_DRAFT = "mlx-lm", "mlx-lm-draft"
DRAFT = "draft"  # the one proposer there


class MlxLm:
    """``mlx_lm.stream_generate`` on the same weights.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        draft: A draft model for ``draft_model=``, or None.
        num_draft_tokens: Proposals of the draft model in a pass.
    """

    def __init__(self, model: Any, tokenizer: Any, draft: Any = None, num_draft_tokens: int = 0):
        self.name = MLX_LM if draft is None else MLX_LM_DRAFT
        self._model, self._tokenizer, self._draft = model, tokenizer, draft
        self._proposals = num_draft_tokens if draft is not None else 0
        self._weights, self._read = parameter_bytes(model), weights_read(model)
        self._added = 0 if draft is None else parameter_bytes(draft)
        self._draft_read = 0 if draft is None else weights_read(draft)

    def decode(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> Decoding:
        meter = Meter()
        cache = make_prompt_cache(self._model)
        draft_cache = [] if self._draft is None else make_prompt_cache(self._draft)
        options: dict[str, Any] = {"prompt_cache": [*cache, *draft_cache]}
        if self._draft is not None:
            options |= {"draft_model": self._draft, "num_draft_tokens": self._proposals}
        said: list[int] = []
        if not sampling.greedy:
            drafting = self._draft is not None
            options["sampler"] = keyed_sampler(sampling, lambda: len(prompt) + len(said), drafting)
        first = passes = proposed = accepted = 0
        begins = True  # whether the next token is a pass's first
        meter.start()
        for response in mlx_lm.stream_generate(
            self._model, self._tokenizer, list(prompt), max_tokens=max_tokens, **options
        ):
            meter.token()
            if begins:
                passes += 1
                proposed += min(self._proposals, max_tokens - len(said))
            said.append(response.token)
            first += passes == 1
            accepted += response.from_draft
            begins = not response.from_draft  # the target's own token is a pass's last
        meter.stop()
        drafted = proposed / passes
        context = mean_context(len(prompt), len(said))
        held = self._weights + self._added
        return Decoding(
            tokens=tuple(said),
            first_tokens=first,
            first_seconds=meter.first_seconds,
            decode_seconds=meter.decode_seconds,
            passes=passes,
            cost=None,
            proposed={DRAFT: proposed} if proposed else {},
            accepted={DRAFT: accepted} if proposed else {},
            weights=self._weights,
            added=self._added,
            kv=sum(layer.nbytes for layer in (*cache, *draft_cache)),
            prefill_peak=held + meter.prefill_peak,
            decode_peak=held + meter.decode_peak,
            cache=meter.cache_bytes,
            pass_bytes=self._read
            + row_bytes(cache) * context
            + drafted * (self._draft_read + row_bytes(draft_cache) * context),
        )


def row_bytes(cache: list[Any]) -> float:
    """Bytes of one token's keys and values in all layers."""
    return sum(layer.nbytes / layer.keys.shape[2] for layer in cache)


def keyed_sampler(
    sampling: Sampling, position: Callable[[], int], drafting: bool
) -> Callable[[mx.array], mx.array]:
    """A sampler for mlx-lm that draws the target's tokens with this project's noise.

    Noise is keyed by position, so sampled texts can be compared token for token. A draft model's
    proposals are drawn as mlx-lm draws them.

    Args:
        sampling: With a seed.
        position: Of the next token that the caller gets.
        drafting: Whether a draft model is asked: its rows come one at a time, and the target's,
            at least two, only when the caller has all tokens before them. Without one rows are
            computed ahead of the caller, one for each token.
    """
    seed = mx.array(seed_key(sampling.seed or 0), dtype=mx.uint32)
    draft = make_sampler(temp=sampling.temp)
    start, asked = position(), 0

    def draw(logprobs: mx.array) -> mx.array:
        nonlocal asked
        rows, vocabulary = logprobs.shape
        if drafting and rows == 1:
            return draft(logprobs)
        first = position() if drafting else start + asked
        asked += 1
        noise = gumbel_rows(seed, mx.array(first, dtype=mx.int32), rows, vocabulary)
        return choose(logprobs, sampling, noise)

    return draw


def check_draft(tokenizer: Any, draft_tokenizer: Any) -> None:
    """Refuse a draft model that speaks of other tokens.

    Raises:
        UsageError: If its vocabulary is not the target's.
    """
    if tokenizer_hash(tokenizer) != tokenizer_hash(draft_tokenizer):
        raise UsageError(
            "--draft-model has another vocabulary than the model: mlx-lm can only take "
            "proposals of a model with the same tokenizer"
        )
