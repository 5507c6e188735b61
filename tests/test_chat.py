"""The chat: the conversation behind it, through a pipe, and in a terminal."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import InMemoryHistory
from rich.console import Console

from mlx_specstream import Speculation, chat, chat_commands, load, options, transcripts
from mlx_specstream.chat_terminal import CommandCompleter, QuietHistory, history, interruptible
from mlx_specstream.chat_writer import WrappedWriter, joined
from mlx_specstream.conversation import Conversation
from mlx_specstream.errors import SpecStreamError

CAPITAL = "What is the capital of France?"
STORY = "Write a long story about a dog."


@pytest.fixture(scope="module")
def loaded(embedded_model: Path) -> tuple[Any, Any]:
    return load(embedded_model)


@pytest.fixture
def talk(loaded: tuple[Any, Any]) -> Callable[..., Conversation]:
    return lambda **options: Conversation(*loaded, **options)


def say(conversation: Conversation, text: str) -> str:
    return "".join(response.text for response in conversation.ask(text))


# The conversation


def test_the_second_turn_computes_only_what_is_new(talk: Callable[..., Conversation]):
    conversation = talk()
    assert say(conversation, CAPITAL) == "The capital of France is Paris."
    first = conversation.answer.last
    assert "Rome" in say(conversation, "And of Italy?")
    second = conversation.answer.last
    # All of the first prompt and its answer, but for the token that ended it.
    assert second.cached_tokens == first.prompt_tokens + first.generation_tokens - 1
    assert second.prompt_tokens - second.cached_tokens < 20
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2
    assert conversation.totals.answers == 2
    assert conversation.totals.cached_tokens == second.cached_tokens


def test_reuse_and_proposals_do_not_change_an_answer(talk: Callable[..., Conversation]):
    plain, proposing = (
        talk(speculation=speculation, max_tokens=24)
        for speculation in (Speculation(enabled=False), Speculation(tree="ngram:4"))
    )
    for text in ("Name three fruits.", "Say that again."):
        assert say(plain, text) == say(proposing, text)
    afresh = talk(speculation=Speculation(enabled=False), max_tokens=24)
    afresh.replace(plain.messages[:2])
    assert say(afresh, "Say that again.") == plain.messages[-1]["content"]
    assert proposing.totals.proposed["ngram"] > 0 and plain.totals.proposed == {}


def test_cancel_keeps_the_partial_answer(talk: Callable[..., Conversation]):
    conversation = talk()
    pieces = []
    for response in conversation.ask(STORY):
        pieces.append(response.text)
        if len(pieces) == 5:
            conversation.cancel()
    assert len(pieces) <= 5 + 5 and conversation.answer.last.finish_reason == "cancelled"
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    say(conversation, CAPITAL)
    assert conversation.answer.last.cached_tokens > 38


def test_cancel_before_the_first_token_takes_the_message_back(talk: Callable[..., Conversation]):
    conversation = talk()
    assert list(conversation.ask(STORY, lambda done, total: conversation.cancel())) == []
    assert conversation.messages == [] and conversation.answer is None
    assert say(conversation, CAPITAL) == "The capital of France is Paris."


def test_an_answer_left_in_the_middle_does_no_harm(talk: Callable[..., Conversation]):
    conversation = talk(max_tokens=12)
    answer = conversation.ask(STORY)
    begun = next(answer).text + next(answer).text
    answer.close()
    assert conversation.messages[-1]["content"] == begun
    afresh = talk(max_tokens=12)
    afresh.replace(conversation.messages)
    assert say(conversation, "Go on.") == say(afresh, "Go on.")


def test_an_overlong_message_is_refused_and_taken_back(talk: Callable[..., Conversation]):
    conversation = talk(max_context=64)
    say(conversation, CAPITAL)
    before = conversation.messages
    with pytest.raises(SpecStreamError, match=r"has \d+ tokens, the context holds 64: /reset"):
        say(conversation, "word " * 100)
    assert conversation.messages == before
    say(conversation, "And of Italy?")
    assert conversation.answer.last.cached_tokens > 37


def test_system_message_reset_and_replace(talk: Callable[..., Conversation]):
    conversation = talk(system="You speak like a pirate.", max_tokens=4)
    assert "pirate" in conversation.tokenizer.decode(conversation.prompt())
    say(conversation, CAPITAL)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "You speak like a pirate."}]
    conversation.replace([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert conversation.system is None and len(conversation.messages) == 2


def test_without_a_template_the_model_continues_the_text(talk: Callable[..., Conversation]):
    conversation = talk()

    class Bare:
        has_chat_template = False
        bos_token = None

        def encode(self, text: str, add_special_tokens: bool) -> str:
            return text

    conversation.tokenizer = Bare()
    conversation.turns = [
        {"role": "user", "content": "One two"},
        {"role": "assistant", "content": " three"},
        {"role": "user", "content": "Four"},
    ]
    assert conversation.prompt() == "One two three\nFour"


def test_a_template_that_refuses_is_one_line(talk: Callable[..., Conversation]):
    conversation = talk(template_config={"messages": "twice"})
    with pytest.raises(SpecStreamError, match="chat template failed"):
        say(conversation, CAPITAL)
    assert conversation.messages == []


# Saved conversations


def test_save_and_load(talk: Callable[..., Conversation], tmp_path: Path):
    conversation = talk(system="Be brief, ü.", max_tokens=5)
    say(conversation, CAPITAL)
    path = tmp_path / "chat.json"
    for _ in range(2):  # the second time over a saved conversation
        assert f"saved 2 messages to {path}" in chat_commands.run(
            conversation, "m", f"/save {path}"
        )
    saved = json.loads(path.read_text(encoding="utf-8"))
    assert saved["model"] == "m" and saved["options"]["max_tokens"] == 5
    assert list(tmp_path.iterdir()) == [path]

    other = talk()
    assert chat_commands.run(other, "n", f"/load {path}") == "loaded 2 messages (of a chat with m)"
    assert other.messages == conversation.messages


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "no messages"),
        (b'{"messages": [1]}', "message 1 needs"),
        (b'{"messages": [{"role": "user", "content": 3}]}', "message 1 needs"),
        (b'{"messages": [{"role": "user", "content": "a"}]}', "roles are not"),
        (b'{"messages": [{"role": "tool", "content": "a"}]}', "message 1 needs"),
    ],
)
def test_a_failed_load_keeps_the_conversation(
    talk: Callable[..., Conversation], tmp_path: Path, content: bytes | None, says: str
):
    path = tmp_path / "chat.json"
    if content is not None:
        path.write_bytes(content)
    conversation = talk()
    conversation.turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(SpecStreamError, match=says) as caught:
        chat_commands.run(conversation, "m", f"/load {path}")
    assert "\n" not in str(caught.value)
    assert len(conversation.turns) == 2


def test_save_does_not_write_over_other_files(talk: Callable[..., Conversation], tmp_path: Path):
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    for name in (notes, tmp_path, "/dev/null"):
        with pytest.raises(SpecStreamError, match="is not a saved conversation"):
            transcripts.save(talk(), "m", str(name))
    with pytest.raises(SpecStreamError, match="cannot save"):
        transcripts.save(talk(), "m", str(tmp_path / "no" / "folder.json"))
    with pytest.raises(SpecStreamError, match="cannot save"):
        transcripts.save(talk(), "m", "~nobody-has-this-name/chat.json")
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(SpecStreamError, match="cannot save to"):
            transcripts.save(talk(), "m", name)
    with pytest.raises(SpecStreamError, match="cannot read"):
        transcripts.read("~nobody-has-this-name/chat.json")
    assert notes.read_text() == "mine" and list(tmp_path.iterdir()) == [notes]


def test_unknown_and_incomplete_commands(talk: Callable[..., Conversation]):
    for line, says in (("/frobnicate", "no command /frobnicate"), ("/save", "needs a file")):
        with pytest.raises(SpecStreamError, match=says):
            chat_commands.run(talk(), "m", line)


# How text is written


def test_one_line():
    line = chat.OneLine()
    pieces = ["\n One", "", " \n", "\n", "  two", " ", "three", "\r\n", "four \n"]
    assert "".join(map(line.add, pieces)) == "One two three four"


def written(pieces: list[str], width: int = 20, style: str = "", **console: Any) -> str:
    file = io.StringIO()
    writer = WrappedWriter(Console(file=file, width=width, **console))
    for piece in pieces:
        writer.write(piece, style)
    writer.finish()
    return file.getvalue()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("The quick brown fox jumps over", ["The quick brown fox", "jumps over"]),
        ("exactly twenty wide! next", ["exactly twenty wide!", "next"]),
        ("\n\n a\n\n  b  \n", ["a", "", "  b"]),
        ("x" * 25 + " y", ["x" * 25 + " y"]),  # the terminal breaks it, after which 5 stand
        ("x" * 25 + " " + "y" * 15, ["x" * 25, "y" * 15]),
        ("日本語" * 4, ["日本語" * 3 + "日", "本語"]),
        ("a\tb\x1b[31mc\r", ["a   b[31mc"]),
        ("", []),
    ],
)
def test_words_are_wrapped_however_they_come(text: str, lines: list[str]):
    expected = "".join(line + "\n" for line in lines)
    assert written([text]) == expected
    if "\t" not in text:
        assert written(list(text)) == expected


def test_marks_follow_the_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[4;32ma\x1b[0m" in written(["a"], style="green underline", force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[4ma\x1b[0m" in written(["a"], style="green underline", force_terminal=True)
    monkeypatch.setenv("TERM", "dumb")
    assert written(["a"], style="green underline", force_terminal=True) == "a\n"


def test_joined_breaks_between_parts():
    assert joined(["aaaa", "bbbb", "cccc"], 11) == "aaaa · bbbb\ncccc"


# The terminal's parts


def test_the_second_ctrl_c_interrupts():
    calls = []
    before = signal.getsignal(signal.SIGINT)
    with interruptible(lambda: calls.append(1)):
        signal.raise_signal(signal.SIGINT)
        assert calls == [1]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before


def test_history_is_kept_where_it_can_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("MLX_SPECSTREAM_CACHE", str(tmp_path / "new"))
    kept = history()
    assert isinstance(kept, QuietHistory)
    kept.append_string("hello")
    assert "hello" in (tmp_path / "new" / "history").read_text()
    (tmp_path / "file").touch()
    for nowhere in (str(tmp_path / "file"), "~nobody-has-this-name"):
        monkeypatch.setenv("MLX_SPECSTREAM_CACHE", nowhere)
        assert isinstance(history(), InMemoryHistory)


def test_completion(tmp_path: Path):
    (tmp_path / "talk.json").touch()

    def offered(text: str) -> list[str]:
        found = CommandCompleter().get_completions(Document(text), CompleteEvent())
        return [completion.text for completion in found]

    assert offered("/s") == ["/system", "/stats", "/save"]
    assert offered("hello /s") == []
    assert offered(f"/load {tmp_path}/ta") == ["lk.json"]


# Through a pipe


def test_a_line_in_a_line_out(
    loaded: tuple[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    lines = [
        CAPITAL,
        "",
        "/frobnicate",
        "word " * 200,
        "Name three fruits.",
        "/stats",
        "/quit",
        "x",
    ]
    monkeypatch.setattr(options, "load", lambda *args, **kwargs: loaded)
    monkeypatch.setattr(sys, "argv", ["chat", "--verbose", "--max-kv-size", "150"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    with pytest.raises(SystemExit) as stop:
        chat.main()
    assert stop.value.code == 1  # not every line could be answered
    out, err = capsys.readouterr()
    paris, refused, fruits = out.splitlines()
    assert paris == "The capital of France is Paris." and refused == "" and fruits
    assert "error: there is no command /frobnicate" in err
    assert "the context holds 150: /reset" in err
    assert "answers    2 · " in err and "reused 44/" in err
    assert err.splitlines()[0].endswith("CPU · n-gram lookup")


def test_piped_in_a_process_of_its_own(embedded_model: Path):
    command = [sys.executable, "-m", "mlx_specstream.chat"]
    done = subprocess.run(
        command, input=f"{CAPITAL}\n", capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n")
    assert done.stderr == ""


# In a terminal


class Screen:
    """A chat in a terminal of its own; what it showed, without colours and cursor movements."""

    def __init__(self, *arguments: str):
        environment = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-m", "mlx_specstream.chat", *arguments]
            os.execve(sys.executable, command, environment)
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._shown = ""

    def press(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait(self, pattern: str, seconds: float = 60) -> str:
        """What is shown up to the pattern, from where the last wait ended."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self._shown)) is None:
            if not self._read(end):
                raise AssertionError(f"no {pattern!r} in {self._shown!r}")
        before, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return before

    def enter(self, keys: str) -> None:
        """Type at the next prompt, once it is there."""
        self.wait(r"\n>")
        self.press(keys)

    def ended(self, seconds: float = 20) -> int | None:
        """The exit code, or None if the chat goes on."""
        end = time.monotonic() + seconds
        while self._read(end):
            pass
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self._terminal], [], [], max(end - time.monotonic(), 0))
        try:
            data = os.read(self._terminal, 65536).decode(errors="replace") if ready else ""
        except OSError:  # Linux says so when the other side has closed
            data = ""
        self._shown += re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>])", "", data)
        return bool(data)


@pytest.fixture
def screen(embedded_model: Path) -> Iterator[Screen]:
    screen = Screen("--show-accepted")
    yield screen
    try:
        os.kill(screen.pid, signal.SIGKILL)
        os.waitpid(screen.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def test_a_chat_in_a_terminal(screen: Screen, tmp_path: Path):
    figures = r"per pass[\s\S]*?first \d+\.\d\d s"
    first = screen.wait("/help lists the commands")
    assert re.search(r"4-bit.* MB · CPU\s+(· )?n-gram lookup", first)
    screen.wait("accepted proposals are marked: ngram")

    screen.enter(CAPITAL + "\r")
    screen.wait(r"The capital of France is Paris\.\r\n8 tokens")
    screen.wait(figures)

    screen.enter(STORY + "\r")
    screen.wait("Once upon a time")
    screen.press("\x03")
    assert "^C" not in screen.wait("first [^>]*stopped")
    screen.press("\x03\x03")  # whenever it comes, it does not end the chat

    screen.enter("thrown away\x03")
    screen.enter("/frobnicate\r")
    screen.wait("there is no command /frobnicate")
    screen.enter(f"/save {tmp_path}/chat.json\r")
    screen.wait("saved 4 messages")
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert saved[3]["content"].startswith("Once upon a time")
    screen.enter("/reset\r")
    screen.wait("a new conversation")
    screen.enter("/load /no/such/file\r")
    screen.wait("cannot read /no/such/file: No such file")
    screen.enter(f"/load {tmp_path}/chat.json\r")
    screen.wait("loaded 4 messages")

    screen.enter("Name a fruit\x1b\ror two.\r")  # Alt-Enter: two lines, one message
    screen.wait(figures)
    screen.enter("/stats\r")
    screen.wait("answers    3 · ")
    screen.enter("\x04")
    assert screen.ended() == 0
