"""Runs in turn: every method decodes every prompt, in an order that rotates.

Each method first decodes the prompt once untimed (round 0), so that no later run pays for
tracing: traces depend on the method's trees and on the length of the text. Every run's token ids,
those of round 0 too, are compared with what plain decoding gave there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from ..decode.processors import Sampling
from .methods import Decoding, Method, Ours
from .prompts import Prompt


@dataclass(frozen=True)
class Difference:
    """Where a text first differs from plain decoding's.

    Args:
        prompt: Name of the prompt.
        position: Of the token, counted from 0 after the prompt.
        margin: How far apart plain decoding's two likeliest tokens are there, in nats; None where
            only one of the texts goes on.
    """

    prompt: str
    position: int
    margin: float | None


@dataclass(frozen=True)
class Run:
    """One prompt decoded once by one method.

    Args:
        bits: Of the target's weights in memory.
        context: Tokens that the prompt was padded to, or None.
        method: Name of the method.
        prompt: Name of the prompt; its ``category``; its ``prompt_tokens``.
        round: 0 is the warm-up, which is not timed.
        decoding: What came of it.
        difference: None if the text is plain decoding's.
    """

    bits: int
    context: int | None
    method: str
    prompt: str
    category: str
    prompt_tokens: int
    round: int
    decoding: Decoding
    difference: Difference | None

    @property
    def timed(self) -> bool:
        """Whether its times count."""
        return self.round > 0


def measure(
    plain: Ours,
    others: Sequence[Method],
    prompts: Iterable[Prompt],
    *,
    bits: int,
    context: int | None = None,
    rounds: int = 3,
    max_tokens: int = 128,
    sampling: Sampling = Sampling(seed=0),
    done: Callable[[Run], None] = lambda run: None,
) -> list[Run]:
    """Decode prompts by all methods.

    Args:
        plain: Plain decoding, which says what the right tokens are.
        others: The other methods.
        prompts: What to decode.
        bits: Of the target's weights, to note.
        context: What the prompts were padded to, to note.
        rounds: Timed runs of each method and prompt.
        max_tokens: Most tokens of an answer.
        sampling: With a seed; prompt n has that seed + n.
        done: Called with each run as it ends, so that it is not lost if a later one fails.
    """
    methods: list[Method] = [plain, *others]
    runs: list[Run] = []
    for number, prompt in enumerate(prompts):
        chosen = replace(sampling, seed=(sampling.seed or 0) + number)
        right: tuple[int, ...] | None = None
        margins: dict[int, float] = {}  # found once for each position
        for turn in range(rounds + 1):
            shift = (number + turn) % len(methods) if turn else 0  # plain decoding is the first
            for method in methods[shift:] + methods[:shift]:
                decoding = method.decode(prompt.tokens, max_tokens, chosen)
                right = decoding.tokens if right is None else right
                difference = None
                at = first_difference(right, decoding.tokens)
                if at is not None:
                    if at < len(right) and at not in margins:
                        margins[at] = plain.margin(prompt.tokens, at, chosen)
                    difference = Difference(prompt.name, at, margins.get(at))
                run = Run(bits, context, method.name, prompt.name, prompt.category,
                          len(prompt.tokens), turn, decoding, difference)  # fmt: skip
                runs.append(run)
                done(run)
    return runs


def first_difference(right: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The first position at which two texts differ, their ends included; None if nowhere."""
    pairs = enumerate(zip_longest(right, tokens))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), None)
