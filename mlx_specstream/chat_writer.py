"""Text on a terminal as it comes, broken at words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text


class WrappedWriter:
    """Prints text as it comes, broken at words; only the word in progress is held back.

    White space before the text and after it is left out. Scripts without spaces break anywhere.

    Args:
        console: Where to print.
    """

    _WIDE = "\u2e80-\ud7ff\uf900-\uffef\U00020000-\U0003ffff"
    _PARTS = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")
    _CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline

    def __init__(self, console: Console):
        self._console = console
        self._column = 0
        self._begun = False
        self._breaks = 0  # line breaks before the word
        self._gap: list[Text] = []  # spaces before the word
        self._word: list[Text] = []

    def write(self, text: str, style: str = "") -> None:
        """Add a piece of text."""
        for part in self._PARTS.findall(self._CONTROL.sub("", text).expandtabs(4)):
            if part == "\n":
                self._print_word()
                self._breaks += 1
                self._gap = []
            elif part.isspace():
                self._print_word()
                self._gap.append(Text(part, style))
            else:
                wide = cell_len(part[0]) > 1
                if wide:
                    self._print_word()
                self._word.append(Text(part, style))
                if wide or sum(t.cell_len for t in self._word) > self._console.width:
                    self._print_word()

    def finish(self) -> None:
        """No more text comes: print what is held back, and end the line."""
        self._print_word()
        if self._begun:
            self._console.print()

    def _print_word(self) -> None:
        if not self._word:
            return
        size = sum(t.cell_len for t in self._word)
        space = sum(t.cell_len for t in self._gap)
        if not self._begun:
            self._breaks, space, self._gap = 0, 0, []
        elif not self._breaks and self._column and self._column + space + size > self._width:
            self._breaks, space, self._gap = 1, 0, []
        if self._breaks:
            self._column = 0
        parts = Text("\n" * self._breaks).append_text(Text().join(self._gap + self._word))
        self._console.print(parts, end="", soft_wrap=True)
        self._column = (self._column + space + size - 1) % self._width + 1
        self._begun, self._breaks, self._gap, self._word = True, 0, [], []

    @property
    def _width(self) -> int:
        return self._console.width


def joined(parts: Sequence[str], width: int) -> str:
    """Parts with dots between them, broken only between parts."""
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(lines[-1]) + 3 + cell_len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return "\n".join(lines)
