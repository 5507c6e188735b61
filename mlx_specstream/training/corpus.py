"""A corpus: prompts with the target's own answers, as token ids.

What will be predicted at run time is the target's text, so that is what streams learn from. The
file is a compressed ``.npz``: all tokens one after the other, and where each text and its answer
begin. A text is ``prompt + answer``; the answer ends with the end-of-text token unless it was cut.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import SpecStreamError


class Text(NamedTuple):
    """One prompt with its answer.

    Args:
        tokens: Prompt and answer, ``(n,)`` int32.
        answer: Index of the answer's first token.
        category: What kind of prompt it is.
    """

    tokens: np.ndarray
    answer: int
    category: str

    @property
    def digest(self) -> str:
        """A name of the text, by its content."""
        return hashlib.sha256(f"{self.answer};".encode() + self.tokens.tobytes()).hexdigest()[:16]

    @property
    def anchors(self) -> range:
        """Positions whose next token is the answer's and has a token after it."""
        return range(self.answer - 1, len(self.tokens) - 2)


@dataclass(frozen=True)
class Corpus:
    """Texts of one target.

    Args:
        texts: The texts; prompts are not repeated.
        tokenizer: Hash of the tokenizer that made the ids (``streams.files.tokenizer_hash``).
    """

    texts: tuple[Text, ...]
    tokenizer: str

    def __iter__(self) -> Iterator[Text]:
        return iter(self.texts)

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def answer_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(text.tokens) - text.answer for text in self.texts)

    @classmethod
    def merged(cls, parts: Sequence[Corpus]) -> Corpus:
        """The texts of several corpora, each once, in order.

        Raises:
            SpecStreamError: If they were made with different tokenizers.
        """
        if len({part.tokenizer for part in parts}) != 1:
            raise SpecStreamError("the corpora were made with different tokenizers")
        texts: dict[bytes, Text] = {}
        for part in parts:
            for text in part:
                texts.setdefault(text.tokens.tobytes(), text)
        return cls(tuple(texts.values()), parts[0].tokenizer)

    def save(self, path: str | Path) -> None:
        """Write the corpus: the whole of it or nothing.

        Raises:
            SpecStreamError: If it cannot be written.
        """
        path = Path(path)
        lengths = np.array([len(text.tokens) for text in self.texts], dtype=np.int64)
        arrays: dict[str, Any] = {
            "tokens": np.concatenate([text.tokens for text in self.texts]).astype(np.uint32),
            "lengths": lengths,
            "answers": np.array([text.answer for text in self.texts], dtype=np.int64),
            "categories": np.array([text.category for text in self.texts]),
            "tokenizer": np.array(self.tokenizer),
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with open(descriptor, "wb") as file:
                    np.savez_compressed(file, **arrays)
                os.replace(temporary, path)
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise SpecStreamError(f"cannot write {path}: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: str | Path) -> Corpus:
        """Read a corpus.

        Raises:
            SpecStreamError: If it is missing or damaged.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            ends = np.cumsum(arrays["lengths"])
            parts = np.split(arrays["tokens"].astype(np.int32), ends[:-1])
            if ends[-1] != len(arrays["tokens"]):
                raise ValueError("its lengths do not add up")
            texts = tuple(
                Text(tokens, int(answer), str(category))
                for tokens, answer, category in zip(
                    parts, arrays["answers"], arrays["categories"], strict=True
                )
            )
            return cls(texts, str(arrays["tokenizer"]))
        except FileNotFoundError as error:
            raise SpecStreamError(f"there is no corpus {path}") from error
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
            raise SpecStreamError(f"{path} is not a corpus, or is damaged: {error}") from error


def templated(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt as the chat puts it to the model."""
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)


def from_answers(
    path: str | Path, tokenizer: Any, tokenizer_hash: str, cut_at: int | None = None
) -> Corpus:
    """Read prompts with answers as text: JSONL (``prompt``, ``answer``, ``category``), gzip or not.

    Args:
        path: The file.
        tokenizer: The target's.
        tokenizer_hash: Its hash.
        cut_at: Answers of at least this many tokens were cut there and did not end.

    Raises:
        SpecStreamError: If the file is missing or a line is not such an object, or no answer has
            two tokens.
    """
    texts, seen = [], set()
    for number, row in enumerate(json_lines(path), start=1):
        prompt, answer = row.get("prompt"), row.get("answer")
        if not isinstance(prompt, str) or not isinstance(answer, str):
            raise SpecStreamError(f"{path}, line {number}: a prompt and an answer are needed")
        if prompt in seen:
            continue
        seen.add(prompt)
        asked = templated(tokenizer, prompt)
        said = tokenizer.encode(answer, add_special_tokens=False)
        if cut_at is None or len(said) < cut_at - 1:
            said = [*said, tokenizer.eos_token_id]
        if len(said) >= 2:
            tokens = np.array([*asked, *said], dtype=np.int32)
            texts.append(Text(tokens, len(asked), str(row.get("category", ""))))
    if not texts:
        raise SpecStreamError(f"{path} holds no answer of at least two tokens")
    return Corpus(tuple(texts), tokenizer_hash)


def json_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, gzip or not."""
    path = Path(path)
    opener: Any = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"line {number} is not an object")
                    yield row
    except FileNotFoundError as error:
        raise SpecStreamError(f"there is no file {path}") from error
    except (OSError, ValueError, EOFError) as error:
        raise SpecStreamError(f"cannot read {path}: {error}") from error


def answers(corpus: Corpus) -> Iterator[Sequence[int]]:
    """Each answer with the three tokens before it, as an n-gram table counts it."""
    for text in corpus:
        yield text.tokens[max(text.answer - 3, 0) :].tolist()
