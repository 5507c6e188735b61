"""The bars of the training commands."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(console: Console, *texts: str) -> Progress:
    """A bar with counts, further fields (as ``TextColumn`` formats them) and time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        *(TextColumn(text) for text in texts),
        TimeRemainingColumn(),
        console=console,
    )
