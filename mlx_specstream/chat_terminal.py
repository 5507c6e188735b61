"""The chat in a terminal: line editing, answers as they come, Ctrl-C for an answer only."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import Condition, completion_is_selected
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.status import Status
from rich.text import Text

from . import chat_commands, embedded
from .chat_commands import COMMANDS, Quit
from .chat_writer import WrappedWriter, joined
from .conversation import Conversation
from .errors import SpecStreamError

KEYS_HELP = (
    "Enter sends, Alt-Enter (or Esc Enter) begins a new line; "
    "Ctrl-C stops an answer or clears the line, Ctrl-D ends the chat"
)
ACCEPTED_STYLES = {
    "ngram": "green underline",
    "table": "magenta underline",
    "streams": "cyan underline",
}
LONG_PROMPT = 400  # tokens to compute from which reading them is shown


class Terminal:
    """The chat's loop.

    Args:
        conversation: The conversation.
        model: The model's name.
        show_accepted: Mark the tokens that came from proposals.
        show_figures: Print a line of figures after each answer.
    """

    def __init__(
        self, conversation: Conversation, model: str, show_accepted: bool, show_figures: bool
    ):
        self.conversation = conversation
        self.model = model
        self.console = Console(highlight=False, markup=False, emoji=False)
        self._marks = show_accepted
        self._figures = show_figures
        self._prompt = line_editor()

    def greet(self, facts: Sequence[str]) -> None:
        """The first lines."""
        self.console.print(joined(facts, self.console.width))
        hint = "/help lists the commands · Ctrl-C stops an answer · Ctrl-D ends the chat"
        self.console.print(hint, style="dim")
        if not self.conversation.tokenizer.has_chat_template:
            self.console.print("no chat template: the model continues your text", style="dim")
        if self._marks:
            self.console.print(self._legend())
        self.console.print()

    def _legend(self) -> Text:
        if self.console.is_dumb_terminal:
            return Text("this terminal cannot mark the accepted tokens")
        names = [Text(name, ACCEPTED_STYLES[name]) for name in self.conversation.proposers]
        if not names:
            return Text("nothing is proposed, so no token is marked")
        return Text(" ").join([Text("accepted proposals are marked:", "dim"), *names])

    def run(self) -> None:
        """Read, answer, until the user ends it."""
        with without_echo():
            while self._turn():
                self.console.print()

    def _turn(self) -> bool:
        """A line, and what it asks for; returns whether to go on."""
        try:
            # Outside an answer and the prompt Ctrl-C does nothing (the prompt sets the default).
            signal.signal(signal.SIGINT, lambda number, frame: None)
            line = self._prompt.prompt()
            signal.signal(signal.SIGINT, lambda number, frame: None)
            if chat_commands.is_command(line):
                self._command(line)
            elif line.strip():
                self._answer(line.strip())
        except KeyboardInterrupt:
            pass
        except (EOFError, Quit):
            return False
        except SpecStreamError as error:
            self.console.print(str(error), style="red")
        return True

    def _command(self, line: str) -> None:
        text = chat_commands.run(self.conversation, self.model, line)
        self.console.print(text)
        if line.split() == ["/help"]:
            self.console.print(f"{KEYS_HELP}.\n{chat_commands.FIGURES_HELP}.", style="dim")

    def _answer(self, text: str) -> None:
        writer = WrappedWriter(self.console)
        try:
            with reading(self.console) as progress, interruptible(self.conversation.cancel):
                for response in self.conversation.ask(text, progress):
                    progress(0, 0)
                    owner = response.proposer if self._marks else None
                    writer.write(response.text, ACCEPTED_STYLES.get(owner or "", ""))
        except KeyboardInterrupt:  # the second: the answer ends where it is
            pass
        writer.finish()
        answer = self.conversation.answer
        if answer is None:
            self.console.print("stopped before the first token: nothing was added", style="dim")
        elif self._figures:
            parts = chat_commands.figures(answer)
            self.console.print(joined(parts, self.console.width), style="dim")


@contextlib.contextmanager
def reading(console: Console) -> Iterator[Callable[[int, int], None]]:
    """Shows how far a long prompt is read; the function given takes tokens read and in all."""
    status: Status | None = None

    def progress(done: int, total: int) -> None:
        nonlocal status
        if status is None and total - done > LONG_PROMPT and console.is_terminal:
            status = console.status("", spinner_style="dim")
            status.start()
        if status is not None:
            status.update(Text(f"reading, {done} of {total} tokens", "dim"))
            if done == total:
                status.stop()
                status = None

    try:
        yield progress
    finally:
        progress(0, 0)


@contextlib.contextmanager
def interruptible(cancel: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C calls ``cancel``; a second one raises KeyboardInterrupt."""
    pressed = False

    def handle(signal_number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextlib.contextmanager
def without_echo() -> Iterator[None]:
    """Keys pressed during an answer do not show in it; the next prompt gets them."""
    import termios

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before[:3], before[3] & ~termios.ECHO, *before[4:]]
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class CommandCompleter(Completer):
    """Slash commands, then file names for those that take one."""

    def __init__(self) -> None:
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterator[Completion]:
        text = document.text_before_cursor
        name, space, argument = text.partition(" ")
        if not space and name.startswith("/"):
            for command, entry in COMMANDS.items():
                if command.startswith(name):
                    yield Completion(command, -len(name), display_meta=entry.help)
        elif name in COMMANDS and COMMANDS[name].argument == "FILE":
            yield from self._paths.get_completions(Document(argument), event)


class QuietHistory(FileHistory):
    """A history file that may become unwritable; the chat goes on without it."""

    def store_string(self, string: str) -> None:
        with contextlib.suppress(OSError):
            super().store_string(string)


def history() -> History:
    """The lines typed in earlier chats, or of this one only if they cannot be kept."""
    try:
        path = embedded.cache_dir() / "history"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        with path.open("r+b"):
            pass
    except (OSError, SpecStreamError):
        return InMemoryHistory()
    return QuietHistory(str(path))


def line_editor() -> PromptSession[str]:
    """The prompt: Enter sends, Alt-Enter breaks the line, "/" offers the commands."""
    keys = KeyBindings()

    @keys.add("enter", filter=~completion_is_selected)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("escape", "c-j")  # as typed ahead, before the terminal is set up for the prompt
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    editor: PromptSession[str] = PromptSession(
        FormattedText([("bold", "> ")]),
        multiline=True,
        prompt_continuation="  ",
        history=history(),
        key_bindings=keys,
        completer=CommandCompleter(),
        # Only then: the menu's room would push the prompt up at every line.
        complete_while_typing=Condition(lambda: editor.default_buffer.text.startswith("/")),
    )
    return editor
