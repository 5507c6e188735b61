"""How this project decodes a prompt, timed: plainly, or as it does by default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..decode.costs import CostCurve
from ..decode.plan import TreePlan
from ..decode.processors import Sampling
from ..responses import GenerationResponse
from ..session import Session
from ..speculation import Speculation
from ..streams.attention import MultiStreamAttention
from ..streams.folder import StreamSet
from ..target import Target
from ..training.report_memory import parameter_bytes
from .bandwidth import mean_context, weights_read
from .memory import Meter

SPECULATIVE, PLAIN = "speculative", "plain"


@dataclass(frozen=True)
class Decoding:
    """One prompt decoded once.

    Args:
        tokens: The ids that were generated, with the end-of-text token.
        first_tokens: How many of them the first pass committed.
        first_seconds: Time to the first token.
        decode_seconds: From the first token to the last.
        passes: Forward passes of the target that committed tokens.
        cost: What these cost in plain passes, by the planner's cost curve; None if unknown.
        proposed: Proposals by proposer; ``accepted`` likewise.
        weights: Bytes of the target's weights.
        added: Bytes of what is added to them: streams, or a draft model.
        kv: Bytes of the KV caches as allocated.
        prefill_peak: Most bytes held up to the first token, by this method alone;
            ``decode_peak`` after it.
        cache: Bytes that MLX's allocator keeps for reuse at the end.
        pass_bytes: Bytes that a pass reads, on average.
    """

    tokens: tuple[int, ...]
    first_tokens: int
    first_seconds: float
    decode_seconds: float
    passes: int
    cost: float | None
    proposed: dict[str, int]
    accepted: dict[str, int]
    weights: int
    added: int
    kv: int
    prefill_peak: int
    decode_peak: int
    cache: int
    pass_bytes: float


class Method(Protocol):
    """A way to decode."""

    name: str

    def decode(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> Decoding:
        """Decode one prompt; ``sampling`` has a seed."""
        ...


class Ours:
    """This project's loop.

    Args:
        name: Of the method.
        model: The target.
        tokenizer: Its tokenizer.
        streams: What is added to it.
        speculation: What is proposed.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        streams: StreamSet,
        speculation: Speculation,
    ):
        self.name = name
        self._session = (model, tokenizer, streams, speculation)
        self._streams = streams
        self._weights, self._read = parameter_bytes(model), weights_read(model)
        self._asking = bytes_of_asking(streams, Target.of(model))

    def decode(self, prompt: Sequence[int], max_tokens: int, sampling: Sampling) -> Decoding:
        meter = Meter()
        session = Session(*self._session)
        said, first = [], 0
        meter.start()
        for last in session.stream(prompt, max_tokens, sampling):
            meter.token()
            said.append(last.token)
            first += last.passes == 1
        meter.stop()
        context = mean_context(len(prompt), len(said))
        row = session.cache.nbytes / session.cache.capacity
        held = self._weights + self._streams.nbytes
        return Decoding(
            tokens=tuple(said),
            first_tokens=first,
            first_seconds=meter.first_seconds,
            decode_seconds=meter.decode_seconds,
            passes=last.passes,
            cost=paid(last.trees, session.costs, context),
            proposed=last.proposed,
            accepted=last.accepted,
            weights=self._weights,
            added=self._streams.nbytes,
            kv=session.cache.nbytes,
            prefill_peak=held + meter.prefill_peak,
            decode_peak=held + meter.decode_peak,
            cache=meter.cache_bytes,
            pass_bytes=self._read + row * context + self._asking * asking_share(last),
        )

    def margin(self, prompt: Sequence[int], position: int, sampling: Sampling) -> float:
        """How far apart the two likeliest tokens are at a position of the text, in nats.

        Args:
            prompt: The prompt.
            position: Of the token, counted from 0 after the prompt.
            sampling: As it was decoded.
        """
        session = Session(*self._session)
        for last in session.stream(prompt, position + 1, sampling):
            scores = last.logprobs
        return float(np.ptp(np.array(mx.topk(scores.astype(mx.float32), 2))))


def paid(trees: dict[str, int], costs: CostCurve | None, context: float) -> float | None:
    """What passes cost, in plain passes; None where costs are not known.

    Args:
        trees: Passes by the tree they verified.
        costs: Of this machine.
        context: Tokens in the cache, on average.
    """
    if costs is None:
        return None
    ratios = {tree: costs.ratio(TreePlan.parse(tree), round(context)) for tree in trees}
    return sum(count * ratios[tree] for tree, count in trees.items())


def asking_share(last: GenerationResponse) -> float:
    """The share of a generation's passes that streams were asked in."""
    asked = sum(n for tree, n in last.trees.items() if "streams" in TreePlan.parse(tree).proposers)
    return asked / last.passes


def bytes_of_asking(streams: StreamSet, target: Target) -> int:
    """Bytes that a pass reads more where streams are asked.

    Deferred streams go through the top layers after the pass, so these are read again. Of a
    table a pass reads a few rows.
    """
    heads = streams.heads
    if heads is None:
        return 0
    again = 0
    if isinstance(heads, MultiStreamAttention) and heads.config.mode == "deferred":
        layers = target.family.layers[-heads.config.layers :]
        again = sum(parameter_bytes(layer) for layer in layers)
    return heads.memory_bytes() + again
