"""What the training commands learn from: corpora, or prompts that the target answers first."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from rich.console import Console

from .errors import SpecStreamError
from .streams.files import tokenizer_hash
from .target import Target
from .train_progress import progress_bar
from .training.corpus import Corpus, from_answers
from .training.distill import Journal, Task, corpus_from, distil


def read_corpora(paths: Sequence[Path], tokenizer: Any, cut_at: int | None) -> Corpus:
    """The texts of some files, ``.npz`` or JSONL with answers, each once.

    Raises:
        SpecStreamError: If one cannot be read or was made with another tokenizer.
    """
    ours, parts = tokenizer_hash(tokenizer), []
    for path in paths:
        if path.suffix != ".npz":
            parts.append(from_answers(path, tokenizer, ours, cut_at))
            continue
        parts.append(Corpus.load(path))
        if parts[-1].tokenizer != ours:
            raise SpecStreamError(f"{path} was made with another tokenizer than the model's")
    return Corpus.merged(parts)


def answered(
    model: nn.Module,
    tokenizer: Any,
    tasks: list[Task],
    out: Path,
    console: Console,
    max_tokens: int,
    batch: int,
    seed: int,
    until: float,
) -> Corpus:
    """Let the target answer, with a bar; the corpus is written to ``out``.

    Finished answers are kept beside it, in ``<out>.journal``: a run that was stopped goes on.

    Args:
        until: A ``time.perf_counter`` at which to make do with the answers there are.
    """
    journal = Journal(out.with_name(out.name + ".journal"))
    began = time.perf_counter()
    with progress_bar(console, "{task.fields[rate]}") as bar:
        before = sum(task.key(seed) in journal.answers for task in tasks)
        row = bar.add_task("distilling", total=len(tasks), completed=before, rate="")

        def report(done: int, total: int, made: int) -> None:
            rate = f"{made / (time.perf_counter() - began):.0f} tokens/s"
            bar.update(row, completed=before + done, total=before + total, rate=rate)

        context = Target.of(model).context
        distil(model, tokenizer, tasks, journal, max_tokens, batch, seed, context, report, until)
    corpus = corpus_from(tasks, journal, tokenizer, tokenizer_hash(tokenizer), seed)
    corpus.save(out)
    console.print(f"wrote {out}: {len(corpus)} texts, {corpus.answer_tokens} answer tokens")
    return corpus
