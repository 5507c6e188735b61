"""What a generation yields: a response for every token, with the figures so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from .decode.planner import Planner
from .decode.report import PassReport


@dataclass
class GenerationResponse:
    """One generated token, in mlx-lm's terms and ours.

    Args:
        text: The text it completes; may be empty.
        token: Its id.
        logprobs: Log-probabilities it was chosen from, ``(vocabulary,)``.
        from_draft: Whether it was proposed (and accepted).
        prompt_tokens: Tokens of the prompt.
        prompt_tps: Prompt tokens computed per second, until the first token.
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
        trees: Passes so far by the tree they verified, ``"none"`` for plain ones.
        why: With the last response: why the planner would go on as it does.
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
    trees: dict[str, int] = field(default_factory=dict)
    why: str = ""


@dataclass
class Figures:
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
    trees: dict[str, int] = field(default_factory=dict)
    why: Callable[[], str] = str

    def add_pass(self, report: PassReport, planner: Planner) -> None:
        tree = str(report.plan)
        self.trees[tree] = self.trees.get(tree, 0) + 1
        self.why = planner.explain
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
            prompt_tps=(self.prompt_tokens - self.cached_tokens) / (self.first_read - self.began),
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
            trees=dict(self.trees),
            why=self.why() if reason else "",
        )
