"""What streams are worth: held-out quality, live decoding by fixed trees, speed-up, memory.

Every prompt is decoded plainly, by each fixed tree, and as the product does by default
(``"auto"``). Then plain and default decoding run once more, taking turns to be first, and only
these are timed: traces depend on a prompt's length, so the first run of a prompt pays for them.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..decode.loop import PassReport
from ..decode.plan import Branch, TreePlan
from ..decode.planner import Planner
from ..decode.processors import Sampling
from ..decode.proposers.streams import nodes_by_depth
from ..errors import SpecStreamError
from ..session import Session
from ..speculation import Speculation, auto_plans
from ..streams.folder import StreamSet
from ..streams.heads import StreamHeads
from .corpus import Corpus
from .evaluate import evaluate
from .trunk import TrunkCache

PLAIN, AUTO, NONE = "plain", "auto", "none"  # ways of decoding beside fixed trees; the empty tree
WIDTHS = (3, 2, 2)  # of the streams' own tree
LAST_TEXTS = 32  # of a corpus, where nothing says which were held out
MORE_RUNS = 4  # of each prompt beside the trees: plain and auto, untimed and timed


# Held-out text ----------------------------------------------------------------------------------


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
            return f"{self.texts} texts held out in training (if this is the corpus it had)"
        return f"the last {self.texts} texts of the corpus (training may have had them)"

    @property
    def accuracy(self) -> list[float]:
        """Share of positions where each stream's best candidate is right."""
        return [ranks[0] for ranks in self.hits]


def held_out_in_training(folder: Path | None, corpus: Corpus) -> list[int]:
    """The texts that ``Trainer`` held out, by number, if ``corpus`` is the one it trained on.

    Nothing where the folder's ``config.json`` records no training that fits the corpus.
    """
    try:
        assert folder is not None
        plan = json.loads((folder / "config.json").read_text())["training"]["plan"]
        seed, count = int(plan["seed"]), int(plan["held_out"])
    except (AssertionError, OSError, ValueError, KeyError, TypeError):
        return []
    order = np.random.default_rng(seed).permutation(len(corpus))
    usable = [int(n) for n in order if len(corpus.texts[n].anchors)]
    return usable[:count] if 0 < count < len(usable) else []


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
    layers = heads.config.layers if heads.config.method == "attention" else 0
    with tempfile.TemporaryDirectory(prefix="specstream-report-") as work:
        trunk = TrunkCache(work, heads.target, part, layers)
        trunk.build(progress)
        quality = evaluate(heads, trunk, range(len(part)))
    heads.prepare()  # lets go of what only this needed
    return HeldOut(len(few), bool(recorded), quality.hits.tolist(), quality.tokens_per_pass)


# Live decoding ----------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """A prompt to decode: its name, what kind it is, and its token ids."""

    name: str
    category: str
    tokens: list[int]


@dataclass(frozen=True)
class Run:
    """One prompt decoded one way.

    Args:
        prompt: Name of the prompt.
        category: Its category.
        temperature: 0 is greedy.
        way: ``"plain"``, ``"auto"`` or the tree of every pass.
        timed: Whether everything it needed had been traced.
        tokens: Tokens generated, with the end-of-text token.
        passes: Passes by tree.
        proposed: Proposals by proposer; ``accepted`` likewise.
        same: Whether the tokens are those of plain decoding.
        seconds: From the end of the prompt's computation to the last token.
        pass_seconds: Time between the reads of each pass but the first.
    """

    prompt: str
    category: str
    temperature: float
    way: str
    timed: bool
    tokens: int
    passes: dict[str, int]
    proposed: dict[str, int]
    accepted: dict[str, int]
    same: bool
    seconds: float
    pass_seconds: list[float]


class Watch:
    """A planner that notes the tree of each pass, and when it was read."""

    def __init__(self, planner: Planner):
        self._planner = planner
        self.trees: list[str] = []
        self.read: list[float] = []

    def plan(self) -> TreePlan:
        return self._planner.plan()

    def observe(self, plan: TreePlan, report: PassReport) -> None:
        self.read.append(time.perf_counter())
        self._planner.observe(plan, report)
        self.trees.append(tree_text(plan))


class WatchedSession(Session):
    """A session whose passes are noted."""

    watch: Watch

    def _planner(self, text: list[int]) -> Planner:
        self.watch = Watch(super()._planner(text))
        return self.watch


def tree_text(plan: TreePlan) -> str:
    """A tree as ``TreePlan.parse`` reads it."""

    def widths(branch: Branch) -> str:
        each = [1 + max(branch.ranks[n] for n in level) for level in nodes_by_depth(branch)]
        return str(len(each)) if set(each) == {1} else "x".join(map(str, each))

    return ",".join(f"{b.proposer}:{widths(b)}" for b in plan.branches) or NONE


def fixed_trees(streams: StreamSet) -> list[str]:
    """The trees to compare: those that ``"auto"`` chooses from, and the streams by themselves."""
    depths: dict[str, int | None] = {"ngram": None}
    if streams.table is not None:
        depths["table"] = None
    alone = []
    if streams.heads is not None:
        depths["streams"] = gamma = streams.heads.config.gamma
        alone = [f"streams:{gamma}"]
        if gamma > 1:  # a single width is read as a chain
            alone.append("streams:" + "x".join(map(str, WIDTHS[:gamma])))
    plans = auto_plans(depths, Speculation().num_draft_tokens)
    return list(dict.fromkeys([tree_text(plan) for plan in plans] + alone))


def measure_live(
    model: nn.Module,
    tokenizer: Any,
    streams: StreamSet,
    prompts: Sequence[Prompt],
    temperatures: Sequence[float],
    max_tokens: int = 128,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Run]:
    """Decode prompts in every way.

    Args:
        model: The target.
        tokenizer: Its tokenizer.
        streams: What is added to it.
        prompts: What to decode.
        temperatures: Each is measured by itself.
        max_tokens: Most tokens of an answer.
        seed: Of the sampled answers; prompt n has seed ``seed + n``.
        progress: Called with the runs done and in all.

    Raises:
        SpecStreamError: If there is nothing to decode, or a prompt is longer than the context.
    """
    if not prompts or not temperatures:
        raise SpecStreamError("live decoding needs at least one prompt and one temperature")
    trees = fixed_trees(streams)
    total = len(prompts) * len(temperatures) * (len(trees) + MORE_RUNS)
    runs: list[Run] = []
    done = 0
    for temperature in temperatures:
        for number, prompt in enumerate(prompts):
            sampling = Sampling(temp=temperature, seed=seed + number)
            turns = (PLAIN, AUTO) if number % 2 else (AUTO, PLAIN)
            ways = [PLAIN, *trees, AUTO, *turns]
            expected: list[int] = []
            for index, way in enumerate(ways):
                session = WatchedSession(model, tokenizer, streams, speculation_of(way))
                timed = index >= len(ways) - len(turns)
                said, run = decode(session, prompt, sampling, max_tokens, way, timed, expected)
                expected = expected or said
                runs.append(run)
                done += 1
                if progress:
                    progress(done, total)
    return runs


def speculation_of(way: str) -> Speculation:
    """What a way of decoding proposes."""
    return Speculation(enabled=False) if way == PLAIN else Speculation(tree=way)


def decode(
    session: WatchedSession,
    prompt: Prompt,
    sampling: Sampling,
    max_tokens: int,
    way: str,
    timed: bool,
    expected: list[int],
) -> tuple[list[int], Run]:
    """Decode one prompt; its tokens are compared with ``expected`` unless that is empty."""
    began = ended = 0.0

    def computed(done: int, total: int) -> None:
        nonlocal began
        began = time.perf_counter()

    said: list[int] = []
    for last in session.stream(
        prompt.tokens, max_tokens, sampling, prompt_progress_callback=computed
    ):
        said.append(last.token)
        ended = time.perf_counter()
    mx.synchronize()  # the pass that was in flight is not the next run's
    watch = session.watch
    return said, Run(
        prompt.name,
        prompt.category,
        sampling.temp,
        way,
        timed,
        len(said),
        dict(Counter(watch.trees)),
        last.proposed,
        last.accepted,
        said == (expected or said),
        ended - began,
        np.diff(watch.read).tolist(),
    )


# What the runs come to --------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """What one way of decoding did at one temperature, over all prompts.

    Args:
        temperature: 0 is greedy.
        way: ``"auto"`` or the tree of every pass.
        prompts: How many prompts.
        identical: How many of them gave the text of plain decoding in every run.
        tokens: Tokens generated.
        passes: Passes made.
        by_category: Tokens per pass of each category.
        acceptance: Share of each proposer's proposals that were accepted.
        pass_seconds: Median time of a pass; None if none was timed.
        cost: That relative to a plain pass.
        predicted: Speed-up by tokens per pass and the cost of its passes' trees.
        measured: Time of plain decoding relative to this way's; of ``"auto"`` only.
    """

    temperature: float
    way: str
    prompts: int
    identical: int
    tokens: int
    passes: int
    by_category: dict[str, float]
    acceptance: dict[str, float]
    pass_seconds: float | None
    cost: float | None
    predicted: float | None
    measured: float | None

    @property
    def tokens_per_pass(self) -> float:
        """Mean over all passes."""
        return self.tokens / self.passes


def summarise(runs: Sequence[Run]) -> list[Way]:
    """Each way but plain decoding, at each temperature, in the order of the runs."""
    ways = []
    for temperature in dict.fromkeys(run.temperature for run in runs):
        here = [run for run in runs if run.temperature == temperature]
        plain = [run for run in here if run.way == PLAIN]
        # Passes of trees inside "auto" cost what they cost where every pass has that tree.
        costs = {NONE: 1.0}
        names = [way for way in dict.fromkeys(run.way for run in here) if way != PLAIN]
        for name in names:  # "auto" comes last
            every = [run for run in here if run.way == name]
            counted = [run for run in every if run.timed] or every
            seconds, base = median_pass(counted), median_pass(plain)
            cost = seconds / base if seconds and base else None
            if name != AUTO and cost:
                costs[name] = cost
            measured = None
            if name == AUTO:
                ours = sum(run.seconds for run in counted)
                measured = sum(run.seconds for run in plain if run.timed) / ours
            proposed, accepted = (
                sum((Counter(getattr(run, what)) for run in counted), Counter())
                for what in ("proposed", "accepted")
            )
            categories = dict.fromkeys(run.category for run in counted)
            ways.append(
                Way(
                    temperature,
                    name,
                    len(counted),
                    len({r.prompt for r in every} - {r.prompt for r in every if not r.same}),
                    sum(run.tokens for run in counted),
                    sum(sum(run.passes.values()) for run in counted),
                    {
                        c: tokens_per_pass(run for run in counted if run.category == c)
                        for c in categories
                    },
                    {who: accepted[who] / count for who, count in proposed.items()},
                    seconds,
                    cost,
                    predicted(counted, costs),
                    measured,
                )
            )
    return ways


def tokens_per_pass(runs: Iterable[Run]) -> float:
    """Tokens of some runs by their passes."""
    runs = list(runs)
    return sum(run.tokens for run in runs) / sum(sum(run.passes.values()) for run in runs)


def median_pass(runs: Iterable[Run]) -> float | None:
    """Median time of a pass in seconds; None if no run had more than one."""
    every = [seconds for run in runs for seconds in run.pass_seconds]
    return median(every) if every else None


def predicted(runs: Sequence[Run], costs: dict[str, float]) -> float | None:
    """Speed-up to expect: tokens by what their passes cost, in plain passes.

    None if the cost of a tree is not known.
    """
    passes = sum((Counter(run.passes) for run in runs), Counter())
    if any(tree not in costs for tree in passes):
        return None
    paid = sum(count * costs[tree] for tree, count in passes.items())
    return sum(run.tokens for run in runs) / paid


# Memory -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of the target and of what is added to it.

    Args:
        form: In which form the target is held.
        target: Its weights.
        heads: The streams' parameters.
        draft_head: Made of the target's weights when the streams are loaded: the head's rows of
            the draft vocabulary, and the correction's keys.
        table: The n-gram table.
        peak: Most that MLX held at a time while measuring.
    """

    form: str
    target: int
    heads: int
    draft_head: int
    table: int
    peak: int

    @property
    def added(self) -> int:
        """All that is added to the target."""
        return self.heads + self.draft_head + self.table

    @property
    def share(self) -> float:
        """That relative to the target's weights."""
        return self.added / self.target


def measure_memory(model: nn.Module, form: str, streams: StreamSet) -> Memory:
    """What is held now, and the most that was held since MLX's peak was last reset."""
    heads = total = 0
    if streams.heads is not None:
        heads = sum(array.nbytes for _, array in tree_flatten(streams.heads.parameters()))
        total = streams.heads.memory_bytes()
    table = 0 if streams.table is None else streams.table.nbytes
    target = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return Memory(form, target, heads, total - heads, table, mx.get_peak_memory())
