"""The trees worth choosing from on one machine: those that are fastest for some kind of text.

Each tree has to be traced before it runs, so there can be only a few. They are found by asking,
for texts of many kinds, which tree would promise most at what passes cost here, and keeping those
that gain most together.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

from .costs import CostCurve
from .plan import Branch, TreePlan, best_paths
from .promise import STREAMS, Chance, Rates, promised_tokens

MOST_TREES = 6
WORTHWHILE = 1.02  # what a tree must gain over not having it, for the texts that it serves
CHAINS = (0, 2, 3, 4, 5, 7, 10, 15)
STREAM_NODES = (0, 1, 2, 3, 4, 6, 8, 12)
MOST_ROWS = 20
# Texts: how often lookups are right, from fresh prose to a copy; and streams, next to their rates.
LOOKUPS = (
    Chance(0.0, 0.3), Chance(0.2, 0.5), Chance(0.3, 0.6), Chance(0.4, 0.7), Chance(0.5, 0.8),
    Chance(0.7, 0.9), Chance(0.95, 0.98),
)  # fmt: skip
SCALES = (0.4, 0.7, 0.9, 1.1)


def candidates(lookups: str, rates: Rates | None, chains: Sequence[int] = CHAINS) -> list[TreePlan]:
    """All trees of a chain of lookups and the best stream tree of some size.

    Args:
        lookups: Who fills the chain, such as ``"ngram|table"``; "" for nobody.
        rates: Of the streams; None if there are none.
        chains: Lengths of the chain.
    """
    trees = []
    for nodes in STREAM_NODES if rates else (0,):
        for length in dict.fromkeys(chains) if lookups else (0,):
            branches = []
            if length:
                branches.append(Branch.of_widths(lookups, (1,) * length))
            if nodes and rates:
                branches.append(stream_branch(rates, nodes))
            if branches and (length + nodes < MOST_ROWS or not nodes):
                trees.append(TreePlan(tuple(branches)))
    return list(dict.fromkeys(trees))


def stream_branch(rates: Rates, nodes: int) -> Branch:
    """The streams' best tree of some nodes, as far as its rates reach."""
    return Branch.of_paths(STREAMS, best_paths(rates, nodes))


def menu_for(costs: CostCurve, trees: Sequence[TreePlan], rates: Rates | None) -> list[TreePlan]:
    """The trees to choose from beside plain decoding; none where none can pay.

    Args:
        costs: What passes cost here.
        trees: What could be chosen.
        rates: Of the streams, if there are any.
    """
    texts = [
        (chance, [[min(rate * scale, 0.98) for rate in ranks] for ranks in rates or ()])
        for chance in LOOKUPS
        for scale in (SCALES if rates else (1.0,))
    ]
    context = costs.points[0].context
    speeds = {}
    for tree in trees:
        cost = costs.ratio(tree, context)
        speeds[tree] = [promised_tokens(tree, *text) / cost for text in texts]
    best = [1.0] * len(texts)
    menu: list[TreePlan] = []
    while len(menu) < MOST_TREES and speeds:
        gains = {
            tree: sum(log(max(mine / so_far, 1.0)) for mine, so_far in zip(each, best, strict=True))
            for tree, each in speeds.items()
        }
        tree = max(gains, key=gains.__getitem__)
        mine = speeds.pop(tree)
        if max(m / b for m, b in zip(mine, best, strict=True)) < WORTHWHILE:
            break
        menu.append(tree)
        best = [max(pair) for pair in zip(mine, best, strict=True)]
    return menu
