"""The prompts that are measured: read, named, and padded to a length of context."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SpecStreamError
from ..session import encode
from ..training.corpus import json_lines, templated
from ..training.distill import Task, read_prompts

# What is measured where no file is given: one prompt of each kind.
DEFAULTS = {
    "chat": "What should somebody look at before buying a used bicycle?",
    "code": "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "edit": "Rewrite in the past tense: The train leaves at nine. It crosses the river, stops in "
    "two small towns and reaches the coast at noon. Nobody gets off before the last stop.",
    "structured": "List the months of the year as a JSON array of objects with name and days.",
}

# Neutral text is put together from these.
# fmt: off
WHO = ("baker", "clerk", "farmer", "sailor", "teacher", "painter", "miller", "doctor", "tailor",
       "gardener", "porter")
DID = ("found", "carried", "mended", "bought", "forgot", "described", "borrowed")
WHAT = ("lamp", "basket", "letter", "wheel", "ladder", "blanket", "kettle", "map", "fence", "coat",
        "clock", "bottle", "drawer")
WHERE = ("before noon", "near the old bridge", "behind the station", "on a wet morning",
         "after the market closed", "without much haste", "in the second year", "beside the canal",
         "with some help")
# fmt: on


class Prompt(NamedTuple):
    """A prompt to decode: its name, what kind it is, and its token ids."""

    name: str
    category: str
    tokens: list[int]


def named_tasks(path: Path | None) -> dict[str, Task]:
    """The prompts of a file by their names, or the default ones.

    Raises:
        SpecStreamError: If the file cannot be read or holds no prompt.
    """
    if path is None:
        return {category: Task(prompt, category) for category, prompt in DEFAULTS.items()}
    tasks = read_prompts(path)
    return dict(zip(ids_of(path, tasks), tasks, strict=True))


def ids_of(path: Path, tasks: list[Task]) -> list[str]:
    """A name for each prompt: its ``id`` if all have one of their own, else its number."""
    found: dict[str, str] = {}
    if path.suffix == ".jsonl":
        for row in json_lines(path):
            if isinstance(row.get("prompt"), str) and "id" in row:
                found.setdefault(row["prompt"].strip(), str(row["id"]))
    names = [found.get(task.prompt, "") for task in tasks]
    distinct = len(set(names)) == len(names) and "" not in names
    return names if distinct else [str(number) for number in range(1, len(tasks) + 1)]


def prompts_of(
    tasks: dict[str, Task], tokenizer: Any, context: int | None, pad: int | None = None
) -> list[Prompt]:
    """Named prompts as token ids.

    Args:
        tasks: The prompts by name.
        tokenizer: The target's.
        context: Positions that the target has, or None for no limit.
        pad: Tokens to pad each prompt to, or None; longer ones stay as they are.

    Raises:
        SpecStreamError: If one leaves no room for an answer.
    """
    prompts = []
    for name, task in tasks.items():
        tokens = tokens_of(tokenizer, task.prompt)
        if pad is not None:
            tokens = padded(tokenizer, task.prompt, pad)
        if context is not None and len(tokens) >= context:
            raise SpecStreamError(
                f"prompt {name} has {len(tokens)} tokens but the context holds {context}: "
                "shorten it or leave it out"
            )
        prompts.append(Prompt(name, task.category, tokens))
    return prompts


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """A prompt as the chat puts it, or as it is where the tokenizer has no template."""
    if getattr(tokenizer, "has_chat_template", True):
        return templated(tokenizer, text)
    return encode(tokenizer, text)


def padded(tokenizer: Any, text: str, count: int) -> list[int]:
    """A prompt after so much neutral text that it has ``count`` tokens, or a word's worth less."""

    def after(words: int) -> list[int]:
        return tokens_of(tokenizer, f"{' '.join(filler[:words])}\n\n{text}" if words else text)

    filler = neutral_words(count)
    fits, too_many = 0, len(filler) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if len(after(middle)) <= count:
            fits = middle
        else:
            too_many = middle
    return after(fits)


def neutral_words(count: int) -> list[str]:
    """The first ``count`` words of neutral text."""
    words: list[str] = []
    number = 0
    while len(words) < count:
        # The lists' lengths have no common factor, so that no sentence soon comes back.
        who, did, what, where = (some[number % len(some)] for some in (WHO, DID, WHAT, WHERE))
        words += f"The {who} {did} the {what} {where}.".split()
        number += 1
    return words[:count]
