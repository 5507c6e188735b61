"""A session: one text in progress on one model, and the cache of what is computed of it.

A prompt that begins like the text before it (the next turn of a conversation) is computed only
from where it differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import wired_limit

from .decode.costs import CostCurve
from .decode.noise import fresh_seed, seed_key
from .decode.planner import Planner
from .decode.processors import Sampling
from .decode.text import StopStrings, TextStream
from .errors import SpecStreamError, UsageError
from .responses import Figures, GenerationResponse
from .shipped import streams_for, streams_in
from .speculation import Speculation, decoder_for, fixed_plan, planner_for
from .streams import StreamHeads
from .streams.folder import StreamSet
from .target import Target

PREFILL_STEP = 512


class Session:
    """Generates text with a model and remembers what its KV cache holds.

    One text at a time: a generation ends where the next one on its session begins. Sessions of
    one model do not touch each other.

    Args:
        model: An mlx-lm model of a supported family.
        tokenizer: Its tokenizer.
        streams: What was trained for the model: a streams folder, heads, or None; ``"auto"`` takes
            what comes with the project for the embedded default model.
        speculation: What to propose.
        max_context: Most tokens of text, at most the model's own context.

    Raises:
        SpecStreamError: If the model or the streams cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        streams: StreamSet | StreamHeads | str | Path | None = "auto",
        speculation: Speculation = Speculation(),
        max_context: int | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.target = Target.of(model)
        if streams == "auto":
            streams = streams_for(model, tokenizer)
        elif isinstance(streams, (str, Path)):
            streams = streams_in(streams, self.target, tokenizer)
        elif not isinstance(streams, StreamSet):
            streams = StreamSet(heads=streams)
        self.streams = streams
        self.speculation = speculation
        self.cache = self.target.make_cache(limit=max_context)
        self.tokens: list[int] = []  # the text; the cache holds the first ``cache.length``
        self._decoder = decoder_for(self.target, streams, speculation)
        fixed_plan(self._decoder.proposers, speculation)  # refused now, not at the first prompt
        self.proposers = [proposer.name for proposer in self._decoder.proposers]
        self._figures: Figures | None = None
        self._cancelled = threading.Event()
        self._running: object = None  # the generation that the cache belongs to

    @property
    def costs(self) -> CostCurve | None:
        """What passes cost on this machine; None until the first prompt that is planned for."""
        experience = self._decoder.experience
        return None if experience is None else experience.clock.costs

    def stats(self) -> dict[str, Any]:
        """Figures of the last generation, and what the session holds. Ready for JSON.

        Returns:
            ``passes``, ``tokens``, ``trees`` (passes by tree), ``why`` (the planner's reason now),
            ``proposed`` and ``accepted`` by proposer, ``cost_curve`` (the measured passes, or
            None), ``context`` (tokens in the cache), and bytes: ``kv_bytes``, ``memory_bytes``,
            ``peak_bytes``, ``allocator_bytes``.
        """
        figures, costs = self._figures, self.costs
        return {
            "passes": figures.passes if figures else 0,
            "tokens": figures.generated if figures else 0,
            "trees": dict(figures.trees) if figures else {},
            "why": figures.why() if figures else "",
            "proposed": dict(figures.proposed) if figures else {},
            "accepted": dict(figures.accepted) if figures else {},
            "cost_curve": None if costs is None else [p._asdict() for p in costs.points],
            "context": self.cache.length,
            "kv_bytes": self.cache.nbytes,
            "memory_bytes": mx.get_active_memory(),
            "peak_bytes": mx.get_peak_memory(),
            "allocator_bytes": mx.get_cache_memory(),
        }

    def cancel(self) -> None:
        """End the generation that is running, within a pass. Safe from any thread."""
        self._cancelled.set()

    def reset(self) -> None:
        """Forget the text; a generation that is running ends."""
        self._running = None
        self.cache.truncate(0)
        self.tokens = []

    def stream(
        self,
        prompt: str | Sequence[int] | mx.array,
        max_tokens: int = 256,
        sampling: Sampling = Sampling(),
        stop: Sequence[str] = (),
        prefill_step_size: int = PREFILL_STEP,
        prompt_progress_callback: Callable[[int, int], None] | None = None,
    ) -> Iterator[GenerationResponse]:
        """Continue a prompt.

        Args:
            prompt: Text, or token ids.
            max_tokens: Most tokens to generate; -1 for as many as the context holds.
            sampling: How tokens are chosen.
            stop: Strings that end the text (or one); they are not part of it.
            prefill_step_size: Prompt tokens computed at a time.
            prompt_progress_callback: Called with the prompt tokens computed so far and in all.

        Yields:
            A response for every token; the last one names the reason.

        Raises:
            SpecStreamError: If the prompt is empty or longer than the context, before anything
                is computed; at the next token, if the session was reset or given another text.
        """
        text = encode(self.tokenizer, prompt)
        limit = self._room(text, max_tokens)
        self._check_ids(text, sampling)
        if prefill_step_size < 1:
            raise UsageError(f"prefill_step_size cannot be {prefill_step_size}")
        self._cancelled.clear()
        stop = [stop] if isinstance(stop, str) else stop
        return self._stream(
            text, limit, sampling, stop, prefill_step_size, prompt_progress_callback
        )

    def _room(self, text: list[int], max_tokens: int) -> int:
        """How many tokens may be generated after a prompt."""
        if not text:
            raise UsageError("the prompt is empty: give at least one token")
        if max_tokens == 0 or max_tokens < -1:
            raise UsageError(f"max_tokens cannot be {max_tokens} (use -1 for no limit)")
        self.cache.check_room(len(text) + 1)
        room = self.cache.limit - len(text) if self.cache.limit else 1 << 30
        return room if max_tokens == -1 else min(max_tokens, room)

    def _check_ids(self, text: list[int], sampling: Sampling) -> None:
        """Refuse ids that are no tokens of the model: MLX would read and write out of bounds."""
        size = self.target.vocab_size
        for where, ids in (("the prompt", text), ("logit_bias", sampling.logit_bias or ())):
            wrong = [token for token in ids if not 0 <= token < size]
            if wrong:
                raise UsageError(f"{where} has token {wrong[0]}; the model's are 0 to {size - 1}")

    def _stream(
        self,
        text: list[int],
        limit: int,
        sampling: Sampling,
        stop: Sequence[str],
        prefill_step: int,
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[GenerationResponse]:
        me = self._running = object()
        figures = self._figures = Figures(len(text), self._reuse(text))
        self.tokens = list(text)
        pieces, stops = TextStream(self.tokenizer), StopStrings(stop)
        seed = seed_key(fresh_seed() if sampling.seed is None else sampling.seed)
        eos = set(self.tokenizer.eos_token_ids)
        with wired_limit(self.model):
            try:
                self._prefill(text, prefill_step, progress)
                if self._cancelled.is_set():
                    return
                planner = self._planner(text)
                for report in self._decoder.decode(text, self.cache, planner, sampling, seed):
                    figures.add_pass(report, planner)
                    for token, owner, row in zip(
                        report.tokens, report.owners, report.rows, strict=True
                    ):
                        figures.add_token(owner)
                        self.tokens.append(token)
                        piece = "" if token in eos else stops.add(pieces.add(token))
                        reason = self._reason(
                            token in eos or stops.found, figures.generated == limit
                        )
                        if reason and not stops.found:
                            piece += stops.add(pieces.finish()) + stops.finish()
                        yield figures.response(piece, token, owner, report.logits[row], reason)
                        if reason:
                            return
                        if self._running is not me:
                            raise SpecStreamError("the session was reset or given another text")
            finally:
                # Whatever was overshot is forgotten: the cache holds all of the text but its end.
                if self._running is me:
                    self.cache.truncate(min(self.cache.length, len(self.tokens) - 1))

    def _reason(self, stopped: bool, full: bool) -> str | None:
        if stopped:
            return "stop"
        if full:
            return "length"
        return "cancelled" if self._cancelled.is_set() else None

    def _reuse(self, text: list[int]) -> int:
        """Keep the cache's longest common prefix with a new text; returns its length."""
        common = 0
        for ours, theirs in zip(self.tokens[: self.cache.length], text[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        self.cache.truncate(common)
        return common

    def _prefill(
        self, text: list[int], step: int, progress: Callable[[int, int], None] | None
    ) -> None:
        """Compute what the cache lacks of a text, all but its last token."""
        report = progress or (lambda done, total: None)
        report(self.cache.length, len(text))
        while self.cache.length < len(text) - 1 and not self._cancelled.is_set():
            chunk = text[self.cache.length : min(self.cache.length + step, len(text) - 1)]
            self.target.prefill(chunk, self.cache, step)
            mx.clear_cache()
            report(self.cache.length, len(text))
        if not self._cancelled.is_set():
            report(len(text), len(text))

    def _planner(self, text: list[int]) -> Planner:
        return planner_for(self._decoder, self.speculation, self.streams, text)


def encode(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """A prompt's token ids; a text gets the special tokens that it does not already begin with."""
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        return tokenizer.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))
    return np.array(prompt, dtype=np.int64).reshape(-1).tolist()
