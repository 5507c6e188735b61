"""A session: one text in progress on one model, and the cache of what is computed of it.

A prompt that begins like the text before it (the next turn of a conversation) is computed only
from where it differs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import wired_limit

from .decode.loop import Decoder, PassReport
from .decode.noise import fresh_seed, seed_key
from .decode.plan import TreePlan
from .decode.planner import AutoPlanner, FixedPlanner, LookupShadow, Planner
from .decode.processors import Sampling
from .decode.proposers import NgramLookup, Proposer, StreamProposer
from .decode.text import StopStrings, TextStream
from .errors import SpecStreamError, UsageError
from .streams import StreamHeads
from .streams.files import load_streams
from .target import Target

PREFILL_STEP = 512


@dataclass(frozen=True)
class Speculation:
    """What is proposed. Any choice gives the same text; only the speed differs.

    Args:
        enabled: False decodes plainly.
        tree: ``"auto"`` decides from pass to pass; else the tree of every pass, such as
            ``"ngram:4"`` or ``"ngram:3,streams:2x1x1"`` (see ``TreePlan.parse``).
        num_draft_tokens: Proposals of a chain when ``tree`` is ``"auto"``.
        ngram_min: Shortest ending of the text that n-gram lookup follows, in tokens.
        ngram_max: Longest ending that it tells apart.
        compile: Trace each kind of pass once with ``mx.compile``.
    """

    enabled: bool = True
    tree: str = "auto"
    num_draft_tokens: int = 4
    ngram_min: int = 2
    ngram_max: int = 4
    compile: bool = True


@dataclass
class GenerationResponse:
    """One generated token, in mlx-lm's terms and ours.

    Args:
        text: The text it completes; may be empty.
        token: Its id.
        logprobs: Log-probabilities it was chosen from, ``(vocabulary,)``.
        from_draft: Whether it was proposed (and accepted).
        prompt_tokens: Tokens of the prompt.
        prompt_tps: Prompt tokens per second until the first token.
        generation_tokens: Tokens generated so far.
        generation_tps: Tokens per second after the first pass.
        peak_memory: Peak memory of the process so far, in GB.
        finish_reason: ``"stop"``, ``"length"`` or ``"cancelled"`` at the last response.
        passes: Forward passes so far that committed tokens.
        tokens_per_pass: Committed tokens per pass so far.
        proposed: Proposals made so far, by proposer.
        accepted: Proposals accepted so far, by proposer.
        proposer: Who proposed this token, or None.
        cached_tokens: Prompt tokens that did not have to be computed again.
    """

    text: str
    token: int
    logprobs: mx.array
    from_draft: bool
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    peak_memory: float
    finish_reason: str | None
    passes: int
    tokens_per_pass: float
    proposed: dict[str, int]
    accepted: dict[str, int]
    proposer: str | None = None
    cached_tokens: int = 0


@dataclass
class _Figures:
    """Running figures of one generation."""

    prompt_tokens: int
    cached_tokens: int
    began: float = field(default_factory=time.perf_counter)
    first_read: float = 0.0
    now: float = 0.0
    passes: int = 0
    generated: int = 0
    first: int = 0  # tokens of the first pass, which the prompt's time pays for
    proposed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)

    def add_pass(self, report: PassReport) -> None:
        self.passes += 1
        self.now = time.perf_counter()
        if self.passes == 1:
            self.first, self.first_read = len(report.tokens), self.now
        for name, count in report.proposed.items():
            self.proposed[name] = self.proposed.get(name, 0) + count
            self.accepted.setdefault(name, 0)

    def add_token(self, owner: str | None) -> None:
        self.generated += 1
        if owner is not None:
            self.accepted[owner] += 1

    def response(
        self, text: str, token: int, owner: str | None, scores: mx.array, reason: str | None
    ) -> GenerationResponse:
        later = max(self.generated - self.first, 0)
        return GenerationResponse(
            text=text,
            token=token,
            logprobs=scores - mx.logsumexp(scores),
            from_draft=owner is not None,
            prompt_tokens=self.prompt_tokens,
            prompt_tps=self.prompt_tokens / (self.first_read - self.began),
            generation_tokens=self.generated,
            generation_tps=later / (self.now - self.first_read) if later else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=reason,
            passes=self.passes,
            tokens_per_pass=self.generated / self.passes,
            proposed=dict(self.proposed),
            accepted=dict(self.accepted),
            proposer=owner,
            cached_tokens=self.cached_tokens,
        )


class Session:
    """Generates text with a model and remembers what its KV cache holds.

    Args:
        model: An mlx-lm model of a supported family.
        tokenizer: Its tokenizer.
        streams: Stream heads for the model, a streams folder, or None.
        speculation: What to propose.
        max_context: Most tokens of text, at most the model's own context.

    Raises:
        SpecStreamError: If the model or the streams cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        streams: StreamHeads | str | Path | None = None,
        speculation: Speculation = Speculation(),
        max_context: int | None = None,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.target = Target.of(model)
        if isinstance(streams, (str, Path)):
            streams = load_streams(streams, self.target, tokenizer)
        self.speculation = speculation
        self.cache = self.target.make_cache(limit=max_context)
        self.tokens: list[int] = []  # the text; the cache holds the first ``cache.length``
        self._decoder = decoder_for(self.target, streams, speculation)
        self._plan = plan_for(self._decoder.proposers, speculation)
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """End the generation that is running, within a pass. Safe from any thread."""
        self._cancelled.set()

    def reset(self) -> None:
        """Forget the text."""
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
            stop: Strings that end the text; they are not part of it.
            prefill_step_size: Prompt tokens computed at a time.
            prompt_progress_callback: Called with the prompt tokens computed so far and in all.

        Yields:
            A response for every token; the last one names the reason.

        Raises:
            SpecStreamError: If the prompt is empty or longer than the context, before anything
                is computed.
        """
        text = encode(self.tokenizer, prompt)
        limit = self._room(text, max_tokens)
        self._check_ids(text, sampling)
        if prefill_step_size < 1:
            raise UsageError(f"prefill_step_size cannot be {prefill_step_size}")
        self._cancelled.clear()
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
        figures = _Figures(len(text), self._reuse(text))
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
                    figures.add_pass(report)
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
            finally:
                # Whatever was overshot is forgotten: the cache holds all of the text but its end.
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
        report(len(text), len(text))

    def _planner(self, text: list[int]) -> Planner:
        if not self._plan.branches or self.speculation.tree != "auto":
            return FixedPlanner(self._plan)
        shadow = LookupShadow(self.speculation.ngram_min, self.speculation.ngram_max)
        return AutoPlanner(self._plan, self._decoder.clock, shadow, text)


def encode(tokenizer: Any, prompt: str | Sequence[int] | mx.array) -> list[int]:
    """A prompt's token ids; a text gets the special tokens that it does not already begin with."""
    if isinstance(prompt, str):
        bos = tokenizer.bos_token
        return tokenizer.encode(prompt, add_special_tokens=not (bos and prompt.startswith(bos)))
    return np.array(prompt, dtype=np.int64).reshape(-1).tolist()


def decoder_for(target: Target, streams: StreamHeads | None, speculation: Speculation) -> Decoder:
    """The target's decoder for a set of proposers, made once so that its traces are reused."""
    if not speculation.enabled:
        streams = None
    lookup = (speculation.ngram_min, speculation.ngram_max)
    key = (id(streams), speculation.enabled, lookup, speculation.compile)
    if key not in target.compiled:
        proposers: list[Proposer] = []
        if speculation.enabled:
            proposers.append(NgramLookup(speculation.ngram_min, speculation.ngram_max))
        if streams is not None:
            proposers.append(StreamProposer(streams))
        target.compiled[key] = Decoder(target, proposers, speculation.compile)
    return target.compiled[key]


def plan_for(proposers: Sequence[Proposer], speculation: Speculation) -> TreePlan:
    """The tree that a speculation asks for, checked against the proposers that there are.

    Raises:
        UsageError: If the tree names a proposer that is missing or goes deeper than it can.
    """
    if not speculation.enabled:
        return TreePlan()
    if speculation.num_draft_tokens < 1:
        raise UsageError(
            f"num_draft_tokens cannot be {speculation.num_draft_tokens}: "
            "to decode without proposals turn speculation off"
        )
    depths = {p.name: p.max_depth for p in proposers}
    if speculation.tree == "auto":
        chain = speculation.num_draft_tokens
        parts = [f"{name}:{min(chain, depth or chain)}" for name, depth in depths.items()]
        return TreePlan.parse(",".join(parts))
    plan = TreePlan.parse(speculation.tree)
    for branch in plan.branches:
        if branch.proposer not in depths:
            raise UsageError(
                f"the tree '{speculation.tree}' asks for '{branch.proposer}', "
                f"but there is only {', '.join(depths) or 'no proposer'}"
            )
        deepest, depth = depths[branch.proposer], TreePlan((branch,)).layout.max_depth
        if deepest is not None and depth > deepest:
            raise UsageError(
                f"the tree '{speculation.tree}' is {depth} deep; these {branch.proposer} "
                f"predict {deepest} tokens ahead"
            )
    return plan


__all__ = ["GenerationResponse", "Session", "SpecStreamError", "Speculation"]
