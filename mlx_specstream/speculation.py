"""What is proposed: the user's choice, and the decoder and tree that it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .decode.loop import Decoder
from .decode.plan import Branch, TreePlan, best_paths
from .decode.proposers import NgramLookup, Proposer, StreamProposer, TableProposer
from .errors import UsageError
from .streams.folder import StreamSet
from .target import Target

STREAM_NODES = 4  # of the streams' tree beside a chain of lookups


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


def plans_for(proposers: Sequence[Proposer], speculation: Speculation) -> list[TreePlan]:
    """The trees that a speculation asks for, checked against the proposers that there are.

    Returns:
        One tree where it is fixed; with ``"auto"`` those to choose from; none if nothing is
        proposed.

    Raises:
        UsageError: If a tree names a proposer that is missing or goes deeper than it can.
    """
    if not speculation.enabled:
        return []
    if speculation.num_draft_tokens < 1:
        raise UsageError(
            f"num_draft_tokens cannot be {speculation.num_draft_tokens}: "
            "to decode without proposals turn speculation off"
        )
    depths = {p.name: p.max_depth for p in proposers}
    if speculation.tree == "auto":
        rates = [p.streams.config.rates for p in proposers if isinstance(p, StreamProposer)]
        return auto_plans(depths, speculation.num_draft_tokens, next(iter(rates), None))
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
    return [plan]


def auto_plans(
    depths: dict[str, int | None],
    chain: int,
    rates: Sequence[Sequence[float]] | None = None,
) -> list[TreePlan]:
    """Trees to choose from: a short and a long chain of lookups, without and with streams.

    Lookup and table share a branch: in simulation that finds nearly what two branches find (1.89
    against 1.92 tokens per pass), in half the rows.

    Args:
        depths: The proposers that there are, and the deepest proposal of each.
        chain: Length of the short chain; the long one is twice as long, less one.
        rates: Of the streams, if they have been measured: then their tree is the best one.
    """
    lookups = "|".join(name for name in ("ngram", "table") if name in depths)
    chains = [Branch.of_widths(lookups, (1,) * length) for length in (chain, 2 * chain - 1)]
    trees = [TreePlan((branch,)) for branch in dict.fromkeys(chains)]
    if "streams" in depths:
        deepest = min(depths["streams"] or chain, chain)
        paths = best_paths(rates[:deepest], STREAM_NODES) if rates else [(0,) * deepest]
        trees.append(TreePlan((chains[0], Branch.of_paths("streams", paths))))
    return trees
