"""The loop: one host read a pass, a pass behind; the cache's invariant; memory; counters."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from tiny import Oracle, decoded, filled, reports, streams_of, target_of, text_of

from mlx_specstream.decode import loop
from mlx_specstream.decode.loop import Decoder
from mlx_specstream.decode.plan import TreePlan
from mlx_specstream.decode.planner import FixedPlanner
from mlx_specstream.decode.processors import Sampling
from mlx_specstream.decode.proposers import NgramLookup, StreamProposer
from mlx_specstream.errors import UsageError

PLANS = ["none", "oracle:3", "ngram:2,oracle:3x2x1", "oracle:2,streams:2x2x1"]
PROMPT = text_of(19)
RICH = Sampling(temp=0.8, top_p=0.9, repetition_penalty=1.2, logit_bias={4: 1.0})
# Every door through which an array's values can reach the host.
DOORS = ["item", "tolist", "__array__", "__bool__", "__int__", "__float__", "__index__"]
DOORS += ["__iter__", "__contains__", "__repr__", "__dlpack__"]


@pytest.fixture
def events(monkeypatch):
    """A log of what crosses between device and host: ``dispatch``, ``read`` and ``wait``."""
    log: list[str] = []

    def logged(owner, name, event):
        original = getattr(owner, name)

        def spy(*args, **options):
            log.append(event)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, spy)

    for name in DOORS:
        if hasattr(mx.array, name):
            logged(mx.array, name, "read")
    logged(mx, "async_eval", "dispatch")
    logged(mx, "eval", "wait")
    logged(mx, "synchronize", "wait")
    for name in ("array", "asarray", "frombuffer"):
        original = getattr(np, name)

        def spy(value, *args, _original=original, **options):
            if isinstance(value, mx.array):
                log.append("read")
            return _original(value, *args, **options)

        monkeypatch.setattr(np, name, spy)
    return log


def decoding(plan: str, sampling=None, kind="fused", compile=False, step=256, name="grouped"):
    """A running decode of a tiny model, its cache, and the text it will say."""
    target, sampling, prompt = target_of(name), sampling or Sampling(), PROMPT
    expected = decoded(target, prompt, 60, "none", sampling)
    proposers = (
        NgramLookup(1),
        Oracle(prompt + expected),
        StreamProposer(streams_of(name, kind)),
    )
    cache = filled(target, prompt[:-1], step)
    decoder = Decoder(target, proposers, compile)
    planner = FixedPlanner(TreePlan.parse(plan))
    return decoder.decode(prompt, cache, planner, sampling, 5), cache, expected


def test_the_spy_sees_every_door(events):
    one = mx.array([1])
    for door in (
        one.item, one.tolist, lambda: bool(one), lambda: int(one), lambda: float(one[0]),
        lambda: list(one), lambda: [0, 1][one[0]], lambda: np.array(one), lambda: repr(one),
    ):  # fmt: skip
        events.clear()
        door()
        assert "read" in events
    events.clear()
    mx.eval(one)
    mx.synchronize()
    assert events == ["wait", "wait"]


@pytest.mark.parametrize(
    ("plan", "sampling", "compile"),
    [
        *((plan, Sampling(), compile) for plan in PLANS for compile in (False, True)),
        *((plan, RICH, False) for plan in PLANS),
        (PLANS[1], RICH, True),
    ],
)
def test_one_read_a_pass_and_the_next_pass_is_under_way_before_it(events, plan, sampling, compile):
    run, _, _ = decoding(plan, sampling, compile=compile)
    events.clear()
    for passes in range(1, 13):
        next(run)
        assert events == ["dispatch", *["dispatch", "read"] * passes]


@pytest.mark.parametrize("kind", ["linear", "fused", "deferred"])
@pytest.mark.parametrize("plan", PLANS)
def test_after_every_report_the_cache_holds_all_committed_tokens_but_the_newest(plan, kind):
    run, cache, _ = decoding(plan, kind=kind, step=32)
    text = list(PROMPT)
    for _ in range(12):
        text += next(run).tokens
        assert_holds(cache, text[:-1])
    run.close()
    assert_holds(cache, text[:-1])


def assert_holds(cache, tokens: list[int]) -> None:
    assert cache.length == len(tokens)
    fresh = filled(target_of("grouped"), tokens)
    for mine, theirs in zip(cache.kv, fresh.kv, strict=True):
        assert mx.allclose(mine[:, :, : len(tokens)], theirs[:, :, : len(tokens)], atol=1e-4)


@pytest.mark.parametrize("plan", PLANS)
def test_a_closed_iterators_cache_can_be_decoded_on(plan):
    run, cache, expected = decoding(plan, RICH)
    text = list(PROMPT)
    while len(text) < len(PROMPT) + 20:
        text += next(run).tokens
    run.close()
    target = target_of("grouped")
    again = Decoder(target).decode(text, cache, FixedPlanner(TreePlan()), RICH, 5)
    while len(text) < len(PROMPT) + 40:
        text += next(again).tokens
    assert text == PROMPT + expected[:40]


class Failing(Oracle):
    """Raises at one of its calls."""

    calls = 0

    def propose(self, branch, memory, context):
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("in the middle of a pass")
        return super().propose(branch, memory, context)


def test_a_proposer_that_raises_leaves_a_usable_cache():
    target = target_of("grouped")
    expected = decoded(target, PROMPT, 40)
    cache, text = filled(target, PROMPT[:-1]), list(PROMPT)
    oracle, plan = Failing(PROMPT + expected), FixedPlanner(TreePlan.parse("oracle:3x2x1"))
    with pytest.raises(RuntimeError, match="in the middle"):
        for report in Decoder(target, [oracle]).decode(text, cache, plan, Sampling(), 5):
            text += report.tokens
    assert len(text) > len(PROMPT) + 3
    assert_holds(cache, text[:-1])
    for report in Decoder(target, [oracle]).decode(text, cache, plan, Sampling(), 5):
        text += report.tokens
        if len(text) >= len(PROMPT) + 40:
            break
    assert text[: len(PROMPT) + 40] == PROMPT + expected


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_passes_do_not_copy_the_cache(plan, compile):
    """As deep as real models are: MLX writes in place once earlier readers of a buffer are done.

    On a busy machine a few are not, in a model as quick as this one; so the leanest of five
    stretches counts, and an eighth of the cache is allowed. A pass that has to copy, copies all.
    """
    run, cache, _ = decoding(plan, name="deep", compile=compile, step=8192)
    for _ in range(3):
        next(run)
    assert cache.kv[0].nbytes == 1 << 20
    extra = []
    for _ in range(5):
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for _ in range(6):
            next(run)
        extra.append(mx.get_peak_memory() - before)
        assert abs(mx.get_active_memory() - before) < 3 << 19
    assert min(extra) < cache.nbytes / 8


@pytest.mark.parametrize("plan", PLANS[1:])
def test_counters_of_each_proposer_add_up(plan):
    run, _, expected = decoding(plan)
    nodes = {b.proposer: len(b) for b in TreePlan.parse(plan).branches}
    position, rows = len(PROMPT), 0
    for turn in range(15):
        report = next(run)
        *accepted, own = report.owners
        assert own is None and len(report.owners) == len(report.tokens) == len(report.rows)
        assert set(accepted) <= set(nodes)
        assert report.logits.shape[0] == sum(nodes.values()) + 1
        assert report.rows[0] == 0 and report.rows == sorted(set(report.rows))
        chosen = report.logits[mx.array(report.rows)]
        assert mx.argmax(chosen, axis=-1).tolist() == report.tokens
        for name, count in report.proposed.items():
            most = nodes.get(name, 0)
            if name == "ngram" or (name == "streams" and turn == 0):
                assert count in (0, most)  # nothing found, nothing observed yet
            else:
                assert count == most
        first = position - len(PROMPT)
        assert report.tokens == expected[first : first + len(report.tokens)]
        position, rows = position + len(report.tokens), rows + len(accepted)
        if position - len(PROMPT) > 50:
            break
    assert rows > 3


def test_streams_propose_nothing_before_they_have_observed_a_pass():
    run, _, _ = decoding("streams:2x2x1")
    counts = [next(run).proposed["streams"] for _ in range(4)]
    assert counts == [0, 10, 10, 10]


# n-gram lookup ----------------------------------------------------------------------------------


def slow_lookup(text: list[int], count: int, least: int, most: int) -> list[int] | None:
    """Longest match of the text's ending, then the most recent; what followed it, going round."""
    best = (0, -1)
    for place in range(len(text) - 1):
        length = 0
        while length < min(most, place + 1) and text[place - length] == text[-1 - length]:
            length += 1
        best = max(best, (length, place))
    if best[0] < least:
        return None
    followed = text[best[1] + 1 :]
    return [followed[i % len(followed)] for i in range(count)]


@pytest.mark.parametrize(("least", "most"), [(1, 1), (1, 4), (2, 4), (3, 3), (2, 7)])
def test_lookup_finds_the_longest_then_most_recent_match(least, most):
    rng, lookup, found = np.random.default_rng(0), NgramLookup(least, most), 0
    for _ in range(120):
        text = rng.integers(0, rng.integers(1, 6), rng.integers(1, 30)).tolist()
        # The buffer goes on past the text with what an earlier pass left there.
        rubbish = text[-3:] * 3 + text[:5]
        history = mx.array(text + rubbish, dtype=mx.int32)
        tokens, valid = lookup.lookup(history, mx.array(len(text) - 1), 6)
        expected = slow_lookup(text, 6, least, most)
        assert valid.item() == (expected is not None)
        if expected is not None:
            assert tokens.tolist() == expected
            found += 1
    assert 20 < found < 120


def test_lookup_in_a_full_buffer_and_in_a_text_of_one_token():
    for text, expected in (([4, 5, 6, 4, 5], [6, 4, 5, 6]), ([3, 3], [3, 3, 3, 3])):
        tokens, valid = NgramLookup(1).lookup(mx.array(text), mx.array(len(text) - 1), 4)
        assert valid.item() and tokens.tolist() == expected
    assert not NgramLookup(1).lookup(mx.array([3]), mx.array(0), 4)[1].item()


@pytest.mark.parametrize(("least", "most"), [(0, 4), (5, 4), (-1, -1)])
def test_lengths_that_are_no_range_are_refused(least, most):
    with pytest.raises(UsageError, match="not a range"):
        NgramLookup(least, most)


# Plans --------------------------------------------------------------------------------------------


def test_plans_are_read_as_written():
    assert TreePlan.parse("none") == TreePlan() and len(TreePlan().layout) == 1
    chain = TreePlan.parse("ngram:4")
    assert chain.layout.is_chain and chain.owners == (None, *["ngram"] * 4)
    mixed = TreePlan.parse("ngram:2, streams:2x1")
    assert mixed.layout.parents == (-1, 0, 1, 0, 3, 0, 5)
    assert mixed.owners == (None, *["ngram"] * 2, *["streams"] * 4)
    assert mixed.branches[1].ranks == (0, 0, 1, 0)
    assert TreePlan.parse("a:2x3").layout.depth.tolist() == [0, 1, 2, 2, 2, 1, 2, 2, 2]
    assert len(TreePlan.parse("a:63").layout) == 64


@pytest.mark.parametrize(
    "text", ["", "ngram", "ngram:", "ngram:0", "a:2x0", "a:x2", "a:2,", "a:-1", "a:1.5.", "a:64",
             "a:4x4x4", "none,a:2"]
)  # fmt: skip
def test_a_plan_that_cannot_be_read_or_run_is_refused(text):
    with pytest.raises(UsageError, match="the tree"):
        TreePlan.parse(text)


@pytest.mark.parametrize(
    ("plan", "message"),
    [("magic:2", "'magic', which nobody here proposes"), ("streams:4", "reach 3 tokens ahead.*4")],
)
def test_a_plan_that_the_proposers_cannot_fill_is_refused(plan, message):
    streams = StreamProposer(streams_of("grouped", "linear"))
    with pytest.raises(UsageError, match=message):
        reports(target_of("grouped"), PROMPT, 5, plan, None, (streams,))


class Alternating:
    """A plan after the other, over and over."""

    def __init__(self, *plans: str):
        self.plans = itertools.cycle([TreePlan.parse(plan) for plan in plans])

    def plan(self) -> TreePlan:
        return next(self.plans)

    def observe(self, plan, report) -> None:
        pass


@pytest.mark.parametrize("kind", ["linear", "deferred"])
def test_streams_that_ride_along_propose_in_whatever_pass_they_join(kind):
    target, prompt = target_of("grouped"), text_of(12)
    decoder = Decoder(target, [StreamProposer(streams_of("grouped", kind))])
    planner = Alternating("none", "none", "streams:2")
    passes = decoder.decode(prompt, filled(target, prompt[:-1]), planner, Sampling(), 1)
    proposed = [next(passes).proposed["streams"] for _ in range(9)]
    assert proposed == [0, 0, 2] * 3


def test_prompts_of_many_lengths_share_their_traces(monkeypatch):
    """Tracing costs more than several passes: a prompt's length must not ask for it."""
    traced = []
    real = loop.one_pass
    monkeypatch.setattr(loop, "one_pass", lambda *args: traced.append(args[2]) or real(*args))
    target = target_of("grouped")
    decoder = Decoder(target, [NgramLookup()], compile=True)
    for length in (3, 7, 12, 29):
        text = text_of(length)
        cache = filled(target, text[:-1])
        run = decoder.decode(text, cache, FixedPlanner(TreePlan.parse("ngram:3")), Sampling(), 0)
        for _ in range(3):
            next(run)
    assert len(traced) == 1
