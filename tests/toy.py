"""The acceptance rule without a model, for tests that ask it very often."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import mlx.core as mx

from mlx_specstream.decode.plan import Branch, TreePlan
from mlx_specstream.decode.verify import accept


@cache
def plan_of(widths: tuple[int, ...]) -> TreePlan:
    return TreePlan((Branch.of_widths("toy", widths),))


@cache
def rule(plan: TreePlan) -> Callable[[mx.array, mx.array], tuple]:
    """``verify.accept`` for a tree of valid proposals, traced: it is asked very often."""
    every = mx.ones(len(plan.layout), mx.bool_)
    return mx.compile(lambda tokens, said: tuple(accept(plan.layout, tokens, every, said)))


@cache
def verdict(plan: TreePlan, tokens: tuple[int, ...], said: tuple[int, ...]) -> list[int]:
    """What the rule emits."""
    _, accepted, _, committed = rule(plan)(mx.array(tokens), mx.array(said))
    return committed.tolist()[: accepted.item() + 1]
