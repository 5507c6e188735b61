"""Command-line options that several commands share, named as in mlx-lm, and what is made of them.

    parser = Parser(prog="python -m mlx_specstream.…")
    add_model_options(parser)
    add_sampling_options(parser)
    args = parser.parse_args()
    sampling = sampling_from(args)
    model, tokenizer = load_from(args)

A wrong value ends in one line on stderr and exit code 2 in any ``main`` that ``errors.command``
wraps. What can be checked without the model is checked before the model is loaded.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from dataclasses import fields
from typing import Any, NoReturn

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .decode.plan import TreePlan
from .decode.processors import PENALTY_WINDOW, Sampling
from .errors import UsageError
from .loading import DTYPES, load
from .session import PREFILL_STEP
from .speculation import Speculation


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    """All groups below: what every command that writes text takes."""
    add_model_options(parser)
    add_template_options(parser)
    add_sampling_options(parser)
    add_speculation_options(parser)
    add_context_options(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Which model, in which form."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", help="model folder or hub id (default: the embedded default model)"
    )
    group.add_argument("--adapter-path", help="LoRA adapters, as mlx-lm trains them")
    group.add_argument(
        "--streams",
        metavar="FOLDER",
        default="auto",
        help="streams made for the model; none for none (default: what comes with the project)",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="what it computes in (default: float32 on the CPU, else the checkpoint's own)",
    )
    group.add_argument(
        "--dequantize",
        action=argparse.BooleanOptionalAction,
        help="expand quantized matrices: more memory, in float32 the same values and text "
        "(default: where that is faster)",
    )
    group.add_argument(
        "--extra-eos-token",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="further tokens that end the text",
    )


def add_template_options(parser: argparse.ArgumentParser) -> None:
    """How messages become a prompt."""
    group = parser.add_argument_group("prompt")
    group.add_argument("--system-prompt", metavar="TEXT", help="system message")
    group.add_argument(
        "--chat-template-config",
        type=json_object,
        default={},
        metavar="JSON",
        help="further values for the chat template, as a JSON object",
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen; the defaults are mlx-lm's: greedy."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temp", type=float, default=0.0, help="temperature (default: 0, greedy)")
    group.add_argument("--top-p", type=float, default=1.0, help="default: 1, keeps all")
    group.add_argument("--min-p", type=float, default=0.0, help="default: 0, keeps all")
    group.add_argument("--top-k", type=int, default=0, help="default: 0, keeps all")
    group.add_argument("--seed", type=int, help="fixes the sampling (default: a new one each time)")
    for kind in ("repetition", "presence", "frequency"):
        group.add_argument(f"--{kind}-penalty", type=float, metavar="X", help="default: none")
        group.add_argument(
            f"--{kind}-context-size",
            type=int,
            default=PENALTY_WINDOW,
            metavar="N",
            help=f"tokens it looks back over, 0 for all (default: {PENALTY_WINDOW})",
        )
    group.add_argument(
        "--logit-bias",
        type=logit_bias,
        metavar="JSON",
        help="token ids and what to add to their logits, like '{\"42\": -100}'",
    )


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """What is proposed; the text is the same whatever is chosen."""
    chosen = Speculation()
    group = parser.add_argument_group("speculation", "the text is the same, only the speed differs")
    group.add_argument(
        "--no-speculation",
        dest="enabled",
        action="store_false",
        help="decode plainly, whatever the options below say",
    )
    group.add_argument(
        "--tree",
        default=chosen.tree,
        help="tree of every pass, like ngram:4 or ngram:3,streams:2x1x1 "
        "(default: auto, decided from pass to pass)",
    )
    group.add_argument(
        "--num-draft-tokens",
        type=int,
        default=chosen.num_draft_tokens,
        metavar="N",
        help="proposals of a chain with --tree auto (default: decided from pass to pass)",
    )
    group.add_argument(
        "--ngram-min",
        type=positive,
        default=chosen.ngram_min,
        metavar="N",
        help=f"shortest ending that n-gram lookup follows (default: {chosen.ngram_min} tokens)",
    )
    group.add_argument(
        "--ngram-max",
        type=positive,
        default=chosen.ngram_max,
        metavar="N",
        help=f"longest ending that it tells apart (default: {chosen.ngram_max} tokens)",
    )
    group.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="do not trace the passes with mx.compile",
    )
    group.add_argument(
        "--recalibrate",
        action="store_true",
        help="measure again what passes cost on this machine",
    )


def add_context_options(parser: argparse.ArgumentParser) -> None:
    """How much text is held, and computed at a time."""
    group = parser.add_argument_group("context")
    group.add_argument(
        "--max-kv-size",
        type=positive,
        metavar="N",
        help="most tokens of text; longer is refused (default: the model's own context)",
    )
    group.add_argument(
        "--prefill-step-size",
        type=positive,
        default=PREFILL_STEP,
        metavar="N",
        help=f"prompt tokens computed at a time (default: {PREFILL_STEP})",
    )


def load_from(args: argparse.Namespace) -> tuple[nn.Module, TokenizerWrapper]:
    """The model and tokenizer that the options name.

    Raises:
        SpecStreamError: If they cannot be loaded.
    """
    model, tokenizer = load(
        args.model, adapter_path=args.adapter_path, dtype=args.dtype, dequantize=args.dequantize
    )
    for token in args.extra_eos_token:
        known = int(token) < len(tokenizer) if token.isdecimal() else token in tokenizer.get_vocab()
        if not known:
            raise UsageError(f"--extra-eos-token: '{token}' is not a token of this model")
        tokenizer.add_eos_token(token)
    return model, tokenizer


def streams_from(args: argparse.Namespace) -> str | None:
    """What ``--streams`` says, as a session takes it."""
    return None if args.streams == "none" else args.streams


def sampling_from(args: argparse.Namespace) -> Sampling:
    """How the options say tokens are chosen.

    Raises:
        UsageError: If a value is out of its range.
    """
    return Sampling(**{field.name: getattr(args, field.name) for field in fields(Sampling)})


def speculation_from(args: argparse.Namespace) -> Speculation:
    """What the options say is proposed.

    Raises:
        UsageError: If the tree cannot be read or the n-gram lengths are the wrong way round.
    """
    if args.tree != "auto":
        TreePlan.parse(args.tree)
    if args.ngram_min > args.ngram_max:
        raise UsageError(f"--ngram-min {args.ngram_min} is above --ngram-max {args.ngram_max}")
    return Speculation(**{field.name: getattr(args, field.name) for field in fields(Speculation)})


def positive(text: str) -> int:
    """An option's whole number above 0."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return number


def token_limit(text: str) -> int:
    """``--max-tokens``: a whole number above 0, or -1 for as many as the context holds."""
    return -1 if text == "-1" else positive(text)


def boolean(text: str) -> bool:
    """mlx-lm's ``--verbose True``."""
    if text.lower() not in ("true", "t", "false", "f"):
        raise argparse.ArgumentTypeError(f"'{text}' is neither True nor False")
    return text.lower() in ("true", "t")


def json_object(text: str) -> dict[str, Any]:
    """An option's JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is not a JSON object")
    return value


def logit_bias(text: str) -> dict[int, float]:
    """``--logit-bias``: a JSON object of token ids and numbers."""
    try:
        bias = {int(token): float(value) for token, value in json_object(text).items()}
    except (ValueError, TypeError):
        bias = {0: math.nan}
    if any(math.isnan(value) for value in bias.values()):
        raise argparse.ArgumentTypeError(f"'{text}' is not token ids with numbers")
    return bias


def printable_anywhere() -> None:
    """Let no text fail for the terminal's or a file's encoding: what it lacks becomes "?"."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def clean(text: str) -> str:
    """A text without what no encoding has: bytes of a command line that were not UTF-8."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
