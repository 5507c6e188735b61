"""Distillation: prompts in, the target's own answers out, in batches, resumable.

Finished answers go to a journal as they come, one JSON line each, so that a kill loses only what is
unfinished; the corpus is written at the end from the whole journal. The answer to a prompt depends
on the seed, the temperature and the prompt alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import BatchGenerator

from ..decode.noise import seed_key
from ..errors import SpecStreamError
from ..target.vector_math import vectorised
from .corpus import Corpus, Text, json_lines, templated


@dataclass(frozen=True)
class Task:
    """A prompt to answer.

    Args:
        prompt: The user's text.
        category: What kind of prompt it is.
        temperature: To answer at; 0 is greedy.
    """

    prompt: str
    category: str = ""
    temperature: float = 0.0

    def key(self, seed: int) -> str:
        """What the answer depends on, in one word."""
        drawn = seed if self.temperature else 0
        content = json.dumps([self.prompt, self.temperature, drawn])
        return hashlib.sha256(content.encode()).hexdigest()[:24]


def read_prompts(path: str | Path, temperatures: Iterable[float] = (0.0,)) -> list[Task]:
    """Prompts of a file, each once per temperature.

    JSONL (``.jsonl``, ``.json``, ``.gz``) with ``prompt`` (and ``category``) or with ``messages``,
    of which every user's message counts; a chat saved by ``/save``; else plain text, a prompt a
    line.

    Raises:
        SpecStreamError: If the file cannot be read or holds no prompt.
    """
    path = Path(path)
    found: dict[str, str] = {}
    for prompt, category in _prompts(path):
        if prompt.strip():
            found.setdefault(prompt.strip(), category)
    if not found:
        raise SpecStreamError(f"{path} holds no prompt")
    return [Task(p, c, t) for t in temperatures for p, c in found.items()]


def _prompts(path: Path) -> Iterator[tuple[str, str]]:
    if path.suffix not in (".jsonl", ".json", ".gz"):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise SpecStreamError(f"cannot read {path}: {error}") from error
        yield from ((line, "") for line in text.splitlines())
        return
    for row in _saved_chat(path) or json_lines(path):
        category = str(row.get("category", ""))
        messages = row.get("messages")
        if isinstance(row.get("prompt"), str):
            yield row["prompt"], category
        elif isinstance(messages, list):
            for message in messages:
                if isinstance(message, dict) and message.get("role") == "user":
                    yield str(message.get("content", "")), category or "chat"
        else:
            raise SpecStreamError(f"{path}: a line has neither a prompt nor messages")


def _saved_chat(path: Path) -> list[dict[str, Any]]:
    """The one object of a chat saved by ``/save``; nothing if the file is something else."""
    if path.suffix != ".json":
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [content] if isinstance(content, dict) else []


class Journal:
    """Finished answers by key, kept in a file that only grows.

    Args:
        path: The file; an unfinished last line (a kill) is cut off.

    Raises:
        SpecStreamError: If it cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        self.answers: dict[str, list[int]] = {}
        try:
            data = path.read_bytes() if path.exists() else b""
            whole = data[: data.rfind(b"\n") + 1]
            for line in whole.splitlines():
                row = json.loads(line)
                self.answers[row["key"]] = row["tokens"]
            if len(whole) < len(data):
                with path.open("r+b") as file:
                    file.truncate(len(whole))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SpecStreamError(f"cannot read the journal {path}: {error}; remove it") from error

    def add(self, key: str, tokens: list[int]) -> None:
        """Keep a finished answer.

        Raises:
            SpecStreamError: If it cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(json.dumps({"key": key, "tokens": tokens}).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise SpecStreamError(f"cannot write {self.path}: {error.strerror}") from error
        self.answers[key] = tokens


def position_keyed(seed: int, temperature: float) -> Callable[[mx.array], mx.array]:
    """A sampler for one answer whose noise depends on the seed and the position only."""
    position = 0

    def sample(logprobs: mx.array) -> mx.array:
        nonlocal position
        key = mx.array([seed_key(seed), position], dtype=mx.uint32)
        position += 1
        noise = mx.random.gumbel(logprobs.shape, key=key)
        return mx.argmax(logprobs * (1 / temperature) + noise, axis=-1)

    return sample


def distil(
    model: nn.Module,
    tokenizer: Any,
    tasks: list[Task],
    journal: Journal,
    max_tokens: int = 192,
    batch: int = 32,
    seed: int = 0,
    context: int | None = None,
    progress: Callable[[int, int, int], None] | None = None,
    until: float = math.inf,
) -> None:
    """Answer the tasks that the journal lacks.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        tasks: What to answer.
        journal: Where finished answers go.
        max_tokens: Most tokens of an answer; a cut answer has no end-of-text token.
        batch: Answers at a time.
        seed: Of the sampled answers.
        context: Tokens that prompt and answer may have together, or None.
        progress: Called with the answers finished, in all, and the tokens made.
        until: A ``time.perf_counter`` after which answers in progress are given up.

    Raises:
        SpecStreamError: If the journal cannot be written.
    """
    todo = {task.key(seed): task for task in tasks if task.key(seed) not in journal.answers}
    prompts = {key: templated(tokenizer, task.prompt) for key, task in todo.items()}
    if context is not None:
        prompts = {k: p for k, p in prompts.items() if len(p) + max_tokens <= context}
    keys = like_lengths(prompts, batch)
    stops = [[token] for token in tokenizer.eos_token_ids]
    generator = BatchGenerator(
        vectorised(model),
        max_tokens=max_tokens,
        stop_tokens=stops,
        completion_batch_size=batch,
        prefill_batch_size=min(batch, 8),
    )
    samplers = [
        position_keyed(seed ^ int(key[:8], 16), task.temperature) if task.temperature else None
        for key, task in ((key, todo[key]) for key in keys)
    ]
    uids = generator.insert([prompts[key] for key in keys], samplers=samplers) if keys else []
    key_of = dict(zip(uids, keys, strict=True))
    open_answers: dict[int, list[int]] = {uid: [] for uid in uids}
    made = 0
    while open_answers and time.perf_counter() < until:
        for response in generator.next_generated():
            answer = open_answers[response.uid]
            answer.append(response.token)
            made += 1
            if response.finish_reason is not None:
                journal.add(key_of[response.uid], open_answers.pop(response.uid))
        if progress:
            progress(len(uids) - len(open_answers), len(uids), made)
    generator.close()


def like_lengths(prompts: dict[str, list[int]], batch: int) -> list[str]:
    """The prompts' keys, batches of like lengths (less padding) in an order that mixes lengths.

    Work that is stopped early has then answered prompts of every length.
    """
    keys = sorted(prompts, key=lambda key: (len(prompts[key]), key))
    batches = [keys[first : first + batch] for first in range(0, len(keys), batch)]
    order = np.random.default_rng(0).permutation(len(batches))
    return [key for number in order for key in batches[number]]


def corpus_from(
    tasks: Iterable[Task], journal: Journal, tokenizer: Any, tokenizer_hash: str, seed: int = 0
) -> Corpus:
    """The answered tasks as a corpus; answers of fewer than two tokens and repeated ones left out.

    Raises:
        SpecStreamError: If no answer is usable.
    """
    texts, seen = [], set()
    for task in tasks:
        answer = journal.answers.get(task.key(seed), [])
        tokens = np.array([*templated(tokenizer, task.prompt), *answer], dtype=np.int32)
        if len(answer) >= 2 and tokens.tobytes() not in seen:
            seen.add(tokens.tobytes())
            texts.append(Text(tokens, len(tokens) - len(answer), task.category))
    if not texts:
        raise SpecStreamError("no prompt got an answer of at least two tokens: nothing to train on")
    return Corpus(tuple(texts), tokenizer_hash)
