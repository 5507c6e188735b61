"""Distillation: prompts read, answers made in batches, kept, and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import TINY, decoded, target_of

from mlx_specstream import SpecStreamError
from mlx_specstream.training.corpus import templated
from mlx_specstream.training.distill import Journal, Task, corpus_from, distil, read_prompts

SIZE = 12


class Letters:
    """A tokenizer of single letters with a chat template."""

    eos_token_ids = frozenset({3})

    def apply_chat_template(self, messages: list, add_generation_prompt: bool) -> list[int]:
        return [90, *(ord(c) % 80 for c in messages[0]["content"]), 91]


TASKS = [Task(f"question {n} " + "x" * n, f"kind{n % 2}") for n in range(7)]
SAMPLED = [Task(task.prompt, task.category, 1.0) for task in TASKS]


def run(path: Path, tasks: list[Task], **options) -> Journal:
    journal = Journal(path)
    settings = {"max_tokens": SIZE, "batch": 4} | options
    distil(TINY["grouped"](), Letters(), tasks, journal, **settings)
    return journal


def test_greedy_answers_are_the_targets_own(tmp_path):
    journal = run(tmp_path / "j", TASKS)
    for task in TASKS:
        prompt = templated(Letters(), task.prompt)
        expected = decoded(target_of("grouped"), prompt, SIZE, "none")[:SIZE]
        if 3 in expected:
            expected = expected[: expected.index(3) + 1]
        assert journal.answers[task.key(0)] == expected


def test_sampled_answers_depend_on_seed_and_prompt_only(tmp_path):
    whole = run(tmp_path / "a", SAMPLED + TASKS, seed=4)
    alone = run(tmp_path / "b", SAMPLED[2:3], seed=4, batch=1)
    other = run(tmp_path / "c", SAMPLED[2:3], seed=5)
    key = SAMPLED[2].key(4)
    assert whole.answers[key] == alone.answers[key]
    assert whole.answers[key] != whole.answers[TASKS[2].key(4)]
    assert other.answers[SAMPLED[2].key(5)] != alone.answers[key]


def test_a_stopped_run_repeats_no_finished_answer(tmp_path):
    class Stop(Exception):
        pass

    def stop(done: int, total: int, made: int) -> None:
        if done >= 3:
            raise Stop

    with pytest.raises(Stop):
        run(tmp_path / "j", TASKS, progress=stop)
    kept = dict(Journal(tmp_path / "j").answers)
    assert 3 <= len(kept) < len(TASKS)
    with (tmp_path / "j").open("ab") as file:
        file.write(b'{"key": "half a li')  # a kill in the middle of a line
    seen = []
    journal = run(tmp_path / "j", TASKS, progress=lambda *counts: seen.append(counts))
    assert seen[-1][:2] == (len(TASKS) - len(kept), len(TASKS) - len(kept))
    assert {key: journal.answers[key] for key in kept} == kept
    assert Journal(tmp_path / "j").answers == run(tmp_path / "whole", TASKS).answers


def test_a_damaged_journal_is_refused(tmp_path):
    (tmp_path / "j").write_text("no json\n")
    with pytest.raises(SpecStreamError, match="cannot read the journal"):
        Journal(tmp_path / "j")


def test_answers_become_a_corpus(tmp_path):
    journal = run(tmp_path / "j", TASKS)
    corpus = corpus_from([*TASKS, *TASKS], journal, Letters(), "h")
    assert len(corpus) == len(TASKS)  # each once
    text = corpus.texts[1]
    assert text.tokens[: text.answer].tolist() == templated(Letters(), TASKS[1].prompt)
    assert text.tokens[text.answer :].tolist() == journal.answers[TASKS[1].key(0)]
    assert text.category == "kind1"
    with pytest.raises(SpecStreamError, match="nothing to train on"):
        corpus_from([Task("never asked")], journal, Letters(), "h")


def test_a_prompt_that_does_not_fit_the_context_is_left_out(tmp_path):
    longest = len(templated(Letters(), TASKS[-1].prompt))
    journal = run(tmp_path / "j", TASKS, context=longest + SIZE - 1)
    assert len(journal.answers) == len(TASKS) - 1


CHAT = {"messages": [
    {"role": "system", "content": "be brief"}, {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"},
]}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "prompts"),
    [
        ("p.txt", "first\n\nsecond\nfirst\n", ["first", "second"]),
        ("p.jsonl", '{"prompt": "a", "category": "k"}\n{"prompt": " a "}\n', ["a"]),
        ("p.jsonl", json.dumps(CHAT) + "\n", ["one", "three"]),
        ("p.json", json.dumps({"format": "mlx-specstream chat", **CHAT}, indent=1),
         ["one", "three"]),
    ],
)  # fmt: skip
def test_prompts_are_read_once_each(tmp_path, name, content, prompts):
    (tmp_path / name).write_text(content)
    tasks = read_prompts(tmp_path / name, [0.0, 0.7])
    assert [task.prompt for task in tasks] == prompts * 2
    assert [task.temperature for task in tasks] == [0.0] * len(prompts) + [0.7] * len(prompts)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "\n \n", "holds no prompt"),
        ("p.jsonl", "{}\n", "neither a prompt nor messages"),
        ("p.jsonl", "nonsense\n", "cannot read"),
        ("absent.txt", None, "cannot read"),
    ],
)
def test_unusable_prompts_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SpecStreamError, match=message):
        read_prompts(tmp_path / name)
