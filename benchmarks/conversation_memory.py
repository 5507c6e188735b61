"""What a conversation holds: memory in use turn by turn, beside what its KV cache takes.

    python benchmarks/conversation_memory.py --tokens 2000

The embedded model as the chat runs it. *Beyond the cache* is MLX's active memory less the cache's
bytes, relative to the first turn: growth there would be a leak. *peak* is the highest of each turn.
"""

from __future__ import annotations

import argparse

import mlx_specstream  # noqa: F401  # isort: skip  (before mlx: it loads OpenBLAS)
import mlx.core as mx

from mlx_specstream import load
from mlx_specstream.conversation import Conversation

QUESTIONS = [
    "Tell me about the sea.",
    "And about the animals in it?",
    "Which of them is the largest?",
    "How do whales sleep?",
    "Write a short poem about that.",
    "Explain the tides to a child.",
    "What do sailors fear most?",
    "List ten fish.",
]


def main() -> None:
    """Hold the conversation and print a line for each turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2000, help="of the conversation, at least")
    parser.add_argument("--answer", type=int, default=160, help="most tokens of an answer")
    args = parser.parse_args()
    model, tokenizer = load()
    conversation = Conversation(model, tokenizer, max_tokens=args.answer)
    cache = conversation.session.cache
    first, turn = None, 0
    print("turn  tokens  KV cache  in use  beyond the cache  peak  (MB)")
    while cache.length < args.tokens:
        mx.reset_peak_memory()
        for _ in conversation.ask(QUESTIONS[turn % len(QUESTIONS)]):
            pass
        mx.synchronize()
        beyond = mx.get_active_memory() - cache.nbytes
        first = beyond if first is None else first
        turn += 1
        print(
            f"{turn:4}  {cache.length:6}  {cache.nbytes / 1e6:8.1f}  "
            f"{mx.get_active_memory() / 1e6:6.1f}  {(beyond - first) / 1e6:+16.1f}  "
            f"{mx.get_peak_memory() / 1e6:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
