"""Training streams: gradients only in the streams, the target frozen and possibly quantized.

A step takes a few texts and some anchors in each, the same for the same seed and step number, so
a run that was stopped anywhere goes on exactly where its last checkpoint was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import AdamW, clip_grad_norm
from mlx.utils import tree_map

from ..errors import SpecStreamError
from ..streams.files import Identity, save_streams
from ..streams.heads import StreamHeads
from ..target.vector_math import logsumexp, softmax
from . import checkpoint
from .evaluate import Quality, evaluate
from .forward import draft_scores, stream_hidden
from .plan import Plan, Progress, split
from .trunk import TrunkCache


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
        checkpoint.save(
            self.folder, self.heads, self.identity, self.optimizer.state, self.summary()
        )

    def resume(self) -> bool:
        """Go on from the folder's checkpoint if there is one.

        Raises:
            SpecStreamError: If it belongs to another plan or cannot be read.
        """
        found = checkpoint.load(self.folder)
        if found is None:
            return False
        if replace(found.plan, steps=self.plan.steps) != self.plan:
            raise SpecStreamError(
                f"{self.folder} has a checkpoint of a run with other settings: "
                "choose another --out, or remove it"
            )
        self.heads.load_weights(list(found.weights.items()))
        self.optimizer.state = found.optimizer
        self.progress = found.progress
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
