"""Streaming text and stop strings."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlx_specstream.decode.text import StopStrings, TextStream


class Wrapped:
    """A tokenizer as mlx-lm's wrapper shows it: with or without a fast backend."""

    def __init__(self, backend: Tokenizer, fast: bool):
        self._backend = backend
        if fast:
            self.backend_tokenizer = backend

    def decode(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)


TEXTS = [
    " leading space, then text",
    "naïve café — 東京 🙂👩‍👩‍👧 done",
    "def f(x):\n    return x  # two  spaces\n\n\ttab",
    "12345 67.89 <|im_end|> after",
    "",
]


@pytest.fixture(scope="module")
def backend(embedded_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model / "tokenizer.json"))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_decoded_text(backend, text, fast):
    tokens = backend.encode(text).ids
    stream = TextStream(Wrapped(backend, fast))
    pieces = [stream.add(token) for token in tokens] + [stream.finish()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_comes_at_the_end(backend):
    tokens = backend.encode("🙂").ids[:-1]
    stream = TextStream(Wrapped(backend, True))
    assert "".join(stream.add(token) for token in tokens) == ""
    assert stream.finish().count("\ufffd") >= 1


def test_stop_strings_against_a_search_in_the_whole_text():
    chance = random.Random(3)
    for _ in range(2000):
        text = "".join(chance.choice("ab") for _ in range(chance.randrange(14)))
        stops = ["".join(chance.choice("ab") for _ in range(chance.randrange(1, 5)))
                 for _ in range(chance.randrange(3))]  # fmt: skip
        stop, shown, rest = StopStrings(stops), "", text
        while rest and not stop.found:
            size = chance.randrange(1, 4)
            shown += stop.add(rest[:size])
            rest = rest[size:]
        given = text[: len(text) - len(rest)]
        shown += stop.finish()
        first = min((given.find(s) for s in stops if s in given), default=len(given))
        assert shown == given[:first]
        assert stop.found == any(s in given for s in stops)


def test_only_what_could_still_become_a_stop_string_is_held_back():
    stop = StopStrings(["END", "ENOUGH"])
    assert [stop.add("the E"), stop.add("N"), stop.add("TRY E")] == ["the ", "", "ENTRY "]
    assert stop.finish() == "E"
