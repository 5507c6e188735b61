"""What every kind of stream head shares: the draft vocabulary, its head, and the correction."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import SpecStreamError
from ..target import PassOutput, Rows, Target, TreeLayout
from .config import StreamsConfig
from .packing import packed, plain


class StreamHeads(nn.Module):
    """Streams added to a target, whose weights and head they use.

    Subclasses say how the hidden state of each stream comes about. The parameters of this class
    are the correction's two matrices: stream j+1 does not see which token stream j proposed, so
    ``(E[token] A) (E[v] B)^T`` is added to the score of candidate v below that token, with E
    the target's embedding (docs/streams.md).

    Args:
        config: Shape of the heads.
        target: The target.

    Raises:
        SpecStreamError: If the shape does not fit the target.
    """

    def __init__(self, config: StreamsConfig, target: Target):
        super().__init__()
        self.config = config
        self.target = target
        ids = config.draft_vocab
        if ids is not None and not (ids and min(ids) >= 0 and max(ids) < target.vocab_size):
            raise SpecStreamError(
                f"the streams' draft vocabulary does not fit a vocabulary of {target.vocab_size}"
            )
        if config.correction_rank:
            shape = (target.hidden_size, config.correction_rank)
            self.correction_a = mx.zeros(shape)
            self.correction_b = mx.zeros(shape)
        self._draft_ids = self._draft_head = None
        if ids is not None:
            self._draft_ids = mx.array(ids, dtype=mx.int32)
            self._draft_head = target.family.head_rows(self._draft_ids)
        self._draft_keys: nn.Module | None = None
        self._draft_embedded: mx.array | None = None

    # What subclasses provide ------------------------------------------------------------------

    @property
    def rides_along(self) -> bool:
        """Whether ``forward`` costs no more than the target's own pass."""
        return True

    @property
    def scratch_rows(self) -> int:
        """Cache rows past the prefix that ``draft_hidden`` writes."""
        return 0

    def rows_written(self, layout: TreeLayout) -> int:
        """Cache rows past the prefix that ``forward`` writes for a tree."""
        return len(layout)

    def forward(
        self,
        tokens: mx.array,
        kv: list[mx.array],
        layout: TreeLayout,
        length: mx.array,
        extent: int,
    ) -> PassOutput:
        """The target's pass over a tree, with what the streams need along the way."""
        return self.target.forward(tokens, kv, layout, length, extent)

    def blank(self) -> mx.array:
        """An array shaped like what ``observed`` returns."""
        raise NotImplementedError

    def observed(self, output: PassOutput, row: mx.array) -> mx.array | None:
        """What the streams keep of a pass at its last accepted row; None if it had none."""
        raise NotImplementedError

    def draft_hidden(
        self, seen: mx.array, root: mx.array, kv: list[mx.array], length: mx.array, extent: int
    ) -> tuple[mx.array, list[mx.array]]:
        """Normed hidden states of the streams, ``(gamma, hidden)``, and the cache's buffers.

        Args:
            seen: What ``observed`` returned.
            root: The newest committed token, int32 scalar.
            kv: The cache's buffers.
            length: Committed rows, int32 scalar.
            extent: Cache rows that attention may read.
        """
        raise NotImplementedError

    def _pack(self) -> None:
        """Store the parameters of the subclass in fewer bits; see ``compact``."""
        raise NotImplementedError

    # What they share --------------------------------------------------------------------------

    def prepare(self) -> StreamHeads:
        """Compute what proposing needs and training would change; call after loading weights.

        Everything is evaluated: a traced pass would compute again, every time, what is not.
        """
        if self.config.correction_rank:
            keys = self.draft_embeddings() @ self.correction_b
            self._draft_keys = plain(keys)
            mx.eval(self._draft_keys.parameters())
            self.let_go()
        mx.eval(self.parameters(), *self._made())
        return self

    def compact(self) -> StreamHeads:
        """Store everything in fewer bits, once and for good: for decoding on a packed target.

        4 bits a weight for what the streams own and for their rows of the target's head (8 were
        not better), 8 for the keys of the correction. Streams whose target is not packed stay as
        they are.
        """
        if not self.target.is_packed:
            return self
        self._pack()
        if self._draft_head is not None:
            self._draft_head = packed(self._draft_head, bits=4)
        if self._draft_keys is not None:
            self._draft_keys = packed(self._draft_keys)
            self.correction_a = self.correction_a.astype(self.target.dtype)
        mx.eval(self.parameters(), *self._made())
        return self

    def draft_embeddings(self) -> mx.array:
        """The target's embeddings of the draft vocabulary, ``(draft vocabulary, hidden)``."""
        if self._draft_embedded is None:
            ids = self._draft_ids
            every = mx.arange(self.target.vocab_size) if ids is None else ids
            self._draft_embedded = self.target.family.embed(every)[0]
            mx.eval(self._draft_embedded)
        return self._draft_embedded

    def let_go(self) -> None:
        """Free what only training and evaluation need."""
        self._draft_embedded = None

    def draft_logits(self, hidden: mx.array) -> mx.array:
        """Scores of the draft vocabulary, ``(gamma, hidden) -> (gamma, draft vocabulary)``."""
        hidden = hidden.astype(self.target.dtype)
        if self._draft_head is None:
            return self.target.logits(hidden)
        return self.target.family.scaled(self._draft_head(hidden))

    def correction(self, tokens: mx.array) -> mx.array:
        """What tokens add to the scores below them, ``(n,) -> (n, draft vocabulary)``."""
        if self._draft_keys is None:
            return mx.zeros((1, 1))
        return self._draft_keys(self.target.family.embed(tokens)[0] @ self.correction_a)

    def draft_columns(self, noise: mx.array) -> mx.array:
        """The draft vocabulary's part of ``(vocabulary,)``."""
        return noise if self._draft_ids is None else noise[self._draft_ids]

    def draft_token(self, index: mx.array) -> mx.array:
        """Token id of an index into the draft vocabulary."""
        return index if self._draft_ids is None else self._draft_ids[index]

    def memory_bytes(self) -> int:
        """Bytes the streams add to the target: parameters and what ``prepare`` made."""
        arrays = [*_arrays(self.parameters()), *self._made()]
        return sum(array.nbytes for array in arrays)

    def _made(self) -> list[mx.array]:
        """What ``prepare`` made of the target and the parameters."""
        made = [m for m in (self._draft_head, self._draft_keys) if m is not None]
        return _arrays([list(module.values()) for module in made])


def _arrays(tree: object) -> list[mx.array]:
    """The arrays in nested dicts and lists."""
    if isinstance(tree, mx.array):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    return [array for item in items for array in _arrays(item)]


def stream_rows(layout: TreeLayout, gamma: int) -> Rows:
    """The tree's rows followed by ``gamma`` stream rows for each of them.

    Stream j of row i sits at i's position + j, and sees what i sees and i's lower streams
    (arXiv 2402.11131, eq. 2: prefix and lower streams). No row of the tree sees a stream.
    """
    count = len(layout)
    total = count * (1 + gamma)
    offsets = np.zeros(total, dtype=np.int32)
    visible = np.zeros((total, total), dtype=bool)
    offsets[:count] = layout.depth
    visible[:count, :count] = layout.rows.visible
    for row in range(count):
        first = count + row * gamma
        for j in range(gamma):
            offsets[first + j] = layout.depth[row] + j + 1
            visible[first + j, :count] = layout.rows.visible[row]
            visible[first + j, first : first + j + 1] = True
    return Rows(offsets, visible)
