"""What was measured as files: one JSON object, and the raw seconds of every run as CSV."""

from __future__ import annotations

import csv
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from .. import doctor
from ..writing import written_whole
from .methods import PLAIN, SPECULATIVE
from .mlx_lm_methods import MLX_LM
from .rows import Row, geometric_mean, grouped, speedup
from .schedule import Run

# Of a decoding; its ids are written as their number.
MEASURED = (
    *("first_seconds", "decode_seconds", "first_tokens", "passes", "cost", "weights", "added"),
    *("kv", "prefill_peak", "decode_peak", "cache", "pass_bytes"),
)


def machine() -> dict[str, str]:
    """What a figure depends on beside the program."""
    return {
        "platform": platform.platform(),
        "device": doctor.device(),
        "memory": doctor.memory(),
        "openblas": doctor.openblas(),
    }


def title_of(content: dict[str, Any]) -> str:
    """What was measured, and where, in a line."""
    versions, where = content["versions"], content["machine"]["device"]
    with_mlx = f"mlx {versions['mlx']}, mlx-lm {versions['mlx-lm']}"
    return f"{content['model']} on {where}, {with_mlx}" + (
        " (incomplete)" if content["incomplete"] else ""
    )


def prompt_objects(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """An object for each prompt (of each form and context): what speculative decoding did with it.

    ``identical`` says whether its token ids were plain decoding's in every run; if not there are
    no figures. Against mlx-lm there is none either where mlx-lm's text is another.
    """
    objects = []
    keyed = grouped(runs, lambda run: (run.bits, run.context, run.prompt))
    for (bits, context, name), here in keyed.items():
        by_method = grouped(here, lambda run: run.method)
        mine = by_method[SPECULATIVE]
        different = next((run.difference for run in mine if run.difference), None)
        timed = [run.decoding for run in mine if run.timed]
        per_pass = sum(len(d.tokens) for d in timed) / sum(d.passes for d in timed)
        objects.append(
            {
                "id": name,
                "category": mine[0].category,
                "bits": bits,
                "context": context,
                "prompt_tokens": mine[0].prompt_tokens,
                "tokens": len(by_method[PLAIN][0].decoding.tokens),
                "tokens_per_pass": None if different else per_pass,
                "speedup_vs_plain": speedup(mine, by_method[PLAIN]),
                "speedup_vs_mlx_lm": speedup(mine, by_method.get(MLX_LM, [])),
                "identical": different is None,
                "first_difference": different and asdict(different),
            }
        )
    return objects


RATIOS = ("tokens_per_pass", "speedup_vs_plain", "speedup_vs_mlx_lm")


def summary_of(objects: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means over prompts, how many of them counted, and the worst prompt."""
    known = {name: [o[name] for o in objects if o[name] is not None] for name in RATIOS}
    compared = [o for o in objects if o["speedup_vs_plain"] is not None]
    worst = min(compared, key=lambda o: o["speedup_vs_plain"], default=None)
    return {
        "prompts": len(objects),
        "identical": sum(o["identical"] for o in objects),
        "geometric_means": {name: geometric_mean(values) for name, values in known.items()},
        "counted": {name: len(values) for name, values in known.items()},
        "worst_prompt": worst
        and {name: worst[name] for name in ("id", "category", "bits", "context", *RATIOS)},
    }


def content_of(
    runs: Sequence[Run],
    rows: Sequence[Row],
    bandwidth: float,
    argv: Sequence[str],
    model: str,
    incomplete: str | None = None,
) -> dict[str, Any]:
    """The JSON object.

    Args:
        runs: All runs of the prompts that every method has finished.
        rows: What they come to.
        bandwidth: Of the machine's memory, in bytes per second.
        argv: The command's arguments.
        model: The model, for people.
        incomplete: Why measuring stopped before its end, or None.
    """
    prompts = prompt_objects(runs)
    forms = grouped(prompts, lambda each: (each["bits"], each["context"]))
    return {
        "argv": list(argv),
        "date": today(),
        "incomplete": incomplete,
        "versions": doctor.versions(),
        "machine": machine() | {"copy_bandwidth": bandwidth},
        "model": model,
        "prompts": prompts,
        "summary": summary_of(prompts)
        | {
            "forms": [
                {"bits": bits, "context": context} | summary_of(some)
                for (bits, context), some in forms.items()
            ]
        },
        "rows": [asdict(row) for row in rows],
    }


def today() -> str:
    """The date, as files have it."""
    return time.strftime("%Y-%m-%d")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write the object, the whole file or nothing.

    Raises:
        SpecStreamError: If it cannot be written.
    """
    with written_whole(path) as file:
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """Write every run, a line each, the whole file or nothing.

    Every line says where and with what it was measured, so that files can be put together.

    Raises:
        SpecStreamError: If it cannot be written.
    """
    named = [field.name for field in fields(Run) if field.name not in ("decoding", "difference")]
    versions = doctor.versions()
    about = {"machine": doctor.device(), "date": today()}
    for package in ("mlx", "mlx-lm", "mlx-specstream"):
        about[package.replace("-", "_")] = versions[package]
    with written_whole(path) as path_now, path_now.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        counts = ("proposed", "accepted", "different_at")
        writer.writerow([*named, "tokens", *MEASURED, *counts, *about])
        for run in runs:
            decoding, difference = run.decoding, run.difference
            writer.writerow(
                [
                    *(getattr(run, name) for name in named),
                    len(decoding.tokens),
                    *(getattr(decoding, name) for name in MEASURED),
                    sum(decoding.proposed.values()),
                    sum(decoding.accepted.values()),
                    "" if difference is None else difference.position,
                    *about.values(),
                ]
            )
