"""From token ids to text, a piece at a time, and where to stop in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes tokens as they come; the pieces add up to ``tokenizer.decode`` of them all.

    Args:
        tokenizer: A Hugging Face tokenizer, or mlx-lm's wrapper of one.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self._stream = DecodeStream(skip_special_tokens=False)
        self._tokens: list[int] = []
        self._given = 0  # characters handed out

    def add(self, token: int) -> str:
        """The text that a token completes: "" in the middle of a character."""
        self._tokens.append(token)
        if self._backend is not None:
            piece = self._stream.step(self._backend, token) or ""
        else:
            text = self._tokenizer.decode(self._tokens)
            piece = "" if text.endswith("\ufffd") else text[self._given :]
        self._given += len(piece)
        return piece

    def finish(self) -> str:
        """What is left when no more tokens come: an unfinished character, mostly nothing."""
        rest = self._tokenizer.decode(self._tokens)[self._given :]
        self._given += len(rest)
        return rest


class StopStrings:
    """Holds text back while it may be the beginning of a stop string.

        >>> stop = StopStrings(["END"])
        >>> stop.add("the E"), stop.add("N"), stop.add("D of it"), stop.found
        ('the ', '', '', True)

    Args:
        strings: Where to stop; the text ends before the first of them.
    """

    def __init__(self, strings: Sequence[str] = ()):
        self._strings = [string for string in strings if string]
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that is certain now; nothing more after a stop string was found."""
        if self.found:
            return ""
        self._held += piece
        starts = [at for s in self._strings if (at := self._held.find(s)) >= 0]
        if starts:
            self.found = True
            return self._release(min(starts), drop=True)
        return self._release(len(self._held) - self._open())

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        return self._release(len(self._held))

    def _open(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = max((len(s) for s in self._strings), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-size:]) for s in self._strings):
                return size
        return 0

    def _release(self, count: int, drop: bool = False) -> str:
        sure, self._held = self._held[:count], "" if drop else self._held[count:]
        return sure
