"""The cost curve of a model on this machine: measured once, kept in the user's cache.

A start spends a fraction of a second on it (more only where three passes already take longer);
what it does not get to, the next start adds. ``python -m mlx_specstream.benchmark calibrate``
measures all of it at once.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import accelerate, embedded
from .decode.calibrate import calibrated
from .decode.costs import CostCurve, Point
from .decode.evidence import ASSUMED_RATES
from .decode.loop import Decoder
from .decode.promise import Rates
from .decode.proposers import StreamProposer
from .errors import SpecStreamError
from .streams.files import weights_fingerprint

BUDGET = 0.6  # seconds of a start


def lookups_of(decoder: Decoder) -> str:
    """Who fills chains: lookup and table share a branch, as plans write it; "" for nobody.

    In simulation one branch finds nearly what two find (1.89 against 1.92 tokens per pass), in
    half the rows.
    """
    names = [proposer.name for proposer in decoder.proposers]
    return "|".join(name for name in ("ngram", "table") if name in names)


def rates_of(decoder: Decoder) -> Rates | None:
    """How often the streams' candidates are right, by depth and rank; None without streams."""
    for proposer in decoder.proposers:
        if isinstance(proposer, StreamProposer):
            config = proposer.streams.config
            return (config.rates or ASSUMED_RATES)[: config.gamma]
    return None


def machine_of(decoder: Decoder) -> dict[str, Any]:
    """What the cost of a pass depends on."""
    streams = [p.streams for p in decoder.proposers if isinstance(p, StreamProposer)]
    shape = {}
    if streams:
        config = streams[0].config
        shape = {
            name: getattr(config, name)
            for name in ("method", "mode", "gamma", "layers", "rank", "correction_rank")
        } | {"draft_vocab": len(config.draft_vocab or ())}
    return {
        "device": mx.device_info().get("device_name", platform.processor()),
        "on": str(mx.default_device().type.name),
        "mlx": version("mlx"),
        "openblas": accelerate.status().threads,
        "weights": weights_fingerprint(decoder.target),
        "context": decoder.target.context,
        "dtype": str(decoder.target.dtype),
        "packed": decoder.target.is_packed,
        "streams": shape,
        "lookups": lookups_of(decoder),
        "traced": decoder.compile,
    }


def place_of(machine: dict[str, Any]) -> Path:
    """Where the curve of a decoder on a machine is kept; see ``machine_of``."""
    name = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return embedded.cache_dir() / "cost-curves" / f"{name[:24]}.json"


def costs_of(
    decoder: Decoder,
    budget: float = BUDGET,
    again: bool = False,
    progress: Callable[[Point], None] | None = None,
) -> CostCurve:
    """A decoder's curve: the one kept, with what is missing measured as far as a budget reaches.

    A cache that cannot be read or written is no reason to fail: then the curve lasts as long as
    the process.

    Args:
        decoder: What runs the passes.
        budget: Seconds to spend, roughly.
        again: Measure everything anew.
        progress: Called with each pass measured.
    """
    known: list[Point] = []
    machine: dict[str, Any] = {}
    place: Path | None = None
    with suppress(SpecStreamError, OSError, RuntimeError):
        machine = machine_of(decoder)
        place = place_of(machine)
        if not again and place.exists():
            known = CostCurve.load(place).points
    curve = calibrated(decoder, lookups_of(decoder), rates_of(decoder), known, budget, progress)
    if place is not None and curve.points != sorted(known):
        curve.about = machine
        with suppress(SpecStreamError, OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            curve.save(place)
    return curve
