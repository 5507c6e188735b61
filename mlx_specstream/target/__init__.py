"""The target: the model whose output must be preserved, run over the rows of a proposal tree."""

from .cache import TreeCache
from .rows import Rows, TreeLayout
from .target import PassOutput, Target

__all__ = ["PassOutput", "Rows", "Target", "TreeCache", "TreeLayout"]
