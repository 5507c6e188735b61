"""Making a recording: decode plainly, then ask what each proposer would have had right.

The lookups are asked on the device, position by position, by the very function that fills trees.
The streams' ranks come from the training forward, all positions of an answer at once, each given
the right tokens before the one it predicts: what verification gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..decode.loop import fill_tree
from ..decode.noise import gumbel_rows, seed_key
from ..decode.plan import TreePlan
from ..decode.processors import Sampling
from ..decode.promise import right_path
from ..decode.proposers import Context, NgramLookup, Proposer, TableProposer
from ..decode.proposers.streams import top
from ..session import Session
from ..speculation import Speculation
from ..streams.folder import StreamSet
from ..streams.heads import StreamHeads
from ..target import Target
from ..training.corpus import Corpus, Text
from ..training.forward import draft_scores, stream_hidden
from ..training.report_memory import parameter_bytes
from ..training.trunk import TrunkCache
from .bandwidth import weights_read
from .prompts import Prompt
from .recording import MOST_LOOKED_UP, MOST_RANKS, NOT_RIGHT, RecordedPrompt, Recording

ANCHORS = 64  # positions whose streams run side by side: their scores fill memory


def record(
    model: nn.Module,
    tokenizer: Any,
    name: str,
    streams: StreamSet,
    prompts: Iterable[Prompt],
    max_tokens: int,
    temp: float = 0.0,
    seed: int = 0,
    done: Callable[[], None] = lambda: None,
) -> Recording:
    """Answer prompts plainly and record what proposers would have had right.

    Args:
        model: An mlx-lm model of a supported family.
        tokenizer: Its tokenizer.
        name: Of the model.
        streams: Whose proposals are recorded.
        prompts: What to answer.
        max_tokens: Most tokens of an answer.
        temp: Temperature; 0 is greedy.
        seed: Of sampled answers.
        done: Called after each prompt.

    Raises:
        SpecStreamError: If a prompt is empty or longer than the context.
    """
    sampling = Sampling(temp=temp, seed=seed)
    session = Session(model, tokenizer, StreamSet(), Speculation(enabled=False))
    lookups: list[Proposer] = [NgramLookup()]
    if streams.table is not None:
        lookups.append(TableProposer(streams.table))
    heads = streams.heads
    recorded = []
    for prompt in prompts:
        answer = [
            response.token
            for response in session.stream(
                prompt.tokens, max_tokens, sampling, prefill_step_size=512
            )
        ]
        right, filled = lookups_right(lookups, session.target, prompt.tokens, answer)
        ranks = [] if heads is None else stream_ranks(heads, prompt.tokens, answer, sampling)
        recorded.append(
            RecordedPrompt(
                *(prompt.name, prompt.category, len(prompt.tokens), answer, right, filled, ranks)
            )
        )
        done()
    if heads is not None:
        heads.let_go()
    rates = heads.config.rates if heads is not None else None
    return Recording(
        model=name,
        temp=temp,
        seed=seed,
        lookups="|".join(lookup.name for lookup in lookups),
        gamma=0 if heads is None else heads.config.gamma,
        rates=None if rates is None else [list(ranks) for ranks in rates],
        rides_along=heads is None or heads.rides_along,
        read_share=0.0 if heads is None else bytes_to_propose(heads) / weights_read(model),
        held_share=streams.nbytes / parameter_bytes(model),
        prompts=recorded,
    )


def lookups_right(
    lookups: Sequence[Proposer], target: Target, prompt: Sequence[int], answer: Sequence[int]
) -> tuple[list[int], list[int]]:
    """What the lookups would have had right.

    Args:
        lookups: In the order in which they are asked.
        target: The target.
        prompt: Token ids.
        answer: Token ids.

    Returns:
        For each position of the answer how many tokens of the chain are the answer's, and which
        of the lookups filled it (-1: none had anything to propose).
    """
    plan = TreePlan.parse(f"{'|'.join(p.name for p in lookups)}:{MOST_LOOKED_UP}")
    memories = [lookup.start(target) for lookup in lookups]
    history = mx.array([*prompt, *answer], dtype=mx.int32)
    right, filled = [], []
    for place in range(len(answer)):
        root = mx.array(len(prompt) + place - 1, dtype=mx.int32)
        context = Context(target, history, root, [], 0, Sampling(), None)
        tokens, _, sources, _ = fill_tree(lookups, plan, memories, context)
        source, count = cast(list[int], sources[0].tolist())
        chain = cast(list[int], tokens.tolist())[1:]
        agreed = right_path(plan.branches[0], chain, answer[place:])
        right.append(len(agreed) if count else 0)
        filled.append(source if count else NOT_RIGHT)
    return right, filled


def stream_ranks(
    heads: StreamHeads, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> list[list[int]]:
    """Where the right token stands among each stream's candidates.

    Args:
        heads: The streams.
        prompt: Token ids.
        answer: Token ids.
        sampling: How the answer's tokens were chosen.

    Returns:
        For each position of the answer and each stream the rank, -1 if it is past the first 8 or
        the answer has ended there. At the first position streams know nothing yet.
    """
    gamma = heads.config.gamma
    ranks = [[NOT_RIGHT] * gamma]
    text = Text(np.array([*prompt, *answer], dtype=np.int32), len(prompt), "")
    if not text.anchors:
        return ranks[: len(answer)]
    trunk = TrunkCache(None, heads.target, Corpus((text,), ""), heads.config.trunk_layers)
    states = trunk.read(0, heads.config.method == "linear")
    ended = np.concatenate([text.tokens, np.full(gamma, NOT_RIGHT, dtype=np.int32)])
    every = np.array(text.anchors)
    for anchors in np.split(every, range(ANCHORS, len(every), ANCHORS)):
        ahead = ended[anchors[:, None] + 1 + np.arange(gamma + 1)]
        hidden = stream_hidden(heads, states, text.anchors.start, text.tokens, anchors)
        scores = draft_scores(heads, hidden, mx.array(np.maximum(ahead[:, :-1], 0)))
        if not sampling.greedy:
            scores = scores * (1 / sampling.temp) + _noise(heads, sampling, anchors)
        best = top(scores.reshape(-1, scores.shape[-1]), MOST_RANKS)
        proposed = np.array(heads.draft_token(best)).reshape(len(anchors), gamma, -1)
        right = proposed == ahead[:, 1:, None]
        ranks += np.where(right.any(-1), right.argmax(-1), NOT_RIGHT).tolist()
    return ranks


def _noise(heads: StreamHeads, sampling: Sampling, anchors: np.ndarray) -> mx.array:
    """The noise of the tokens that streams predict, ``(anchors, gamma, draft vocabulary)``.

    Args:
        heads: The streams.
        sampling: With the seed.
        anchors: Consecutive positions t: stream j predicts the token at t + 1 + j.
    """
    gamma = heads.config.gamma
    seed = mx.array(seed_key(sampling.seed or 0), dtype=mx.uint32)
    first = mx.array(int(anchors[0]) + 2, dtype=mx.int32)
    rows = gumbel_rows(seed, first, len(anchors) + gamma - 1, heads.target.vocab_size)
    columns = mx.stack([heads.draft_columns(row) for row in rows])
    return columns[mx.arange(len(anchors))[:, None] + mx.arange(gamma)[None]]


def bytes_to_propose(heads: StreamHeads) -> int:
    """Bytes of weights that streams read to propose, beside those of the pass itself.

    Fused streams run in the pass: their rows cost arithmetic, not reading, and are not counted.
    """
    config, target = heads.config, heads.target
    nbytes = heads.memory_bytes()
    if config.method == "attention" and config.mode == "deferred":
        nbytes += sum(parameter_bytes(block) for block in target.family.layers[-config.layers :])
    if config.draft_vocab is None:
        nbytes += parameter_bytes(target.family.head_matrix)
    return nbytes
