"""``scripts/convert.py``: a checkpoint or a GGUF file into a folder that mlx-lm loads."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlx_lm import utils as mlx_lm_utils
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mlx_specstream import loading
from mlx_specstream.errors import SpecStreamError, UsageError, command
from mlx_specstream.options import Parser

from . import gguf, hugging_face, output
from .quantization import DTYPES, MODES, RECIPES, Storage

_WHAT = "Make the folder that mlx-lm and mlx-specstream load, from a checkpoint or a GGUF file."


def parser() -> argparse.ArgumentParser:
    """The options, named as in ``mlx_lm.convert``."""
    result = Parser(prog="python scripts/convert.py", description=_WHAT)
    result.add_argument("--hf-path", "--model", metavar="PATH", help="folder or hub id")
    result.add_argument("--gguf", metavar="FILE", help="a GGUF file instead")
    result.add_argument("--mlx-path", metavar="FOLDER", default="mlx_model", help="where to")
    result.add_argument("-q", "--quantize", action="store_true", help="quantize the weights")
    result.add_argument(
        "--q-bits", type=int, choices=sorted(MODES["affine"][1]), help="default: 4, mxfp8's 8"
    )
    result.add_argument(
        "--q-group-size", type=int, choices=(16, 32, 64, 128), help="default: 64, the mode's own"
    )
    result.add_argument("--q-mode", choices=MODES, default="affine", help="default: affine")
    result.add_argument("--quant-predicate", choices=RECIPES, help="more bits for some layers")
    result.add_argument(
        "--dtype", choices=DTYPES, help="of what is not quantized (default: the config's)"
    )
    result.add_argument("-d", "--dequantize", action="store_true", help="expand quantized weights")
    result.add_argument("--upload-repo", metavar="ID", help="hub repository to upload to")
    result.add_argument(
        "--trust-remote-code", action="store_true", help="run Python files of the model's"
    )
    return result


@command
def main() -> None:
    """Convert, and say what came out."""
    args = parser().parse_args()
    if (args.hf_path is None) == (args.gguf is None):
        raise UsageError("name one source: --hf-path or --gguf (--help lists the options)")
    storage = Storage(
        quantize=args.quantize,
        bits=args.q_bits,
        group_size=args.q_group_size,
        mode=args.q_mode,
        recipe=args.quant_predicate,
        dtype=args.dtype,
        dequantize=args.dequantize,
    )
    target = Path(os.path.expanduser(args.mlx_path)).absolute()
    with output.made_whole(target) as work:
        if args.gguf:
            summary = from_gguf(Path(os.path.expanduser(args.gguf)), work, storage)
        else:
            summary = from_hugging_face(args.hf_path, work, storage, args.trust_remote_code)
    print(f"{target}: {summary}")
    if args.upload_repo:
        upload(target, args.upload_repo)


def from_hugging_face(name: str, work: Path, storage: Storage, trust_remote_code: bool) -> str:
    """Convert a folder or a hub id into ``work``."""
    checkpoint = loading.resolve(name)
    is_here = Path(os.path.expanduser(name)).exists()
    with _bar("Converting") as report:
        return hugging_face.convert(
            checkpoint,
            work,
            storage,
            report,
            hub_id=None if is_here else name,
            trust_remote_code=trust_remote_code,
        )


def from_gguf(file: Path, work: Path, storage: Storage) -> str:
    """Convert a GGUF file into ``work``.

    It becomes a checkpoint first, value for value, in a folder of its own: what follows is the
    same as for any other. Quantizing anew begins from the expanded weights.
    """
    with tempfile.TemporaryDirectory(dir=work, prefix=".gguf-") as folder:
        stage = Path(folder)
        size = file.stat().st_size if file.is_file() else 0
        with _bar("Reading GGUF") as report:
            gguf.repack(
                file, stage, lambda part: report(int(part * size), size), expand=storage.quantize
            )
        try:
            with _bar("Converting") as report:
                return hugging_face.convert(stage, work, storage, report)
        except SpecStreamError as error:  # it knows the stage only, which nobody has heard of
            raise SpecStreamError(str(error).replace(str(stage), str(file))) from error


def upload(folder: Path, repo: str) -> None:
    """Send a converted folder to the hub, with a model card.

    Raises:
        SpecStreamError: The hub did not take it; the folder stays.
    """
    try:
        mlx_lm_utils.upload_to_hub(str(folder), repo)
    except Exception as error:  # whatever the hub's client raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SpecStreamError(
            f"{folder} is complete, but {repo} did not take it: {first}"
        ) from error


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on stderr, where that is a terminal."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
