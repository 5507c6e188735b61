"""The command line of the benchmark, checked as far as it can be without the model."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import options
from ..decode.processors import Sampling
from ..errors import SpecStreamError, UsageError
from ..training.report_plot import figure_class
from ..writing import check_writable
from .forms import bits_from
from .methods import PLAIN
from .mlx_lm_methods import MLX_LM, MLX_LM_DRAFT
from .prompts import named_tasks

RIVALS = (PLAIN, MLX_LM, MLX_LM_DRAFT)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line.

    Raises:
        SpecStreamError: If an option or a file it names cannot be used.
    """
    parser = options.Parser(
        prog="python -m mlx_specstream.benchmark",
        description="Measure memory and speed on this machine.",
        epilog="simulate, fits, record, calibrate and draw in front are commands of their own.",
    )
    add = parser.add_argument
    add("--prompts", type=Path, help="JSONL with prompt, category, id (default: four of its own)")
    add(
        "--against",
        default=f"{PLAIN},{MLX_LM}",
        metavar="METHODS",
        help=f"what to compare with, of {', '.join(RIVALS)}; {PLAIN} decoding is always among them "
        f"(default: {PLAIN},{MLX_LM})",
    )
    add("--draft-model", help=f"the draft model of {MLX_LM_DRAFT}: folder or hub id")
    add(
        "--num-draft-tokens",
        type=options.positive,
        default=3,
        metavar="N",
        help="its proposals in a pass (default: 3, as mlx_lm.generate has it)",
    )
    add("--bits", help="forms to measure, of 4,8,16,32 (default: as the model loads)")
    add("--context", help="pad prompts to so many tokens: 128,1000,4000 (default: as they are)")
    add("-n", "--rounds", type=options.positive, default=3, help="timed runs (default: 3)")
    add("--max-tokens", type=options.positive, default=128, help="of an answer (default: 128)")
    add("--temp", type=float, default=0.0, help="temperature (default: 0, greedy)")
    add("--seed", type=int, default=0, help="of sampled answers (default: 0)")
    add("--json", type=Path, metavar="FILE", help="everything, as JSON")
    add("--csv", type=Path, metavar="FILE", help="the raw seconds of every run")
    add("--plot", type=Path, metavar="FILE", help="memory against speed, as a PNG")
    add("--markdown", action="store_true", help="print tables for GitHub, to paste")
    options.add_model_options(parser)
    args = parser.parse_args(argv)

    args.against = chosen_methods(args.against)
    if (MLX_LM_DRAFT in args.against) != (args.draft_model is not None):
        raise UsageError(f"--against {MLX_LM_DRAFT} and --draft-model need each other")
    args.sampling = Sampling(temp=args.temp, seed=args.seed)
    args.forms = [None] if args.bits is None else bits_from(args.bits)
    if args.bits is not None and (args.dtype or args.dequantize is not None):
        raise UsageError("--bits chooses the form: leave --dtype and --dequantize out")
    args.contexts = [None] if args.context is None else contexts_from(args.context)
    if args.streams not in ("auto", "none") and not Path(args.streams).expanduser().is_dir():
        raise SpecStreamError(f"there is no streams folder {args.streams}")
    args.tasks = named_tasks(args.prompts)
    if args.plot:
        figure_class("--plot")
    for path in (args.json, args.csv, args.plot):
        if path:
            check_writable(path)
    return args


def chosen_methods(text: str) -> list[str]:
    """``--against`` as names, plain decoding first.

    Raises:
        UsageError: If there is no such method.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in RIVALS]
    if unknown:
        raise UsageError(f"--against takes some of {', '.join(RIVALS)}, not '{unknown[0]}'")
    return [name for name in RIVALS if name in {PLAIN, *names}]


def contexts_from(text: str) -> list[int]:
    """``--context`` as numbers, each once.

    Raises:
        UsageError: If it is not whole numbers above 0.
    """
    try:
        return list(dict.fromkeys(map(options.positive, text.split(","))))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--context: {error}") from error
