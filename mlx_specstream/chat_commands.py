"""The chat's slash commands and figures, the same in a terminal and in a pipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from . import transcripts
from .conversation import Answer, Conversation
from .errors import SpecStreamError


class Quit(Exception):
    """The user asked to end the chat."""


@dataclass(frozen=True)
class Command:
    """A slash command.

    Args:
        argument: What follows its name, as the help shows it.
        help: What it does.
        run: Gets the conversation, the model's name and the argument; returns what to print.
    """

    argument: str
    help: str
    run: Callable[[Conversation, str, str], str]


def is_command(line: str) -> bool:
    """Whether a line is for the chat and not for the model (which a leading space makes it)."""
    return line.startswith("/")


def run(conversation: Conversation, model: str, line: str) -> str:
    """Carry out a command.

    Returns:
        What to print.

    Raises:
        SpecStreamError: If there is no such command or it fails; the conversation is as before.
        Quit: For ``/quit``.
    """
    name, _, argument = line.strip().partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        raise SpecStreamError(
            f"there is no command {name[:40]}: /help lists them "
            "(a message that begins with / needs a space in front)"
        )
    return command.run(conversation, model, argument.strip())


FIGURES_HELP = (
    "After an answer: tokens and speed · tokens per pass · proposals accepted/made · "
    "prompt tokens reused/in all · time to the first token"
)


def figures(answer: Answer) -> list[str]:
    """What the line after an answer says."""
    last = answer.last
    speed = f" at {last.generation_tps:.0f}/s" if last.generation_tps else ""
    parts = [f"{last.generation_tokens} tokens{speed}", f"{last.tokens_per_pass:.2f} per pass"]
    parts += _proposals(last.proposed, last.accepted)
    if last.proposed and last.trees.get("none", 0) > last.passes / 2:
        parts.append(last.why)  # it was mostly plain decoding, and why
    parts.append(f"reused {last.cached_tokens}/{last.prompt_tokens}")
    parts.append(f"first {answer.first_token:.2f} s")
    if last.finish_reason == "length":
        parts.append("cut off: the limit of tokens is reached")
    if last.finish_reason == "cancelled":
        parts.append("stopped")
    return parts


def _proposals(proposed: dict[str, int], accepted: dict[str, int]) -> list[str]:
    return [f"{name} {accepted.get(name, 0)}/{count}" for name, count in proposed.items() if count]


def _counted(trees: dict[str, int]) -> str:
    """The trees of a chat's passes, the most frequent first."""
    order = sorted(trees, key=lambda tree: -trees[tree])
    return " · ".join(f"{trees[tree]} with {tree}" for tree in order)


def _help(conversation: Conversation, model: str, argument: str) -> str:
    rows = [(f"{name} {c.argument}", c.help) for name, c in COMMANDS.items()]
    return "\n".join(f"{call:15} {text}" for call, text in rows)


def _reset(conversation: Conversation, model: str, argument: str) -> str:
    conversation.reset()
    return "a new conversation"


def _system(conversation: Conversation, model: str, argument: str) -> str:
    if not argument:
        if conversation.system is None:
            return "no system message is set (a chat template may have its own)"
        return f"system message: {conversation.system}"
    conversation.system = None if argument == "-" else argument
    return f"system message {'removed' if argument == '-' else 'set'}, from the next answer on"


def _stats(conversation: Conversation, model: str, argument: str) -> str:
    totals, cache = conversation.totals, conversation.session.cache
    lines = ["no answers yet"]
    if totals.answers:
        proposals = " · ".join(_proposals(totals.proposed, totals.accepted)) or "none"
        lines = [
            f"answers    {totals.answers} · {totals.tokens} tokens in {totals.seconds:.1f} s · "
            f"{totals.tokens / totals.passes:.2f} per pass",
            f"proposals  {proposals} (accepted/proposed)",
            f"passes     {_counted(totals.trees)}",
            f"planner    {conversation.answer.last.why if conversation.answer else 'no answer'}",
            f"prompts    {totals.prompt_tokens} tokens · {totals.cached_tokens} reused",
        ]
    limit = f" of {cache.limit}" if cache.limit else ""
    lines += [
        f"context    {cache.length}{limit} tokens · {_size(cache.nbytes)}",
        f"memory     {_size(mx.get_active_memory())} in use · {_size(mx.get_peak_memory())} at the "
        f"peak · {_size(mx.get_cache_memory())} kept for reuse",
    ]
    return "\n".join(lines)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def _save(conversation: Conversation, model: str, argument: str) -> str:
    if not argument:
        raise SpecStreamError("/save needs a file's name")
    path = transcripts.save(conversation, model, argument)
    return f"saved {len(conversation.turns)} messages to {path}"


def _load(conversation: Conversation, model: str, argument: str) -> str:
    if not argument:
        raise SpecStreamError("/load needs a file's name")
    their_model, messages = transcripts.read(argument)
    conversation.replace(messages)
    other = "" if their_model == model else f" (of a chat with {their_model})"
    return f"loaded {len(conversation.turns)} messages{other}"


def _quit(conversation: Conversation, model: str, argument: str) -> str:
    raise Quit


COMMANDS = {
    "/help": Command("", "this list", _help),
    "/reset": Command("", "begin a new conversation", _reset),
    "/system": Command("[TEXT]", "show or set the system message (- removes it)", _system),
    "/stats": Command("", "totals of this chat, and memory", _stats),
    "/save": Command("FILE", "save the conversation", _save),
    "/load": Command("FILE", "go on with a saved conversation", _load),
    "/quit": Command("", "end the chat", _quit),
}
