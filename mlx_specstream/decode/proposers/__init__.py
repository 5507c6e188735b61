"""Proposers: what fills a tree. Whatever they propose, the text stays the target's own."""

from .base import Context, Proposals, Proposer
from .ngram import NgramLookup
from .streams import StreamProposer
from .table import TableProposer

__all__ = ["Context", "NgramLookup", "Proposals", "Proposer", "StreamProposer", "TableProposer"]
