"""Corpora for tests: a tiny target's own answers."""

from __future__ import annotations

import numpy as np
from tiny import decoded, target_of, text_of

from mlx_specstream import Sampling
from mlx_specstream.training.corpus import Corpus, Text

PROMPT = 8  # tokens of a prompt


def corpus_of(name: str = "grouped", count: int = 24, hash_of: str = "h") -> Corpus:
    """Prompts with a tiny target's own answers of various lengths."""
    texts = []
    for seed in range(count):
        prompt = text_of(PROMPT, seed=seed)
        said = decoded(target_of(name), prompt, 9 + seed, "none", Sampling(temp=0.5), seed=seed)
        texts.append(Text(np.array([*prompt, *said], dtype=np.int32), PROMPT, f"kind{seed % 3}"))
    return Corpus(tuple(texts), hash_of)
