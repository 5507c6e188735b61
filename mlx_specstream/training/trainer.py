"""Training streams: gradients only in the streams, the target frozen and possibly quantized.

A step takes a few texts and some anchors in each, the same for the same seed and step number, so
a run that was stopped anywhere goes on exactly where its last checkpoint was.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import AdamW, clip_grad_norm
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from ..errors import SpecStreamError
from ..streams.files import Identity, save_streams
from ..streams.heads import StreamHeads
from ..target.vector_math import logsumexp, softmax
from .corpus import Corpus
from .evaluate import Quality, evaluate
from .forward import draft_scores, stream_hidden
from .trunk import TrunkCache

STATE = "training.json"
OPTIMIZER = "optimizer.safetensors"


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


def planned_steps(folder: Path) -> int | None:
    """The steps that a folder's checkpoint was planned for; None if there is none."""
    for name in ("checkpoint", "checkpoint.old"):
        try:
            return int(json.loads((folder / name / STATE).read_text())["plan"]["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


class Trainer:
    """Trains streams on a trunk cache.

    Args:
        heads: The streams, changed in place.
        trunk: The trunk's states of the whole corpus.
        plan: How to train.
        folder: Where checkpoints go; the best streams so far are the folder itself.
        identity: The target's, for the streams folder.

    Raises:
        SpecStreamError: If the corpus is too small, or a checkpoint belongs to another run.
    """

    def __init__(
        self, heads: StreamHeads, trunk: TrunkCache, plan: Plan, folder: Path, identity: Identity
    ):
        self.heads, self.trunk, self.plan = heads, trunk, plan
        self.folder, self.identity = folder, identity
        self.progress = Progress()
        self.optimizer = AdamW(learning_rate=plan.rate(0), weight_decay=plan.weight_decay)
        self.valid, self.train = split(trunk.corpus, plan.held_out, plan.seed)
        self._draft_index = self._index()
        self._loss_and_grad = nn.value_and_grad(heads, self._loss)

    def run(
        self,
        report: Callable[[Progress], None] | None = None,
        validated: Callable[[Quality], None] | None = None,
        until: float = math.inf,
    ) -> Progress:
        """Train to the end of the plan, or until it no longer gets better.

        Args:
            report: Called after every step.
            validated: Called after every validation.
            until: A ``time.perf_counter`` after which to stop at a checkpoint.

        Raises:
            SpecStreamError: If the loss is not a number; the last checkpoint stays.
        """
        losses: list[float] = []
        while self.progress.step < self.plan.steps and self.progress.stale < self.plan.patience:
            began = time.perf_counter()
            losses.append(self.step())
            self.progress.seconds += time.perf_counter() - began
            self.progress.loss = float(np.mean(losses))
            if report:
                report(self.progress)
            late = time.perf_counter() > until
            last = self.progress.step == self.plan.steps
            if self.progress.step % self.plan.validate_every == 0 or last or late:
                quality = self.validate()
                losses.clear()
                if validated:
                    validated(quality)
            if late:
                break
        return self.progress

    def step(self) -> float:
        """One step of the optimizer; returns its loss.

        Raises:
            SpecStreamError: If the loss is not a number.
        """
        plan, number = self.plan, self.progress.step
        chance = np.random.default_rng([plan.seed, number])
        total, grads, count = 0.0, None, 0
        for _ in range(plan.accumulate):
            chosen = chance.choice(self.train, min(plan.texts, len(self.train)), replace=False)
            batch = [(n, self._draw(n, chance)) for n in chosen.tolist()]
            loss, grad = self._loss_and_grad(batch)
            mx.eval(loss, grad)
            total += loss.item()
            grads = grad if grads is None else tree_map(mx.add, grads, grad)
            count += sum(len(anchors) for _, anchors in batch)
        if not math.isfinite(total):
            raise SpecStreamError(
                f"the loss is {total} at step {number}: lower --learning-rate and run the command "
                "again, it resumes from the last checkpoint"
            )
        scale = 1 / plan.accumulate
        grads, _ = clip_grad_norm(tree_map(lambda g: g * scale, grads), plan.clip)
        self.optimizer.learning_rate = plan.rate(number)
        self.optimizer.update(self.heads, grads)
        mx.eval(self.heads.trainable_parameters(), self.optimizer.state)
        self.progress.step += 1
        self.progress.anchors += count
        return total * scale

    def validate(self) -> Quality:
        """Measure on held-out texts, keep the streams if they are the best, and checkpoint."""
        quality = evaluate(self.heads, self.trunk, self.valid)
        progress = self.progress
        value = quality.tokens_per_pass["top-4"]
        progress.history.append(
            {
                "step": progress.step,
                "loss": progress.loss,
                "accuracy": quality.accuracy,
                "tokens_per_pass": quality.tokens_per_pass,
            }
        )
        better = value > progress.best + 1e-3
        progress.stale = 0 if better else progress.stale + 1
        if better:
            progress.best = value
            rates = tuple(map(tuple, quality.rates.round(4).tolist()))
            self.heads.config = replace(self.heads.config, rates=rates)
            extra = {"training": self.summary()}
            save_streams(self.folder, self.heads, self.identity, extra, mx.float16)
        self.checkpoint()
        return quality

    def summary(self) -> dict[str, Any]:
        """What the streams folder says of its training."""
        held_out = [self.trunk.corpus.texts[number].digest for number in self.valid]
        return {"plan": asdict(self.plan), "held_out": held_out, **asdict(self.progress)}

    def checkpoint(self) -> None:
        """Write everything that a resumed run needs: the whole of it or nothing.

        Raises:
            SpecStreamError: If it cannot be written.
        """
        place, fresh = self.folder / "checkpoint", self.folder / "checkpoint.new"
        try:
            shutil.rmtree(fresh, ignore_errors=True)
            save_streams(fresh, self.heads, self.identity)
            state = dict(tree_flatten(self.optimizer.state))
            mx.save_safetensors(str(fresh / OPTIMIZER), state)
            (fresh / STATE).write_text(json.dumps(self.summary()))
            old = self.folder / "checkpoint.old"
            shutil.rmtree(old, ignore_errors=True)
            if place.exists():
                os.replace(place, old)
            os.replace(fresh, place)
            shutil.rmtree(old, ignore_errors=True)
        except (OSError, RuntimeError) as error:
            raise SpecStreamError(f"cannot write a checkpoint to {place}: {error}") from error

    def resume(self) -> bool:
        """Go on from the folder's checkpoint if there is one.

        Raises:
            SpecStreamError: If it belongs to another plan or cannot be read.
        """
        place = self.folder / "checkpoint"
        if not place.exists():  # killed between two renames
            place = self.folder / "checkpoint.old"
        if not (place / STATE).exists():
            return False
        try:
            state = json.loads((place / STATE).read_text())
            theirs = Plan(**state.pop("plan"))
            state.pop("held_out")
            weights: Any = mx.load(str(place / "streams.safetensors"))
            optimizer: Any = mx.load(str(place / OPTIMIZER))
            progress = Progress(**state)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
            raise SpecStreamError(f"cannot resume from {place}: {error}; remove it") from error
        if replace(theirs, steps=self.plan.steps) != self.plan:
            raise SpecStreamError(
                f"{place} is of a run with other settings: choose another --out, or remove it"
            )
        weights.pop("draft_vocab", None)
        self.heads.load_weights(list(weights.items()))
        self.optimizer.state = tree_unflatten(list(optimizer.items()))
        self.progress = progress
        mx.eval(self.heads.parameters(), self.optimizer.state)
        return True

    def _draw(self, number: int, chance: np.random.Generator) -> np.ndarray:
        """Some anchors of a text, in order."""
        every = self.trunk.corpus.texts[number].anchors
        count = min(self.plan.anchors, len(every))
        return np.sort(chance.choice(np.array(every), count, replace=False))

    def _loss(self, batch: list[tuple[int, np.ndarray]]) -> mx.array:
        """Mean cross-entropy of the predictions at some anchors of some texts.

        The labels are the target's tokens, mixed with its distribution where the plan says so.
        What the draft vocabulary does not hold cannot be predicted and does not count.
        """
        gamma, soft = self.heads.config.gamma, self.plan.soft
        hidden, teachers, before, labels = [], [], [], []
        for number, anchors in batch:
            text = self.trunk.corpus.texts[number]
            places = anchors[:, None] + 1 + np.arange(gamma + 1)
            inside = places < len(text.tokens)
            ahead = text.tokens[np.minimum(places, len(text.tokens) - 1)]
            before.append(ahead[:, :-1])
            labels.append(np.where(inside[:, 1:], self._draft_index[ahead[:, 1:]], -1))
            states = self.trunk.read(number, self.heads.config.method == "linear")
            first = text.anchors.start
            hidden.append(stream_hidden(self.heads, states, first, text.tokens, anchors))
            if soft:  # what a stream predicts is what the target says one row before
                rows = np.minimum(places[:, :-1] - first, len(text.anchors) - 1)
                teachers.append(states.final[mx.array(rows)])
        target = np.concatenate(labels)
        scores = draft_scores(self.heads, mx.concatenate(hidden), mx.array(np.concatenate(before)))
        known = mx.array(target >= 0)
        right = mx.array(np.maximum(target, 0))[..., None]
        expected = mx.take_along_axis(scores, right, axis=-1)[..., 0]
        if soft:
            shares = softmax(self.heads.draft_logits(mx.concatenate(teachers)))
            said = mx.sum(mx.stop_gradient(shares) * scores, axis=-1)
            expected = soft * said + (1 - soft) * expected
        losses = logsumexp(scores) - expected
        return mx.sum(mx.where(known, losses, 0.0)) / mx.maximum(mx.sum(known), 1)

    def _index(self) -> np.ndarray:
        """For every token its place in the draft vocabulary, or -1."""
        size, ids = self.heads.target.vocab_size, self.heads.config.draft_vocab
        index = np.full(size, -1, dtype=np.int32)
        index[np.arange(size) if ids is None else list(ids)] = np.arange(
            size if ids is None else len(ids)
        )
        return index
