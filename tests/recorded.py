"""Recordings for tests: a tiny model's, and made-up ones."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from tiny import decoded, streams_of, target_of, text_of

from mlx_specstream import Sampling
from mlx_specstream.benchmarking.record import lookups_right, stream_ranks
from mlx_specstream.benchmarking.recording import RecordedPrompt, Recording
from mlx_specstream.benchmarking.replay import Clock, passes
from mlx_specstream.decode.plan import TreePlan
from mlx_specstream.decode.planner import FixedPlanner
from mlx_specstream.decode.proposers import NgramLookup, TableProposer
from mlx_specstream.streams.ngram_table import NgramTable

PROMPT = text_of(30, seed=3)
COUNT = 70  # tokens of an answer
COMPARED = 50  # passes beyond this position could have run past the recorded end


@cache
def table() -> NgramTable:
    """Of other texts of the model, and of pieces of the recorded ones: it is right now and then."""
    target = target_of("grouped")
    texts = [decoded(target, text_of(9, seed), 40) for seed in range(4)]
    for temp in (0.0, 0.8):
        answer = decoded(target, PROMPT, COUNT, "none", Sampling(temp=temp))
        texts += [answer[12:24], answer[38:52]]
    return NgramTable.build([*texts, PROMPT[10:]], 101)


@cache
def tiny_recording(kind: str, temp: float = 0.0) -> Recording:
    """A recorded answer of a tiny model; ``kind`` as in ``streams_of``."""
    target, heads = target_of("grouped"), streams_of("grouped", kind)
    sampling = Sampling(temp=temp, seed=5)
    answer = decoded(target, PROMPT, COUNT, "none", sampling)
    right, filled = lookups_right([NgramLookup(), TableProposer(table())], target, PROMPT, answer)
    ranks = stream_ranks(heads, PROMPT, answer, sampling)
    prompt = RecordedPrompt("one", "k", len(PROMPT), answer, right, filled, ranks)
    return Recording(
        "tiny", temp, 5, "ngram|table", 3, None, heads.rides_along, 0.2, 0.05, [prompt]
    )


def made_up(**changes) -> Recording:
    """An answer of six tokens; streams are right at its fourth."""
    prompt = RecordedPrompt(
        id="a",
        category="k",
        prompt_tokens=10,
        tokens=[1, 2, 3, 4, 5, 6],
        lookup=[2, 1, 0, 0, 2, 1],
        filled=[0, 0, -1, 1, 0, 0],
        streams=[[-1, -1], [0, 0], [2, 0], [1, 0], [-1, 0], [0, -1]],
    )
    return replace(
        Recording("m", 0.0, 0, "ngram|table", 2, [[0.5, 0.2], [0.4]], True, 0.2, 0.05, [prompt]),
        **changes,
    )


def replayed(recording: Recording, tree: str) -> list[tuple[int, int]]:
    """Context and committed tokens of every pass with one tree."""
    planner = FixedPlanner(TreePlan.parse(tree))
    made = passes(recording, recording.prompts[0], planner, lambda plan, context: 1.0, Clock())
    return [(one.context, one.committed) for one in made]


def repetitive() -> Recording:
    """Three answers in which lookups and streams are right nearly everywhere."""
    count = 60
    lookup = [min(15, count - n) if n % 10 else 0 for n in range(count)]
    prompts = [
        RecordedPrompt(
            *(str(number), "k", 20, list(range(count)), lookup, [0] * count),
            streams=[[-1, -1, -1], *([[0, 0, 0]] * (count - 1))],
        )
        for number in range(3)
    ]
    return Recording("m", 0.0, 0, "ngram|table", 3, None, True, 0.2, 0.05, prompts)
