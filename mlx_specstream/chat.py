"""A conversation with a model: ``python -m mlx_specstream.chat``.

In a terminal: line editing and history, answers as they come, ``/help``. Ctrl-C stops an answer
and keeps the chat.

Without one (``printf 'Hello\\nAnd now?\\n' | python -m mlx_specstream.chat``) every line is a
message of one conversation, and its answer is one line on stdout, so that a program can pair
them: line breaks within an answer become spaces, and a message that could not be answered leaves
an empty line. Everything else goes to stderr: what slash commands say, errors, and with
``--verbose`` the first line and the figures. The exit code is 0, or 1 if something failed.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from . import chat_commands, loading, options
from .conversation import Conversation
from .errors import SpecStreamError, command

DEFAULT_MAX_TOKENS = 1024


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = options.Parser(
        prog="python -m mlx_specstream.chat",
        description="Talk with a model, decoding by verified proposals.",
    )
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=options.token_limit,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"most tokens of an answer, -1 for no limit (default: {DEFAULT_MAX_TOKENS})",
    )
    parser.add_argument(
        "--show-accepted", action="store_true", help="mark tokens that were proposed and accepted"
    )
    parser.add_argument(
        "--verbose",
        nargs="?",
        type=options.boolean,
        const=True,
        metavar="BOOL",
        help="figures after each answer (default: in a terminal)",
    )
    options.add_decoding_options(parser)
    return parser.parse_args()


class OneLine:
    """Writes a text as it comes as one line: line breaks become spaces, none at the ends.

    >>> line = OneLine()
    >>> line.add(" a"), line.add("\\n\\n"), line.add("b \\n")
    ('a', '', ' b')
    """

    _BREAK = re.compile(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*")

    def __init__(self) -> None:
        self._held = ""  # white space that may be the end
        self._begun = False

    def add(self, piece: str) -> str:
        """What can be written of the text so far."""
        text = self._held + piece
        sure = text.rstrip()
        self._held = text[len(sure) :]
        if not self._begun:
            sure = sure.lstrip()
        self._begun = self._begun or bool(sure)
        return self._BREAK.sub(" ", sure)


def answer_lines(conversation: Conversation, model: str, verbose: bool) -> bool:
    """Answer each line of stdin on a line of stdout; returns whether all went well."""
    well = True
    for line in sys.stdin:
        if not line.strip():
            continue
        try:
            if chat_commands.is_command(line):
                print(chat_commands.run(conversation, model, line), file=sys.stderr, flush=True)
            else:
                answer_line(conversation, line.strip())
                if verbose and conversation.answer:
                    parts = chat_commands.figures(conversation.answer)
                    print(" · ".join(parts), file=sys.stderr, flush=True)
        except chat_commands.Quit:
            break
        except SpecStreamError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            well = False
    return well


def answer_line(conversation: Conversation, text: str) -> None:
    """Print an answer as it comes, on one line."""
    line = OneLine()
    try:
        for response in conversation.ask(options.clean(text)):
            print(line.add(response.text), end="", flush=True)
    finally:
        print(flush=True)


def first_line(description: str, conversation: Conversation) -> Sequence[str]:
    """What is loaded: model, form and memory, device, what proposes."""
    import mlx.core as mx

    device = "CPU" if mx.default_device() == mx.cpu else "GPU"
    names = {"ngram": "n-gram lookup", "table": "n-gram table", "streams": "streams"}
    proposers = ", ".join(names[name] for name in conversation.proposers)
    return [description, device, proposers or "no speculation"]


@command
def main() -> None:
    """Chat as the command line says."""
    options.printable_anywhere()
    args = arguments()
    sampling, speculation = options.sampling_from(args), options.speculation_from(args)
    model, tokenizer = options.load_from(args)
    conversation = Conversation(
        model,
        tokenizer,
        options.streams_from(args),
        speculation,
        sampling,
        system=None if args.system_prompt is None else options.clean(args.system_prompt),
        max_tokens=args.max_tokens,
        max_context=args.max_kv_size,
        prefill_step=args.prefill_step_size,
        template_config=args.chat_template_config,
    )
    name = loading.description(model).partition(" · ")[0]
    facts = first_line(loading.description(model), conversation)
    if sys.stdin.isatty() and sys.stdout.isatty():
        from .chat_terminal import Terminal

        terminal = Terminal(conversation, name, args.show_accepted, args.verbose is not False)
        terminal.greet(facts)
        terminal.run()
        return
    if args.verbose:
        print(" · ".join(facts), file=sys.stderr)
    if not tokenizer.has_chat_template:
        print("no chat template: the model continues your text", file=sys.stderr)
    if not answer_lines(conversation, name, bool(args.verbose)):
        sys.exit(1)


if __name__ == "__main__":
    main()
