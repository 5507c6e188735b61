"""``python -m mlx_specstream.generate``, as a user runs it."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mlx_specstream import load, options

MODULE = "mlx_specstream.generate"
# Its answer repeats what the prompt says: n-gram lookup finds much of it.
REPEAT = "Repeat this text twice: The quick brown fox jumps over the lazy dog near the river."


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def loaded(embedded_model: Path) -> tuple[Any, Any]:
    return load(embedded_model)


@pytest.fixture
def run(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs the command in this process, on a model that is loaded once."""

    def run(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(options, "load", lambda *args, **kwargs: loaded)
        monkeypatch.setattr(sys, "argv", ["generate", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code, eos = 0, set(loaded[1].eos_token_ids)
        try:
            runpy.run_module(MODULE, run_name="__main__")
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            loaded[1].eos_token_ids = eos
        return Outcome(code, *capsys.readouterr())

    return run


def result(outcome: Outcome) -> dict[str, Any]:
    assert outcome.code == 0 and outcome.err == ""
    assert outcome.out.count("\n") == 1
    return json.loads(outcome.out)


def test_json_has_every_figure_and_the_flags_change_the_counters(run: Run):
    plain = result(run("-p", REPEAT, "-m", "24", "--json", "--no-speculation"))
    tree = result(run("-p", REPEAT, "-m", "24", "--json", "--tree", "ngram:4"))
    assert list(plain) == [
        "text",
        "token_ids",
        "finish_reason",
        "prompt_tokens",
        "cached_tokens",
        "generation_tokens",
        "prompt_tps",
        "generation_tps",
        "passes",
        "tokens_per_pass",
        "proposed",
        "accepted",
        "trees",
        "why",
        "peak_memory_gb",
        "seed",
    ]
    assert tree["token_ids"] == plain["token_ids"] and tree["text"] == plain["text"]
    assert plain["passes"] == plain["generation_tokens"] == len(plain["token_ids"])
    assert plain["proposed"] == plain["accepted"] == {}
    assert plain["tokens_per_pass"] == 1.0
    assert tree["passes"] < plain["passes"]
    assert tree["proposed"]["ngram"] >= tree["accepted"]["ngram"] > 0
    assert tree["tokens_per_pass"] == tree["generation_tokens"] / tree["passes"]


def test_seeded_sampling_is_the_same_with_and_without_proposals(run: Run):
    sampled = ["-p", REPEAT, "-m", "20", "--json", "--temp", "1.2", "--top-p", "0.9"]
    sampled += ["--top-k", "40"]
    plain = result(run(*sampled, "--seed", "7", "--no-speculation"))
    tree = result(run(*sampled, "--seed", "7", "--tree", "ngram:3"))
    other = result(run(*sampled, "--seed", "8", "--no-speculation"))
    assert plain["token_ids"] == tree["token_ids"] != other["token_ids"]
    assert plain["seed"] == 7


def test_sampling_options_reach_the_model(run: Run):
    def tokens(*more: str) -> list[int]:
        return result(run("-p", REPEAT, "-m", "12", "--json", *more))["token_ids"]

    usual = tokens()
    assert tokens("--logit-bias", json.dumps({str(usual[0]): -100}))[0] != usual[0]
    fresh = tokens("--repetition-penalty", "1000", "--repetition-context-size", "0")
    assert len(set(fresh)) == len(fresh) and fresh != usual


def test_stop_string_ends_the_text_before_it(run: Run):
    answer = result(run("-p", REPEAT, "--json", "--stop", "nowhere", "--stop", "ox jum"))
    assert answer["text"] == "The quick brown f"
    assert answer["finish_reason"] == "stop"


def test_max_tokens_and_extra_eos_token(run: Run):
    cut = result(run("-p", REPEAT, "-m", "3", "--json"))
    assert cut["finish_reason"] == "length" and cut["generation_tokens"] == 3
    third = cut["token_ids"][2]
    ended = result(run("-p", REPEAT, "-m", "9", "--json", "--extra-eos-token", str(third)))
    assert ended["finish_reason"] == "stop" and ended["token_ids"] == cut["token_ids"]
    assert cut["text"].startswith(ended["text"]) and cut["text"] != ended["text"]


def test_stdout_is_the_text_and_nothing_else(run: Run):
    loud = run("-p", "What is the capital of France?")
    assert loud.out == "The capital of France is Paris.\n"
    assert "Prompt: 37 tokens" in loud.err and "Generation: 8 tokens" in loud.err
    quiet = run("-p", "What is the capital of France?", "--verbose", "False")
    assert quiet == (0, loud.out, "")


def test_prompt_from_stdin_through_the_template_or_not(run: Run):
    given = result(run("-p", "-", "-m", "1", "--json", stdin="What is the capital of France?"))
    raw = result(
        run("-p", "-", "-m", "1", "--json", "--ignore-chat-template", stdin="One two three")
    )
    system = result(
        run("-p", "-", "-m", "1", "--json", "--system-prompt", "Be brief.", stdin="One two three")
    )
    assert (given["prompt_tokens"], raw["prompt_tokens"]) == (37, 3)
    assert 3 < system["prompt_tokens"] < 37


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--dtype", "float8"], "--dtype: invalid choice: 'float8'"),
        (["--tree", "ngram"], "cannot read the tree 'ngram'"),
        (["--tree", "streams:2"], "asks for 'streams'"),
        (["--num-draft-tokens", "0"], "num_draft_tokens cannot be 0"),
        (["--ngram-min", "5", "--ngram-max", "3"], "--ngram-min 5 is above --ngram-max 3"),
        (["--temp", "-1"], "temp cannot be -1.0"),
        (["--top-p", "2"], "top_p cannot be 2.0"),
        (["--presence-penalty", "nan"], "presence_penalty cannot be nan"),
        (["--max-tokens", "0"], "'0' is not a whole number above 0"),
        (["--prefill-step-size", "0"], "'0' is not a whole number above 0"),
        (["--logit-bias", "[1]"], "'[1]' is not a JSON object"),
        (["--logit-bias", '{"a": 1}'], "is not token ids with numbers"),
        (["--logit-bias", '{"99999999": 1}'], "logit_bias has token 99999999"),
        (["--extra-eos-token", "no-such-token"], "'no-such-token' is not a token"),
        (["--chat-template-config", "{"], "is not a JSON object"),
        (["--verbose", "perhaps"], "neither True nor False"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "-"], "the prompt is empty"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(run: Run, arguments: list[str], says: str):
    outcome = run(*arguments)
    assert outcome.code == 2 and outcome.out == ""
    assert says in outcome.err
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-kv-size", "16"], "the context holds 16"),
        (["--streams", "/no/such/folder"], "no streams in /no/such/folder"),
    ],
)
def test_what_cannot_run_is_one_line_and_code_1(run: Run, arguments: list[str], says: str):
    outcome = run(*arguments)
    assert outcome.code == 1 and outcome.out == ""
    assert says in outcome.err and outcome.err.count("\n") == 1


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": ""},
    )


def test_a_missing_folder_in_a_process_of_its_own():
    process = start("--model", "/no/such/folder")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith("error: there is no model folder") and err.count("\n") == 1


def test_ctrl_c_keeps_what_was_printed(embedded_model: Path):
    process = start("-p", "Write a long story about a dog.", "-m", "-1")
    assert process.stdout is not None
    begun = process.stdout.read(9)  # arrives while the story goes on: output is flushed
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (begun + rest).startswith("Once upon") and rest.endswith("\n")
    assert err == ""


def test_a_reader_that_leaves_is_no_error_message(embedded_model: Path):
    process = start("-p", "Write a long story about a dog.", "-m", "-1")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.read(9)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) != 0
