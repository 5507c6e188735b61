"""Quality of streams on held-out text: on the texts that training held out, where that is known."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecStreamError
from ..streams.files import CONFIG_FILE
from ..streams.heads import StreamHeads
from .corpus import Corpus
from .evaluate import evaluate
from .trunk import TrunkCache

LAST_TEXTS = 32  # of a corpus, where nothing says which were held out


@dataclass(frozen=True)
class HeldOut:
    """Quality on held-out text.

    Args:
        texts: How many texts.
        recorded: Whether they are those that training says it held out. A streams folder does
            not say of which corpus: of another one, streams may have been trained on them. Else
            they are the last of the corpus, and that holds too.
        hits: ``hits[j][k]``: share of positions where stream j+1's k-th candidate is the token.
        tokens_per_pass: Expected for a chain and for the trees of the best 2 and 4.
    """

    texts: int
    recorded: bool
    hits: list[list[float]]
    tokens_per_pass: dict[str, float]

    @property
    def which(self) -> str:
        """Which texts these are, for people."""
        if self.recorded:
            return f"{self.texts} texts held out in training"
        return f"the last {self.texts} texts of the corpus (training may have had them)"

    @property
    def accuracy(self) -> list[float]:
        """Share of positions where each stream's best candidate is right."""
        return [ranks[0] for ranks in self.hits]


def measure_held_out(
    heads: StreamHeads,
    corpus: Corpus,
    folder: Path | None,
    texts: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HeldOut:
    """Measure streams on the texts that training held out, else on the last of a corpus.

    Args:
        heads: The streams.
        corpus: Texts of their target.
        folder: The streams folder, whose ``config.json`` says what was held out; or None.
        texts: Most texts; None for all held out, else the last ``LAST_TEXTS``.
        progress: Called with the tokens done and in all.

    Raises:
        SpecStreamError: If no text is long enough to predict in.
    """
    recorded = held_out_in_training(folder, corpus)
    chosen = recorded[:texts] or range(len(corpus))[-(texts or LAST_TEXTS) :]
    gamma = heads.config.gamma
    few = [corpus.texts[n] for n in chosen]
    few = [t for t in few if t.anchors and t.anchors.start + gamma + 1 < len(t.tokens)]
    if not few:
        raise SpecStreamError(f"no text to measure on has an answer of {gamma + 2} tokens")
    part = Corpus(tuple(few), corpus.tokenizer)
    with tempfile.TemporaryDirectory(prefix="specstream-report-") as work:
        trunk = TrunkCache(work, heads.target, part, heads.config.trunk_layers)
        trunk.build(progress)
        quality = evaluate(heads, trunk, range(len(part)))
    heads.let_go()
    return HeldOut(len(few), bool(recorded), quality.hits.tolist(), quality.tokens_per_pass)


def held_out_in_training(folder: Path | None, corpus: Corpus) -> list[int]:
    """The texts that the streams of a folder were not trained with, by number.

    Those are named in its ``config.json`` by their content (``Text.digest``); nothing where it
    records no training, or the corpus holds none of them.
    """
    if folder is None:
        return []
    try:
        names = json.loads((folder / CONFIG_FILE).read_text())["training"]["held_out"]
        known = {str(name) for name in names}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [number for number, text in enumerate(corpus) if text.digest in known]
