"""Which streams go with a model: those that come with the project, or those of a folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from . import embedded
from .errors import SpecStreamError
from .self_test import report_acceptance
from .streams.files import CONFIG_FILE
from .streams.folder import TABLE_FILE, StreamSet, load_folder
from .target import Target

NAMES = {embedded.NAME: "smollm2-135m-instruct"}


def folders() -> list[Path]:
    """The streams folders beside the package or in the repository."""
    here = Path(__file__).parent
    return [
        folder
        for root in (here / "weights", here.parent / "weights")
        for folder in sorted(root.glob("*"))
        if (folder / "streams.safetensors").is_file() or (folder / TABLE_FILE).is_file()
    ]


def streams_in(folder: str | Path, target: Target, tokenizer: Any) -> StreamSet:
    """What a streams folder holds, loaded once while its files stay as they are.

    Streams that were trained for other weights are put to their self-test then, with a warning
    that says what came of it.

    Raises:
        SpecStreamError: If it cannot be used with the target.
    """
    place = Path(folder).expanduser().resolve()
    files = sorted([*place.glob("*.safetensors"), *place.glob(CONFIG_FILE)])
    key = (place, tuple((file.name, file.stat().st_mtime_ns) for file in files))
    if key not in target.compiled:
        target.compiled[key] = load_folder(place, target, tokenizer, report_acceptance)
    return target.compiled[key]


def streams_for(model: Any, tokenizer: Any) -> StreamSet:
    """What comes with the project for a model that ``load`` returned; mostly nothing.

    Loaded once and kept with the target. Never fails: streams that cannot be used are left out
    with a warning, since the text is the same without them.
    """
    target = Target.of(model)
    if "shipped" not in target.compiled:
        name = NAMES.get(getattr(getattr(model, "_specstream_loaded", None), "name", ""))
        found = StreamSet()
        for folder in folders():
            if folder.name == name:
                try:
                    found = streams_in(folder, target, tokenizer)
                except SpecStreamError as error:
                    warnings.warn(f"going on without streams: {error}", stacklevel=2)
        target.compiled["shipped"] = found
    return target.compiled["shipped"]
