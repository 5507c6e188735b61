"""A run's checkpoint: the streams, the optimizer's state and how far it got; whole or not at all.

It is written beside the last one and takes its place by renaming, so a run that is killed at any
moment finds one or the other.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import SpecStreamError
from ..streams.files import Identity, save_streams
from ..streams.heads import StreamHeads
from .plan import Plan, Progress

STATE = "training.json"
OPTIMIZER = "optimizer.safetensors"


class Checkpoint(NamedTuple):
    """What a run goes on from.

    Args:
        plan: Of the run.
        progress: How far it got.
        weights: The streams' parameters by name.
        optimizer: The optimizer's state, as a tree.
    """

    plan: Plan
    progress: Progress
    weights: dict[str, mx.array]
    optimizer: Any


def save(
    folder: Path,
    heads: StreamHeads,
    identity: Identity,
    optimizer: Any,
    summary: dict[str, Any],
) -> None:
    """Write a checkpoint into a streams folder.

    Args:
        folder: The streams folder.
        heads: The streams.
        identity: The target's.
        optimizer: The optimizer's state.
        summary: Plan, held-out texts and progress, for JSON.

    Raises:
        SpecStreamError: If it cannot be written; the last one stays.
    """
    place, fresh, old = (folder / f"checkpoint{end}" for end in ("", ".new", ".old"))
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        save_streams(fresh, heads, identity)
        mx.save_safetensors(str(fresh / OPTIMIZER), dict(tree_flatten(optimizer)))
        (fresh / STATE).write_text(json.dumps(summary))
        shutil.rmtree(old, ignore_errors=True)
        if place.exists():
            os.replace(place, old)
        os.replace(fresh, place)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        raise SpecStreamError(f"cannot write a checkpoint to {place}: {error}") from error


def load(folder: Path) -> Checkpoint | None:
    """Read a streams folder's checkpoint; None if there is none.

    Raises:
        SpecStreamError: If it cannot be read.
    """
    place = _place(folder)
    if place is None:
        return None
    try:
        state = json.loads((place / STATE).read_text())
        plan = Plan(**state.pop("plan"))
        state.pop("held_out")
        weights: Any = mx.load(str(place / "streams.safetensors"))
        optimizer: Any = mx.load(str(place / OPTIMIZER))
        progress = Progress(**state)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError) as error:
        raise SpecStreamError(f"cannot resume from {place}: {error}; remove it") from error
    weights.pop("draft_vocab", None)
    return Checkpoint(plan, progress, weights, tree_unflatten(list(optimizer.items())))


def planned_steps(folder: Path) -> int | None:
    """The steps that a folder's checkpoint was planned for; None if there is none."""
    place = _place(folder)
    try:
        return int(json.loads((place / STATE).read_text())["plan"]["steps"]) if place else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _place(folder: Path) -> Path | None:
    """Where the checkpoint is: under its old name if a run was killed between two renames."""
    places = (folder / "checkpoint", folder / "checkpoint.old")
    return next((place for place in places if (place / STATE).exists()), None)
