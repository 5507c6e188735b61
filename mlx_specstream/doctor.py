"""What a maintainer asks for in a bug report: ``python -m mlx_specstream.doctor [--json]``."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable

from mlx_specstream import accelerate, embedded, shipped
from mlx_specstream.errors import command

_PACKAGES = ("mlx-specstream", "mlx", "mlx-lm", "numpy", "transformers", "tokenizers")


def versions() -> dict[str, str]:
    """Installed version of each package that decides how this one behaves, and of Python."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"python": platform.python_version()}


def device() -> str:
    """The device MLX computes on."""
    import mlx.core as mx

    name = mx.device_info().get("device_name", "unknown")
    return f"{mx.default_device().type.name} ({name}, {os.cpu_count()} cores)"


def memory() -> str:
    """The machine's memory, and how much of it MLX recommends to use where it says so."""
    import mlx.core as mx

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    working_set = mx.device_info().get("max_recommended_working_set_size")
    line = f"{total / 1e9:.1f} GB"
    return f"{line}, MLX recommends up to {int(working_set) / 1e9:.1f} GB" if working_set else line


def openblas() -> str:
    """Whether matrix products run on OpenBLAS, or why not."""
    status = accelerate.status()
    if not status.loaded:
        return f"not loaded: {status.detail}"
    return f"loaded, {status.threads} threads: {status.detail} ({status.library})"


def compiler() -> str:
    """Whether MLX can compile fused kernels (on Linux it runs g++; without one it does without)."""
    if sys.platform != "linux":
        return "not needed on this platform"
    import mlx.core as mx

    try:
        fused = mx.compile(lambda x: mx.tanh(x) * x + 1)
        mx.eval(fused(mx.ones(4)))
    except RuntimeError as error:  # a g++ that runs but cannot build is an error to MLX
        return f"fails; try MLX_DISABLE_COMPILE=1: {' '.join(str(error).split())[:300]}"
    found = shutil.which("g++")
    return f"g++ at {found}" if found else "no g++: kernels are not fused (same results, slower)"


def streams() -> str:
    """The stream weights found beside the package or in the repository."""
    return ", ".join(map(str, shipped.folders())) or "none found"


def cost_curve() -> str:
    """The measured costs of a pass over several rows, which the planner goes by."""
    curves = sorted((embedded.cache_dir() / "cost-curves").glob("*.json"))
    return ", ".join(str(curve) for curve in curves) or "not calibrated"


# One function a row; a new row is one more line here.
ROWS: dict[str, Callable[[], str]] = {
    "platform": platform.platform,
    "device": device,
    "memory": memory,
    "openblas": openblas,
    "compiler": compiler,
    "default model": embedded.state,
    "cache": lambda: str(embedded.cache_dir()),
    "streams": streams,
    "cost curve": cost_curve,
}


def report() -> dict[str, str]:
    """Every row's text by its name. A row that fails says so and spoils no other."""
    rows = versions()
    for name, row in ROWS.items():
        try:
            rows[name] = row()
        except Exception as error:  # noqa: BLE001  a half-broken install is when this is needed
            rows[name] = f"unavailable ({type(error).__name__}: {error})"
    return rows


@command
def main() -> None:
    """Print the report as a table, or as one JSON object."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_specstream.doctor", description="Say what a bug report needs."
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json
    rows = report()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print("\n".join(f"{name:16}{text}" for name, text in rows.items()))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, text in rows.items():
        table.add_row(name, Text(text))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
