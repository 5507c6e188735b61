"""One answer to one prompt: ``python -m mlx_specstream.generate --prompt "…"``.

The flags are mlx-lm's. The text goes to stdout as it comes; figures follow on stderr, so that
stdout holds the text and nothing else. ``--json`` prints one JSON object instead:

    text, token_ids, finish_reason     the answer, and why it ended (stop, length)
    prompt_tokens, cached_tokens       the prompt, and what of it was computed before
    generation_tokens, seed            tokens of the answer; the seed that was given, or null
    prompt_tps, generation_tps         tokens per second
    passes, tokens_per_pass            forward passes of the target, and what each committed
    proposed, accepted                 proposals by proposer
    trees, why                         passes by tree, and the planner's reason at the end
    peak_memory_gb
"""

# The package exports a *function* called ``generate``, which importing this module would hide:
# nothing imports it; it is run with ``-m``.

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from . import options
from .errors import SpecStreamError, UsageError, command
from .responses import GenerationResponse
from .session import Session

DEFAULT_MAX_TOKENS = 100


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = options.Parser(
        prog="python -m mlx_specstream.generate",
        description="Answer one prompt, decoding by verified proposals.",
    )
    parser.add_argument(
        "--prompt", "-p", default="hello", help="the prompt; - reads it from stdin (default: hello)"
    )
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=options.token_limit,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"most tokens to generate, -1 for no limit (default: {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the text before this string; may be given several times",
    )
    parser.add_argument(
        "--ignore-chat-template", action="store_true", help="use the prompt as it is"
    )
    parser.add_argument(
        "--verbose",
        type=options.boolean,
        default=True,
        metavar="BOOL",
        help="figures on stderr after the text (default: True)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    options.add_decoding_options(parser)
    return parser.parse_args()


def read_prompt(args: argparse.Namespace) -> str:
    """The user's text: ``\\n`` and ``\\t`` in an argument mean what they mean in mlx-lm.

    Raises:
        UsageError: If there is none.
    """
    text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = options.clean(sys.stdin.read() if text == "-" else text)
    if not text.strip():
        raise UsageError("the prompt is empty: give some text with --prompt, or - for stdin")
    return text


def templated(tokenizer: Any, text: str, args: argparse.Namespace) -> str | list[int]:
    """The text as the model's chat template puts it, or as it is.

    Raises:
        SpecStreamError: If the template refuses it.
    """
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return text
    messages = [{"role": "user", "content": text}]
    if args.system_prompt is not None:
        system = {"role": "system", "content": options.clean(args.system_prompt)}
        messages.insert(0, system)
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, **args.chat_template_config
        )
    except Exception as error:
        raise SpecStreamError(f"the model's chat template failed: {error}") from error


def summary(responses: list[GenerationResponse], seed: int | None) -> dict[str, Any]:
    """What ``--json`` prints."""
    last = responses[-1]
    return {
        "text": "".join(response.text for response in responses),
        "token_ids": [response.token for response in responses],
        "finish_reason": last.finish_reason,
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached_tokens,
        "generation_tokens": last.generation_tokens,
        "prompt_tps": last.prompt_tps,
        "generation_tps": last.generation_tps,
        "passes": last.passes,
        "tokens_per_pass": last.tokens_per_pass,
        "proposed": last.proposed,
        "accepted": last.accepted,
        "trees": last.trees,
        "why": last.why,
        "peak_memory_gb": last.peak_memory,
        "seed": seed,
    }


def print_text(responses: Iterator[GenerationResponse]) -> GenerationResponse:
    """Print the text as it comes; returns the last response."""
    try:
        for last in responses:
            print(last.text, end="", flush=True)
    finally:  # also after Ctrl-C: what follows begins a line
        print(flush=True)
    return last


def print_figures(last: GenerationResponse) -> None:
    """mlx-lm's figures and ours, on stderr."""
    proposals = [
        f"{name} {last.accepted[name]} of {count} accepted" for name, count in last.proposed.items()
    ]
    print(
        f"==========\n"
        f"Prompt: {last.prompt_tokens} tokens, {last.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {last.generation_tokens} tokens, "
        f"{last.generation_tps:.3f} tokens-per-sec\n"
        f"Passes: {last.passes}, {last.tokens_per_pass:.2f} tokens-per-pass\n"
        f"Proposals: {', '.join(proposals) or 'none'}\n"
        f"Trees: {', '.join(f'{tree} {count}' for tree, count in last.trees.items())}\n"
        f"Planner: {last.why}\n"
        f"Peak memory: {last.peak_memory:.3f} GB",
        file=sys.stderr,
    )


@command
def main() -> None:
    """Generate as the command line says."""
    options.printable_anywhere()
    args = arguments()
    sampling, speculation = options.sampling_from(args), options.speculation_from(args)
    text = read_prompt(args)
    model, tokenizer = options.load_from(args)
    streams = options.streams_from(args)
    session = Session(model, tokenizer, streams, speculation, args.max_kv_size)
    responses = session.stream(
        templated(tokenizer, text, args),
        args.max_tokens,
        sampling,
        args.stop,
        args.prefill_step_size,
    )
    if args.json:
        print(json.dumps(summary(list(responses), args.seed)))
        return
    last = print_text(responses)
    if args.verbose:
        print_figures(last)


if __name__ == "__main__":
    main()
