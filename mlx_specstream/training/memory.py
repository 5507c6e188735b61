"""How much memory training takes, by arithmetic: known before it starts.

The target stays as it is (gradients pass through it, never into it); what comes on top grows with
the streams, with the rows of a step and with the draft vocabulary. ``docs/training.md`` works an
example of a 3B target; the tests hold the bound against measured peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx.utils import tree_flatten

from ..streams.heads import StreamHeads
from .plan import Plan

# Arrays alive at the peak, measured on small targets (tests/test_training_memory.py), in units of a
# row's hidden state and MLP width in every layer, of its keys for every head, and of its scores.
HIDDEN_ARRAYS, MLP_ARRAYS = 8, 3
LINEAR_ARRAYS = 8  # of hidden states before and after the layers
SCORE_ARRAYS = 22  # of scores: head, correction, labels, and the gradients of all these
ATTENTION_ARRAYS = 2  # of attention over a row's keys


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes that training takes at its peak, at most.

    Args:
        target: The target's weights, as they are in memory.
        streams: Parameters, gradients, AdamW's two moments and the step's update.
        draft: The draft vocabulary's embeddings and its rows of the head.
        rows: What the rows of a step keep for the backward pass.
        scores: Scores over the draft vocabulary.
        states: The trunk's states of the step's texts.
    """

    target: int
    streams: int
    draft: int
    rows: int
    scores: int
    states: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


def training_memory(heads: StreamHeads, plan: Plan, longest: int) -> TrainingMemory:
    """The bound for a step of a plan.

    Args:
        heads: The streams.
        plan: How to train.
        longest: Tokens of the longest text.
    """
    target, config = heads.target, heads.config
    size = target.dtype.size
    hidden = target.hidden_size
    layers = config.trunk_layers
    family = target.family
    mlp, kv_heads, key = family.mlp_width, family.kv_heads, family.head_dim
    heads_of_block = family.args.num_attention_heads
    vocabulary = target.vocab_size if config.draft_vocab is None else len(config.draft_vocab)

    anchors = plan.texts * plan.anchors
    rows, of_text = anchors * config.gamma, plan.anchors * config.gamma
    kept = HIDDEN_ARRAYS * hidden + MLP_ARRAYS * mlp
    keys = (longest + of_text) * (ATTENTION_ARRAYS * heads_of_block * of_text + 4 * key * kv_heads)
    parameters = sum(value.size for _, value in tree_flatten(heads.parameters()))
    states = anchors * 2 * hidden + longest * plan.texts * 2 * layers * kv_heads * key
    return TrainingMemory(
        target=sum(value.nbytes for _, value in tree_flatten(target.model.parameters())),
        streams=5 * 4 * parameters,
        draft=vocabulary * hidden * 2 * 4,
        rows=(layers * (rows * kept + plan.texts * keys) + rows * LINEAR_ARRAYS * hidden) * 4,
        scores=SCORE_ARRAYS * rows * vocabulary * 4,
        states=3 * states * max(size, 4),
    )
