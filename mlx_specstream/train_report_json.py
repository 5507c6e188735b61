"""The report as one JSON object: plain numbers and texts, every run included."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import doctor
from .benchmarking.saved import machine
from .training.report_memory import Memory
from .training.report_quality import HeldOut
from .training.report_speed import Run, Way


def circumstances(args: argparse.Namespace, model: Any, folder: Path | None) -> dict[str, Any]:
    """On what and with what was measured.

    Args:
        args: The command line.
        model: The target.
        folder: The streams folder, or None.
    """
    loaded = getattr(model, "_specstream_loaded", None)
    return {
        "versions": doctor.versions(),
        "machine": machine(),
        "model": loaded.name if loaded else type(model).__name__,
        "streams": str(folder) if folder else None,
        "settings": {
            "data": args.data and [str(path) for path in args.data],
            "texts": args.texts,
            "prompts": args.prompts and str(args.prompts),
            "temperatures": args.temps,
            "max_tokens": args.max_tokens,
            "seed": args.seed,
        },
    }


def measurements(
    held_out: HeldOut | None, ways: Sequence[Way], runs: Sequence[Run], memory: Memory
) -> dict[str, Any]:
    """What was measured: the fields of the classes, and what follows from them."""
    return {
        "held_out": held_out and asdict(held_out) | {"accuracy": held_out.accuracy},
        "live": [asdict(way) | {"tokens_per_pass": way.tokens_per_pass} for way in ways],
        "runs": [asdict(run) for run in runs],
        "memory": asdict(memory) | {"added": memory.added, "share": memory.share},
    }
