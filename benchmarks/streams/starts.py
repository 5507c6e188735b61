"""How good streams are before training, by the number of top layers they pass.

    python benchmarks/streams/starts.py --data weights/smollm2-135m-instruct/corpus.npz

Fits the starts (``training/start.py``) at several depths of the target on some texts of a corpus
and measures them on others: accuracy of each stream, tokens per pass of a chain and of a top-4
tree, with the whole vocabulary, no adapters and no correction.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import mlx_specstream  # noqa: F401  (before mlx: it loads a fast BLAS)

import mlx.core as mx  # isort: skip
import numpy as np

from mlx_specstream import load
from mlx_specstream.target import Target
from mlx_specstream.training.corpus import Corpus, Text
from mlx_specstream.training.forward import PrefixView, visible
from mlx_specstream.training.start import low_rank
from mlx_specstream.training.trunk import TrunkCache

GAMMA, RANK = 3, 128


class Depths:
    """A text's hidden states entering the last layers, and what streams started there say.

    Args:
        target: The target.
        corpus: The texts.
        most: Top layers to look at, at most.
    """

    def __init__(self, target: Target, corpus: Corpus, most: int):
        self.target, self.most = target, most
        self.trunk = TrunkCache(None, target, corpus, most)
        embedded = np.array(target.family.embed(mx.arange(target.vocab_size))[0])
        self.embedded = embedded / np.sqrt(np.mean(embedded**2, axis=1, keepdims=True) + 1e-6)

    def entering(self, number: int) -> tuple[mx.array, dict[int, np.ndarray]]:
        """Keys and values of the top layers, and the states before each of them, by N_s."""
        text = self.trunk.corpus.texts[number]
        anchors = np.array(text.anchors)
        states = self.trunk.read(number)
        assert states.entering is not None
        assert states.kv is not None
        hidden, found = states.entering[None], {self.most: np.array(states.entering)}
        length = states.kv.shape[2]
        prefix = np.arange(length)[None] <= anchors[:, None]  # the rows' own keys are in it
        mask = mx.array(np.pad(prefix, ((0, 0), (0, len(anchors)))))
        for layer in range(self.most):
            view = self.view(states.kv, layer, anchors)
            hidden = self.target.blocks[len(self.target.blocks) - self.most + layer](
                hidden, mask, view
            )
            found[self.most - 1 - layer] = np.array(hidden[0])
        return states.kv, found

    def view(self, kv: mx.array, layer: int, positions: np.ndarray) -> PrefixView:
        """What a layer attends to."""
        offset = mx.array(positions.astype(np.int32))
        return PrefixView(kv[None, 2 * layer], kv[None, 2 * layer + 1], offset)

    def known(self, text: Text, anchors: np.ndarray, states: np.ndarray) -> np.ndarray:
        """What a start is made of, with a one for the constant."""
        newest = self.embedded[text.tokens[anchors + 1]]
        ones = np.ones((len(anchors), 1), dtype=np.float32)
        return np.concatenate([states, newest, ones], axis=1).astype(np.float32)

    def fit(self, numbers: range, layers: list[int]) -> dict[tuple[int, int], np.ndarray]:
        """The maps to the starts, by N_s and stream."""
        sums: dict[tuple[int, int], list[np.ndarray]] = {}
        for number in numbers:
            text = self.trunk.corpus.texts[number]
            anchors = np.array(text.anchors)
            _, found = self.entering(number)
            for top in layers:
                known = self.known(text, anchors, found[top])
                for ahead in range(1, GAMMA + 1):
                    target = found[top][ahead:]
                    weight = 1 / np.sqrt(np.mean(target**2, axis=1, keepdims=True))
                    here = known[:-ahead] * weight
                    change = (target - found[top][:-ahead]) * weight
                    more = [(here.T @ m).astype(np.float64) for m in (here, change)]
                    old = sums.get((top, ahead))
                    sums[top, ahead] = (
                        more if old is None else [a + b for a, b in zip(old, more, strict=True)]
                    )
        return {key: np.matmul(*low_rank(both[0], both[1], RANK)) for key, both in sums.items()}

    def right(
        self, number: int, top: int, maps: dict[tuple[int, int], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Whether each stream's best, and its best four, hold the token, at every third anchor."""
        text, target = self.trunk.corpus.texts[number], self.target
        every = np.array(text.anchors)[: -GAMMA - 1]
        kv, found = self.entering(number)
        anchors, states = every[::3], found[top][: len(every) : 3]
        known = self.known(text, anchors, states)
        starts = np.stack([states + known @ maps[top, j + 1] for j in range(GAMMA)], axis=1)
        hidden = mx.array(starts.reshape(1, len(anchors) * GAMMA, -1))
        positions = anchors.repeat(GAMMA) + np.tile(np.arange(1, GAMMA + 1), len(anchors))
        mask = mx.array(visible(anchors, GAMMA, kv.shape[2], positions, None))
        for layer in range(self.most - top, self.most):
            block = target.blocks[len(target.blocks) - self.most + layer]
            hidden = block(hidden, mask, self.view(kv, layer, positions))
        best = np.array(mx.argsort(-target.logits(target.family.norm(hidden)[0]), axis=-1)[:, :4])
        best = best.reshape(len(anchors), GAMMA, 4)
        ahead = text.tokens[anchors[:, None] + 2 + np.arange(GAMMA)][..., None]
        return (best[..., :1] == ahead)[..., 0], (best == ahead).any(-1)


def main() -> None:
    """Fit, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, type=Path, help="corpus (.npz)")
    parser.add_argument("--fit", type=int, default=200, help="texts to fit with (200)")
    parser.add_argument("--held-out", type=int, default=30, help="texts to measure with (30)")
    parser.add_argument("--layers", default="6,4,3,2,1,0", help="numbers of top layers")
    parser.add_argument("--csv", type=Path, help="also write the figures here")
    args = parser.parse_args()
    layers = [int(n) for n in args.layers.split(",")]
    model, _ = load()
    whole = Corpus.load(args.data)
    usable = [text for text in whole if len(text.anchors) > 2 * GAMMA + 2]
    order = np.random.default_rng(0).permutation(len(usable))[: args.fit + args.held_out]
    corpus = Corpus(tuple(usable[n] for n in order), whole.tokenizer)
    depths = Depths(Target.of(model), corpus, max(layers))
    maps = depths.fit(range(args.held_out, len(corpus)), layers)
    rows = []
    for top in layers:
        pairs = [depths.right(n, top, maps) for n in range(args.held_out)]
        first, any4 = (np.concatenate(part) for part in zip(*pairs, strict=True))
        chain, tree = (1 + np.cumprod(r, axis=1).sum() / len(r) for r in (first, any4))
        accuracy = " / ".join(f"{a:.3f}" for a in first.mean(0))
        print(f"N_s {top}: accuracy {accuracy}; chain {chain:.2f}, top-4 tree {tree:.2f}")
        rows.append([top, len(first), *first.mean(0).round(4), round(chain, 4), round(tree, 4)])
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["layers", "anchors", "acc1", "acc2", "acc3", "chain", "top4"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
