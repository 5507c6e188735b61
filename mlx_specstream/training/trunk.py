"""The trunk cache: what the frozen target computes of a corpus, once.

For every text: the final hidden state of the positions that streams start from, and, for streams
through the top layers, the hidden state entering them there and the layers' keys and values of all
positions. float16 on disk, one safetensors file per ``SHARD`` texts, read by memory map.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import safe_open

from ..errors import SpecStreamError
from ..streams.files import weights_fingerprint
from ..target import Target, TreeLayout
from ..target.cache import extent
from .corpus import Corpus, Text

SHARD = 64


@dataclass(frozen=True)
class TrunkStates:
    """What the target computed of one text.

    Args:
        final: Normed final hidden state at the anchors, ``(anchors, hidden)``.
        entering: Hidden state entering the top layers at the anchors, ``(anchors, hidden)``.
        kv: Keys and values of the top layers at all positions,
            ``(2 * layers, kv_heads, tokens, head_dim)``.
    """

    final: mx.array
    entering: mx.array | None
    kv: mx.array | None


class TrunkCache:
    """Trunk states of a corpus in a folder, computed where missing.

    Args:
        folder: Where shards are kept, in a folder for each target and number of layers, named by
            their texts: a corpus that grows at its end keeps the shards it has. None keeps
            nothing and computes what is read.
        target: The target.
        corpus: The texts.
        layers: Top layers whose inputs, keys and values are wanted; 0 for the final state only.
    """

    def __init__(self, folder: str | Path | None, target: Target, corpus: Corpus, layers: int = 0):
        self.target, self.corpus, self.layers = target, corpus, layers
        self.folder = None
        if folder is not None:
            self.folder = Path(folder) / f"{weights_fingerprint(target)[:16]}-{layers}"
            self._names = [self._name(number) for number in range(self.shards)]
        self._open: dict[int, Any] = {}

    @property
    def shards(self) -> int:
        """Number of shard files."""
        return -(-len(self.corpus) // SHARD)

    def nbytes(self) -> int:
        """Bytes of the whole cache on disk."""
        hidden = 2 * self.target.hidden_size
        anchors = sum(len(text.anchors) for text in self.corpus)
        total = anchors * hidden
        if self.layers:
            family = self.target.family
            per_token = 2 * self.layers * family.kv_heads * family.head_dim * 2
            total += anchors * hidden + per_token * sum(len(t.tokens) for t in self.corpus)
        return total

    def missing(self) -> list[int]:
        """Shards still to be computed."""
        if self.folder is None:
            return []
        return [n for n in range(self.shards) if not self._file(n).exists()]

    def build(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compute the missing shards. A kill loses one shard at most.

        Args:
            progress: Called with the tokens done and in all.

        Raises:
            SpecStreamError: If the disk cannot hold them.
        """
        todo = self.missing()
        if not todo or self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        needed = int(self.nbytes() * len(todo) / self.shards)
        free = shutil.disk_usage(self.folder).free
        if needed > 0.95 * free:
            raise SpecStreamError(
                f"the trunk cache needs {needed / 1e9:.1f} GB in {self.folder} and only "
                f"{free / 1e9:.1f} GB are free: choose another folder, fewer texts or --no-cache"
            )
        texts = {n: self.corpus.texts[n * SHARD : (n + 1) * SHARD] for n in todo}
        total = sum(len(text.tokens) for part in texts.values() for text in part)
        done = 0
        for number in todo:
            arrays: dict[str, mx.array] = {}
            for index, text in enumerate(texts[number]):
                states = self.compute(text)
                for name in ("final", "entering", "kv"):
                    value = getattr(states, name)
                    if value is not None:
                        arrays[f"{index}.{name}"] = value.astype(mx.float16)
                mx.eval(arrays)
                done += len(text.tokens)
                if progress:
                    progress(done, total)
            temporary = self._file(number).with_suffix(".tmp.safetensors")
            try:
                mx.save_safetensors(str(temporary), arrays)
                os.replace(temporary, self._file(number))
            except (OSError, RuntimeError) as error:
                temporary.unlink(missing_ok=True)
                raise SpecStreamError(f"cannot write the trunk cache: {error}") from error

    def compute(self, text: Text) -> TrunkStates:
        """Run the target over a text."""
        target = self.target
        count = len(text.tokens)
        cache = target.make_cache(step=extent(count, 1 << 30))
        cache.reserve(count)
        tokens = mx.array(text.tokens)
        split = len(target.blocks) - self.layers
        output = target.forward(
            tokens, cache.kv, TreeLayout.chain(count - 1), mx.array(0), cache.capacity, tap=split
        )
        at = slice(text.anchors.start, text.anchors.stop)
        if not self.layers:
            return TrunkStates(output.hidden[at], None, None)
        assert output.tap is not None
        top = [array[0, :, :count] for array in output.kv[2 * split :]]
        return TrunkStates(output.hidden[at], output.tap[at], mx.stack(top))

    def read(self, number: int, final_only: bool = False) -> TrunkStates:
        """The states of one text in the target's dtype, or its final hidden states alone."""
        if self.folder is None:
            states = self.compute(self.corpus.texts[number])
            mx.eval([state for state in vars(states).values() if state is not None])
            return states
        shard, index = divmod(number, SHARD)
        if shard not in self._open:
            self._open[shard] = safe_open(self._file(shard), framework="np")
        file = self._open[shard]

        def array(name: str) -> mx.array:
            values: np.ndarray = file.get_tensor(f"{index}.{name}")
            return mx.array(values).astype(self.target.dtype)

        if final_only or not self.layers:
            return TrunkStates(array("final"), None, None)
        return TrunkStates(array("final"), array("entering"), array("kv"))

    def _file(self, number: int) -> Path:
        assert self.folder is not None
        return self.folder / self._names[number]

    def _name(self, number: int) -> str:
        """File name of a shard: the hash of its texts."""
        texts = self.corpus.texts[number * SHARD : (number + 1) * SHARD]
        digest = hashlib.sha256("".join(text.digest for text in texts).encode())
        return f"{digest.hexdigest()[:24]}.safetensors"
