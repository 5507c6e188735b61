"""How streams are trained, how far a run got, and what it trains and validates with."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..errors import SpecStreamError
from .corpus import Corpus


@dataclass(frozen=True)
class Plan:
    """How to train.

    Args:
        steps: Steps of the optimizer in all.
        texts: Texts computed together.
        accumulate: How often that is done in a step; the gradients are averaged.
        anchors: Anchors of a text.
        learning_rate: At its highest.
        warm_up: Steps until it is reached; from then on it falls to nothing, along a cosine.
        clip: Largest norm of the gradient.
        weight_decay: Of AdamW.
        validate_every: Steps between validations, each with a checkpoint.
        patience: Validations without progress after which to stop.
        held_out: Texts to validate with.
        soft: Weight of the target's own distribution in the labels; the rest is its token.
        seed: Of the choice of texts and anchors.
    """

    steps: int = 2000
    texts: int = 4
    accumulate: int = 1
    anchors: int = 32
    learning_rate: float = 1e-3
    warm_up: int = 50
    clip: float = 1.0
    weight_decay: float = 0.01
    validate_every: int = 250
    patience: int = 4
    held_out: int = 64
    soft: float = 0.5
    seed: int = 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(self.steps - self.warm_up, 1)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


@dataclass
class Progress:
    """Where a run is.

    Args:
        step: Steps done.
        loss: Mean loss of the steps since the last validation, in nats a prediction.
        anchors: Anchors seen.
        seconds: Time spent on steps.
        best: Best expected tokens per pass of a top-4 tree so far.
        stale: Validations since.
        history: One entry a validation: step, loss, accuracy, tokens per pass.
    """

    step: int = 0
    loss: float = 0.0
    anchors: int = 0
    seconds: float = 0.0
    best: float = 0.0
    stale: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


def draft_vocabulary(corpus: Corpus, size: int, known: Iterable[int] = ()) -> tuple[int, ...]:
    """The ``size`` most frequent tokens of the answers, by id.

    Args:
        corpus: The texts.
        size: How many, at most.
        known: Taken in, in this order, where the answers have fewer tokens than that.
    """
    counts: Counter[int] = Counter()
    for text in corpus:
        counts.update(text.tokens[text.answer :].tolist())
    chosen = dict.fromkeys(token for token, _ in counts.most_common(size))
    chosen |= dict.fromkeys(known)
    return tuple(sorted(list(chosen)[:size]))


def split(corpus: Corpus, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the texts to validate with and to train with, drawn at random by their content.

    When the corpus grows, no text that was trained with becomes one to validate with, so that
    streams can be trained on.

    Raises:
        SpecStreamError: If the corpus has too few texts with anchors.
    """
    drawn = {
        number: hashlib.sha256(f"{seed};{text.digest}".encode()).digest()
        for number, text in enumerate(corpus)
        if len(text.anchors)
    }
    usable = sorted(drawn, key=drawn.__getitem__)
    if not 0 < held_out < len(usable):
        raise SpecStreamError(
            f"{len(usable)} texts with answers are too few to train with and hold out "
            f"{held_out}: distil more prompts"
        )
    return usable[:held_out], usable[held_out:]
