"""What is proposed: the user's choice, and the decoder and planner that it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .calibration import BUDGET, costs_of, lookups_of, rates_of
from .decode.evidence import Experience, LookupShadow
from .decode.loop import Decoder
from .decode.menu import CHAINS, candidates, menu_for
from .decode.plan import TreePlan
from .decode.planner import PLAIN, AutoPlanner, FixedPlanner, Planner
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
        num_draft_tokens: Proposals of a chain when ``tree`` is ``"auto"``; None leaves them to
            the planner too.
        ngram_min: Shortest ending of the text that n-gram lookup follows, in tokens.
        ngram_max: Longest ending that it tells apart.
        compile: Trace each kind of pass once with ``mx.compile``.
        recalibrate: Measure again what passes cost on this machine.
    """

    enabled: bool = True
    tree: str = "auto"
    num_draft_tokens: int | None = None
    ngram_min: int = 2
    ngram_max: int = 4
    compile: bool = True
    recalibrate: bool = False


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


def fixed_plan(proposers: Sequence[Proposer], speculation: Speculation) -> TreePlan | None:
    """The tree of every pass, checked against the proposers that there are; None for "auto".

    Raises:
        UsageError: If the tree names a proposer that is missing or goes deeper than it can.
    """
    if not speculation.enabled:
        return PLAIN
    if speculation.num_draft_tokens is not None and speculation.num_draft_tokens < 1:
        raise UsageError(
            f"num_draft_tokens cannot be {speculation.num_draft_tokens}: "
            "to decode without proposals turn speculation off"
        )
    if speculation.tree == "auto":
        return None
    depths = {p.name: p.max_depth for p in proposers}
    plan = TreePlan.parse(speculation.tree)
    for branch in plan.branches:
        for name in branch.proposers:
            if name not in depths:
                raise UsageError(
                    f"the tree '{speculation.tree}' asks for '{name}', "
                    f"but there is only {', '.join(depths) or 'no proposer'}"
                )
            deepest, depth = depths[name], max(branch.depths)
            if deepest is not None and depth > deepest:
                raise UsageError(
                    f"the tree '{speculation.tree}' is {depth} deep; these {name} "
                    f"predict {deepest} tokens ahead"
                )
    return plan


def experience_of(decoder: Decoder, recalibrate: bool = False) -> Experience:
    """What is known of a decoder on this machine; the first time its passes are measured."""
    if decoder.experience is None:
        budget = float("inf") if recalibrate else BUDGET
        costs = costs_of(decoder, budget, recalibrate)
        decoder.experience = Experience(costs, rates_of(decoder))
    return decoder.experience


def menu_of(decoder: Decoder, speculation: Speculation) -> list[TreePlan]:
    """The trees that "auto" chooses from beside plain decoding, on this machine."""
    experience, chain = experience_of(decoder), speculation.num_draft_tokens
    if chain in experience.menus:
        return experience.menus[chain]
    lengths = CHAINS if chain is None else (0, chain)
    rates = rates_of(decoder)
    # Every row of a mixture may ask for other experts: lookups only if the user says so.
    lookups = "" if decoder.target.family.sparse else lookups_of(decoder)
    trees = candidates(lookups, rates, lengths)
    experience.menus[chain] = menu_for(experience.clock.costs, trees, rates)
    return experience.menus[chain]


def planner_for(
    decoder: Decoder, speculation: Speculation, streams: StreamSet, text: Sequence[int]
) -> Planner:
    """Who chooses the trees of one generation.

    Args:
        decoder: What runs the passes.
        speculation: The user's choice, checked by ``fixed_plan``.
        streams: What is added to the target.
        text: The prompt's tokens.
    """
    plan = fixed_plan(decoder.proposers, speculation)
    if plan is not None:
        return FixedPlanner(plan)
    experience = experience_of(decoder, speculation.recalibrate)
    lengths = (speculation.ngram_min, speculation.ngram_max)
    shadow = LookupShadow(*lengths, streams.table, experience.lookups)
    menu = menu_of(decoder, speculation)
    in_pairs = streams.heads is not None and not streams.heads.rides_along
    if decoder.target.family.sparse and rates_of(decoder) is None:
        nothing = "lookups are off for mixtures of experts unless --tree asks for them"
        return AutoPlanner(menu, experience, shadow, text, nothing)
    return AutoPlanner(menu, experience, shadow, text, in_pairs=in_pairs)
