"""The Python API: ``stream_generate`` and ``generate``, called as in mlx-lm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .decode.processors import Sampling
from .errors import UsageError
from .responses import GenerationResponse
from .session import PREFILL_STEP, Session
from .speculation import Speculation
from .streams import StreamHeads
from .streams.folder import StreamSet

_SAMPLING = {f.name for f in fields(Sampling)}
_SPECULATION = {f.name for f in fields(Speculation)} - {"enabled"}


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    max_tokens: int = 256,
    *,
    streams: StreamSet | StreamHeads | str | Path | None = "auto",
    speculation: bool = True,
    stop: Sequence[str] = (),
    max_kv_size: int | None = None,
    prefill_step_size: int = PREFILL_STEP,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    **options: Any,
) -> Iterator[GenerationResponse]:
    """Generate text, a response for every token.

    Args:
        model: An mlx-lm model of a supported family, such as ``load`` returns.
        tokenizer: Its tokenizer.
        prompt: Text or token ids; a chat is put through ``tokenizer.apply_chat_template`` first.
        max_tokens: Most tokens to generate; -1 for as many as the context holds.
        streams: A streams folder made for the model, heads, or None; ``"auto"`` takes what comes
            with the project for the embedded default model.
        speculation: False decodes plainly; the text is the same.
        stop: Strings that end the text (or one); they are not part of it.
        max_kv_size: Most tokens of text in the cache; a longer prompt is refused.
        prefill_step_size: Prompt tokens computed at a time.
        prompt_progress_callback: Called with the prompt tokens computed so far and in all.
        options: Fields of ``Sampling`` (``temp``, ``top_p``, ``seed``, …) and of ``Speculation``
            (``tree``, ``num_draft_tokens``, ``ngram_min``, …).

    Yields:
        mlx-lm's response fields and ours; ``passes`` and ``tokens_per_pass`` are current.

    Raises:
        SpecStreamError: If the prompt, an option, the model or the streams cannot be used.
    """
    unknown = sorted(set(options) - _SAMPLING - _SPECULATION)
    if unknown:
        raise UsageError(f"unknown option '{unknown[0]}'")
    chosen = {name: value for name, value in options.items() if name in _SPECULATION}
    session = Session(
        model, tokenizer, streams, Speculation(enabled=speculation, **chosen), max_kv_size
    )
    sampling = Sampling(**{name: v for name, v in options.items() if name in _SAMPLING})
    return session.stream(
        prompt, max_tokens, sampling, stop, prefill_step_size, prompt_progress_callback
    )


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | Sequence[int] | mx.array,
    verbose: bool = False,
    **options: Any,
) -> str:
    """Generate a whole text; arguments as for ``stream_generate``.

    Args:
        model: An mlx-lm model of a supported family.
        tokenizer: Its tokenizer.
        prompt: Text or token ids.
        verbose: Print the text as it comes, then figures.
        options: Passed on to ``stream_generate``.

    Returns:
        The generated text.
    """
    text, last = "", None
    for last in stream_generate(model, tokenizer, prompt, **options):
        text += last.text
        if verbose:
            print(last.text, end="", flush=True)
    if verbose and last is not None:
        print(
            f"\n{last.prompt_tokens} prompt tokens, {last.prompt_tps:.1f} tokens/s · "
            f"{last.generation_tokens} tokens, {last.generation_tps:.1f} tokens/s, "
            f"{last.tokens_per_pass:.2f} per pass · peak {last.peak_memory:.2f} GB"
        )
    return text
