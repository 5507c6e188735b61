"""The n-gram table as a proposer: what the target wrote most often after these three tokens."""

from __future__ import annotations

import mlx.core as mx

from ...streams.ngram_table import ORDERS, NgramTable
from ...target import PassOutput, Target
from ..plan import Branch
from ..verify import Verdict
from .base import Context, Proposals


class TableProposer:
    """Propose the table's chain.

    Args:
        table: Counted from texts of the target.
    """

    name = "table"
    max_depth = None
    scratch_rows = 0

    def __init__(self, table: NgramTable):
        self.table = table

    def start(self, target: Target) -> tuple[mx.array, ...]:
        return ()

    def propose(self, branch: Branch, memory: tuple[mx.array, ...], context: Context) -> Proposals:
        places = context.length + 1 - len(ORDERS) + mx.arange(len(ORDERS))
        recent = mx.where(places >= 0, context.history[mx.maximum(places, 0)], -1)
        chain, found = self.table.lookup(recent)
        while chain.size < len(branch):  # what follows the chain's own end
            last = mx.concatenate([recent, chain])[-len(ORDERS) :]
            chain = mx.concatenate([chain, self.table.lookup(last)[0]])
        valid = mx.broadcast_to(found, (len(branch),))
        return Proposals(chain[: len(branch)], valid, context.kv)

    def observe(
        self, memory: tuple[mx.array, ...], output: PassOutput, verdict: Verdict
    ) -> tuple[mx.array, ...]:
        return memory
