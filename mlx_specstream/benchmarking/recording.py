"""A recorded run: for every position of some answers, what each proposer would have had right.

Recorded once with the model (``record.py``), it tells without the model what any tree would have
committed (``replay.py``).
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SpecStreamError
from ..writing import written_whole

FORMAT = 1
MOST_LOOKED_UP = 15  # tokens of a chain of lookups
MOST_RANKS = 8  # candidates of a stream
NOT_RIGHT = -1  # the rank of a token that is not among them
LOOKUPS = ("ngram", "table")  # who fills chains
LARGE = 2**24  # no count of tokens, and no token's id, reaches it
# What reading a file that is none may raise.
DAMAGES = (
    *(ValueError, KeyError, TypeError, AttributeError, RecursionError, EOFError, zlib.error),
)
SHIPPED = "recorded-smollm2-135m.json.gz"


@dataclass(frozen=True)
class RecordedPrompt:
    """One answer. Position p is that of its p-th token, counted from 0.

    Args:
        id: Name of the prompt.
        category: What kind of prompt it is.
        prompt_tokens: Tokens of the prompt.
        tokens: Of the answer.
        lookup: For each position how many tokens of the lookups' chain were right.
        filled: For each position which of the lookups filled it, -1 for none.
        streams: For each position and stream the rank of the right token among the stream's
            candidates, -1 if it is not among the first 8, below the right tokens before it.
            Empty where there are no streams.
    """

    id: str
    category: str
    prompt_tokens: int
    tokens: list[int]
    lookup: list[int]
    filled: list[int]
    streams: list[list[int]]


@dataclass(frozen=True)
class Recording:
    """A recorded run.

    Args:
        model: Name of the model.
        temp: Temperature of the answers.
        seed: Of sampled answers.
        lookups: Who fills chains, as plans write it.
        gamma: Number of streams; 0 for none.
        rates: Of the streams, as their folder has them, or None.
        rides_along: Whether streams know their state after passes that did not ask them.
        read_share: Bytes that streams read to propose, relative to those of a plain pass.
        held_share: Bytes held for streams and table, relative to the model's weights.
        prompts: The answers.
    """

    model: str
    temp: float
    seed: int
    lookups: str
    gamma: int
    rates: list[list[float]] | None
    rides_along: bool
    read_share: float
    held_share: float
    prompts: list[RecordedPrompt]

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    def __str__(self) -> str:
        how = f"temperature {self.temp:g}" if self.temp else "greedy"
        return f"{self.model}, {len(self.prompts)} prompts, {self.tokens} tokens, {how}"

    def save(self, path: Path) -> None:
        """Write it, the whole file or nothing; compressed if its name ends in ``.gz``.

        Raises:
            SpecStreamError: If it cannot be written.
        """
        content = json.dumps({"format": FORMAT, **asdict(self)}, separators=(",", ":")).encode()
        with written_whole(path) as file:
            # Without a time in it, so that the same recording is the same file.
            file.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read one.

        Raises:
            SpecStreamError: If the file cannot be read or is not a recording.
        """
        try:
            content = path.read_bytes()
            if path.suffix == ".gz":
                content = gzip.decompress(content)
            fields = json.loads(content)
            if fields.pop("format") != FORMAT:
                raise ValueError("it was made by another version of this program")
            prompts = [RecordedPrompt(**prompt) for prompt in fields.pop("prompts")]
            recording = cls(prompts=prompts, **fields)
            recording._check()
            return recording
        except OSError as error:
            raise SpecStreamError(f"cannot read {path}: {error.strerror or error}") from error
        except DAMAGES as error:
            raise SpecStreamError(f"{path} is not a recording: {error}") from error

    def _check(self) -> None:
        """Refuse what replaying would trip over.

        Raises:
            ValueError: If something is missing or out of its range.
        """
        if not self.prompts or not all(prompt.tokens for prompt in self.prompts):
            raise ValueError("it holds no answer, or an empty one")
        numbers = (self.temp, self.read_share, self.held_share)
        if not all(isinstance(n, (int, float)) and 0 <= n < LARGE for n in numbers):
            raise ValueError("a number is missing")
        _check_range([self.gamma], 0, LARGE)
        names = self.lookups.split("|")
        if not set(names) <= set(LOOKUPS):
            raise ValueError(f"lookups are {' and '.join(LOOKUPS)}, not {self.lookups!r}")
        if self.rates is not None:
            _check_rates(self.rates, self.gamma)
        for prompt in self.prompts:
            if not isinstance(prompt.id, str) or not isinstance(prompt.category, str):
                raise ValueError("a prompt's id and category must be text")
            _check_range([prompt.prompt_tokens], 1, LARGE)
            _check_range(prompt.tokens, 0, LARGE)
            count = len(prompt.tokens)
            if not len(prompt.lookup) == len(prompt.filled) == count:
                raise ValueError(f"the lookups of {prompt.id} do not fit its answer")
            if len(prompt.streams) != (count if self.gamma else 0):
                raise ValueError(f"the streams of {prompt.id} do not fit its answer")
            _check_range(prompt.lookup, 0, MOST_LOOKED_UP)
            _check_range(prompt.filled, NOT_RIGHT, len(names) - 1)
            for ranks in prompt.streams:
                if len(ranks) != self.gamma:
                    raise ValueError(f"{prompt.id} has not {self.gamma} streams everywhere")
                _check_range(ranks, NOT_RIGHT, MOST_RANKS - 1)


def _check_range(values: Sequence[Any], least: int, most: int) -> None:
    """Refuse a value that is no whole number from ``least`` to ``most``."""
    wrong = next((v for v in values if not (isinstance(v, int) and least <= v <= most)), None)
    if wrong is not None:
        raise ValueError(f"{wrong!r} is not a whole number from {least} to {most}")


def _check_rates(rates: Sequence[Any], gamma: int) -> None:
    """Refuse rates that are not shares for every stream."""
    lists = all(isinstance(ranks, list) and ranks for ranks in rates)
    if not lists or len(rates) < gamma:
        raise ValueError(f"rates must be a list of numbers for each of {gamma} streams")
    every = [rate for ranks in rates for rate in ranks]
    if not all(isinstance(rate, (int, float)) and 0 <= rate <= 1 for rate in every):
        raise ValueError("rates must be numbers from 0 to 1")


def shipped() -> Path | None:
    """The recording of the default model that comes with the repository, if this is one."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / SHIPPED
    return path if path.is_file() else None
