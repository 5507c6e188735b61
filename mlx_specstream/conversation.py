"""A conversation with a model: its messages, and one session that remembers what is computed.

Every turn puts the whole conversation through the chat template. The session computes only from
where that differs from the text it holds, which is the new message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from .decode.processors import Sampling
from .errors import SpecStreamError
from .responses import GenerationResponse
from .session import PREFILL_STEP, Session, encode
from .speculation import Speculation
from .streams.folder import StreamSet

Message = dict[str, str]


@dataclass
class Totals:
    """Sums over the answers of a chat."""

    answers: int = 0
    tokens: int = 0
    passes: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    proposed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    trees: dict[str, int] = field(default_factory=dict)

    def add(self, last: GenerationResponse, seconds: float) -> None:
        """Count an answer by its last response."""
        self.answers += 1
        self.tokens += last.generation_tokens
        self.passes += last.passes
        self.prompt_tokens += last.prompt_tokens
        self.cached_tokens += last.cached_tokens
        self.seconds += seconds
        for sums, counts in (
            (self.proposed, last.proposed),
            (self.accepted, last.accepted),
            (self.trees, last.trees),
        ):
            for name, count in counts.items():
                sums[name] = sums.get(name, 0) + count


@dataclass(frozen=True)
class Answer:
    """How the last answer went.

    Args:
        last: Its last response.
        first_token: Seconds from the question to the first token.
    """

    last: GenerationResponse
    first_token: float


class Conversation:
    """Messages, and the session that answers them.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        streams: As for ``Session``.
        speculation: What to propose.
        sampling: How tokens are chosen.
        system: System message, or None.
        max_tokens: Most tokens of an answer; -1 for as many as the context holds.
        max_context: Most tokens of the conversation, at most the model's own context.
        prefill_step: Prompt tokens computed at a time.
        template_config: Further values for the chat template.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        streams: StreamSet | str | None = "auto",
        speculation: Speculation = Speculation(),
        sampling: Sampling = Sampling(),
        system: str | None = None,
        max_tokens: int = -1,
        max_context: int | None = None,
        prefill_step: int = PREFILL_STEP,
        template_config: dict[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.speculation = speculation
        self.sampling = sampling
        self.system = system
        self.max_tokens = max_tokens
        self.turns: list[Message] = []  # user, assistant, user, assistant …
        self.totals = Totals()
        self.answer: Answer | None = None
        self._prefill_step = prefill_step
        self._template_config = template_config or {}
        first = Session(model, tokenizer, streams, speculation, max_context)
        self._new_session = lambda: Session(
            model, tokenizer, first.streams, speculation, max_context
        )
        self.session = first
        self.proposers = self.session.proposers
        self._cancelled = False

    @property
    def messages(self) -> list[Message]:
        """The system message if there is one, and the turns."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.turns

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.turns = []
        self.session.reset()

    def replace(self, messages: list[Message]) -> None:
        """Take another conversation's messages, its system message (or none) included."""
        system = [m["content"] for m in messages if m["role"] == "system"]
        self.reset()
        self.system = system[0] if system else None
        self.turns = [m for m in messages if m["role"] != "system"]

    def cancel(self) -> None:
        """End the answer that is being given, within a pass. Safe in a signal handler."""
        self._cancelled = True
        self.session.cancel()

    def ask(
        self, text: str, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[GenerationResponse]:
        """Answer a message.

        The message and what there is of its answer join the conversation, also if the answer
        is cancelled; if it fails or is cancelled before its first token, the message is taken
        back.

        Args:
            text: The user's message.
            progress: Called with the prompt tokens computed so far and in all.

        Yields:
            A response for every token; none if cancelled before the first.

        Raises:
            SpecStreamError: If the conversation does not fit the context, or the answer fails.
        """
        began, first_token = time.perf_counter(), 0.0
        self.turns.append({"role": "user", "content": text})
        answer, last, intact = "", None, True
        self._cancelled, self.answer = False, None
        try:
            responses = self._respond(progress)  # computes nothing yet
            intact = False
            for last in responses:
                if last.generation_tokens == 1:
                    first_token = time.perf_counter() - began
                answer += last.text
                yield last
            intact = True
        except RuntimeError as error:  # of MLX: out of memory, a kernel that does not compile
            raise SpecStreamError(f"the answer failed: {error}") from error
        finally:
            if not intact:  # interrupted anywhere: what the cache holds is not known
                self.session = self._new_session()
            if last is None:
                self.turns.pop()
            else:
                self.turns.append({"role": "assistant", "content": answer})
                self.answer = Answer(last, first_token)
                self.totals.add(last, time.perf_counter() - began)

    def _respond(self, progress: Callable[[int, int], None] | None) -> Iterator[GenerationResponse]:
        prompt = self.prompt()
        limit = self.session.cache.limit
        if limit is not None and len(prompt) >= limit:
            raise SpecStreamError(
                f"the conversation has {len(prompt)} tokens, the context holds {limit}: "
                "/reset begins a new one (your last message was taken back)"
            )
        responses = self.session.stream(
            prompt,
            self.max_tokens,
            self.sampling,
            prefill_step_size=self._prefill_step,
            prompt_progress_callback=progress,
        )
        if self._cancelled:  # before the session could hear of it
            self.session.cancel()
        return responses

    def prompt(self) -> list[int]:
        """The conversation's tokens, ready for the answer.

        Without a chat template they are the messages one after the other: an answer continues
        its question, and a question begins a line.

        Raises:
            SpecStreamError: If the chat template refuses the conversation.
        """
        if not self.tokenizer.has_chat_template:
            text = ""
            for message in self.messages:
                line_break = "\n" if text and message["role"] != "assistant" else ""
                text += line_break + message["content"]
            return encode(self.tokenizer, text)
        try:
            return self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, **self._template_config
            )
        except Exception as error:  # a template is a program that came with the model
            raise SpecStreamError(f"the model's chat template failed: {error}") from error
