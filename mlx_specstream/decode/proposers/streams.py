"""The target's own streams as a proposer: candidates for each depth, linked by the correction."""

from __future__ import annotations

import mlx.core as mx

from ...errors import UsageError
from ...streams.heads import StreamHeads
from ...target import PassOutput, Target
from ..plan import Branch
from ..verify import Verdict
from .base import Context, Proposals


class StreamProposer:
    """Propose the likeliest tokens of each stream.

    Stream j speaks about depth j. Its candidates below a node are scored with that node's token
    (the token-conditioned correction of docs/streams.md) and, when sampling, with the noise of
    their position, so that what is proposed is what the target would sample.

    Args:
        streams: Heads made for the target.
    """

    name = "streams"

    def __init__(self, streams: StreamHeads):
        self.streams = streams
        self.max_depth = streams.config.gamma
        self.scratch_rows = streams.scratch_rows

    def start(self, target: Target) -> tuple[mx.array, ...]:
        """Whether anything has been observed (bool), and what."""
        return (mx.array(False), self.streams.blank())

    def propose(self, branch: Branch, memory: tuple[mx.array, ...], context: Context) -> Proposals:
        ready, seen = memory
        levels = nodes_by_depth(branch)
        if len(levels) > self.max_depth:
            raise UsageError(
                f"the streams reach {self.max_depth} tokens ahead, the tree asks for {len(levels)}"
            )
        root = context.history[context.length]
        hidden, kv = self.streams.draft_hidden(
            seen, root, context.kv, context.length, context.extent
        )
        base = self.streams.draft_logits(hidden)  # (gamma, draft vocabulary)
        tokens: list[mx.array] = [root] * len(branch)
        for depth, nodes in enumerate(levels):
            # The parents at this depth, each once, and which of them each node hangs on.
            parents = sorted({branch.parents[n] for n in nodes})
            parent_tokens = mx.stack([root if p < 0 else tokens[p] for p in parents])
            scores = base[depth][None] + self.streams.correction(parent_tokens)
            if context.noise is not None:
                noise = self.streams.draft_columns(context.noise[depth])
                scores = scores * (1 / context.sampling.temp) + noise[None]
            best = top(scores, 1 + max(branch.ranks[n] for n in nodes))
            for n in nodes:
                # A tree wider than the draft vocabulary repeats its last candidate.
                rank = min(branch.ranks[n], best.shape[1] - 1)
                choice = best[parents.index(branch.parents[n]), rank]
                tokens[n] = self.streams.draft_token(choice)
        return Proposals(mx.stack(tokens), mx.broadcast_to(ready, (len(branch),)), kv)

    def observe(
        self, memory: tuple[mx.array, ...], output: PassOutput, verdict: Verdict
    ) -> tuple[mx.array, ...]:
        """Keep what the last accepted row knows; a pass without streams leaves nothing."""
        seen = self.streams.observed(output, verdict.row)
        return (mx.array(seen is not None), memory[1] if seen is None else seen)


def nodes_by_depth(branch: Branch) -> list[list[int]]:
    """The nodes of a branch, depth by depth."""
    levels: list[list[int]] = [[] for _ in range(max(branch.depths, default=0))]
    for node, depth in enumerate(branch.depths):
        levels[depth - 1].append(node)
    return levels


def top(scores: mx.array, count: int) -> mx.array:
    """Indices of the ``count`` highest scores of each row, best first, ``(rows, count)`` int32."""
    if count == 1:
        return mx.argmax(scores, axis=-1, keepdims=True).astype(mx.int32)
    count = min(count, scores.shape[-1])
    best = mx.argpartition(-scores, count - 1, axis=-1)[:, :count]
    order = mx.argsort(-mx.take_along_axis(scores, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1).astype(mx.int32)
