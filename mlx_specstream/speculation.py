"""What is proposed: the user's choice, and the decoder and tree that it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .decode.loop import Decoder
from .decode.plan import Branch, TreePlan
from .decode.proposers import NgramLookup, Proposer, StreamProposer, TableProposer
from .errors import UsageError
from .streams.folder import StreamSet
from .target import Target


@dataclass(frozen=True)
class Speculation:
    """What is proposed. Any choice gives the same text; only the speed differs.

    Args:
        enabled: False decodes plainly.
        tree: ``"auto"`` decides from pass to pass; else the tree of every pass, such as
            ``"ngram:4"`` or ``"ngram:3,streams:2x1x1"`` (see ``TreePlan.parse``).
        num_draft_tokens: Proposals of a chain when ``tree`` is ``"auto"``.
        ngram_min: Shortest ending of the text that n-gram lookup follows, in tokens.
        ngram_max: Longest ending that it tells apart.
        compile: Trace each kind of pass once with ``mx.compile``.
    """

    enabled: bool = True
    tree: str = "auto"
    num_draft_tokens: int = 4
    ngram_min: int = 2
    ngram_max: int = 4
    compile: bool = True


def decoder_for(target: Target, streams: StreamSet, speculation: Speculation) -> Decoder:
    """The target's decoder for a set of proposers, made once so that its traces are reused."""
    if not speculation.enabled:
        streams = StreamSet()
    lookup = (speculation.ngram_min, speculation.ngram_max)
    added = (id(streams.heads), id(streams.table))
    key = (added, speculation.enabled, lookup, speculation.compile)
    if key not in target.compiled:
        proposers: list[Proposer] = []
        if speculation.enabled:
            proposers.append(NgramLookup(speculation.ngram_min, speculation.ngram_max))
        if streams.table is not None:
            proposers.append(TableProposer(streams.table))
        if streams.heads is not None:
            proposers.append(StreamProposer(streams.heads))
        target.compiled[key] = Decoder(target, proposers, speculation.compile)
    return target.compiled[key]


def plan_for(proposers: Sequence[Proposer], speculation: Speculation) -> TreePlan:
    """The tree that a speculation asks for, checked against the proposers that there are.

    Raises:
        UsageError: If the tree names a proposer that is missing or goes deeper than it can.
    """
    if not speculation.enabled:
        return TreePlan()
    if speculation.num_draft_tokens < 1:
        raise UsageError(
            f"num_draft_tokens cannot be {speculation.num_draft_tokens}: "
            "to decode without proposals turn speculation off"
        )
    depths = {p.name: p.max_depth for p in proposers}
    if speculation.tree == "auto":
        return auto_plan(depths, speculation.num_draft_tokens)
    plan = TreePlan.parse(speculation.tree)
    for branch in plan.branches:
        for name in branch.proposers:
            if name not in depths:
                raise UsageError(
                    f"the tree '{speculation.tree}' asks for '{name}', "
                    f"but there is only {', '.join(depths) or 'no proposer'}"
                )
            deepest, depth = depths[name], TreePlan((branch,)).layout.max_depth
            if deepest is not None and depth > deepest:
                raise UsageError(
                    f"the tree '{speculation.tree}' is {depth} deep; these {name} "
                    f"predict {deepest} tokens ahead"
                )
    return plan


def auto_plan(depths: dict[str, int | None], chain: int) -> TreePlan:
    """A chain from the lookup, or else from the table, and a chain of streams.

    Lookup and table in one branch find nearly what they find in two (1.64 against 1.66 tokens per
    pass in simulation), in half the rows.

    Args:
        depths: The proposers that there are, and the deepest proposal of each.
        chain: Longest chain.
    """
    branches = []
    lookups = [name for name in ("ngram", "table") if name in depths]
    for names in (lookups, ["streams"] if "streams" in depths else []):
        limits = [depths[name] for name in names]
        if names:
            length = min([chain, *(limit for limit in limits if limit is not None)])
            branches.append(Branch.of_widths("|".join(names), (1,) * length))
    return TreePlan(tuple(branches))
