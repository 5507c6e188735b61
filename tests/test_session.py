"""Sessions: stopping exactly, reusing a prefix, cancelling, figures."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from tiny import TINY

from mlx_specstream import (
    Sampling,
    Session,
    SpecStreamError,
    Speculation,
    UsageError,
    generate,
    stream_generate,
)

LOOKUP = Speculation(tree="ngram:4", ngram_min=1)


class Letters:
    """A tokenizer whose token n is one character; the end-of-text token is chosen."""

    bos_token = None

    def __init__(self, eos: int = -1):
        self.eos_token_ids = {eos}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - 0x4E00 for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(0x4E00 + t) for t in tokens)


@pytest.fixture(scope="module")
def model():
    return TINY["grouped"]()


PROMPT = [5, 9, 2, 7] * 5


def tokens_of(session: Session, prompt=PROMPT, **options) -> list[int]:
    return [r.token for r in session.stream(prompt, **options)]


def repeating(model) -> list[int]:
    """A prompt of the model's own continuation, so that lookup accepts several tokens a pass."""
    text = tokens_of(Session(model, Letters(), speculation=LOOKUP), max_tokens=60)
    return PROMPT + text


@pytest.mark.parametrize("limit", range(1, 12))
def test_max_tokens_is_exact_inside_an_accepted_path(model, limit):
    plain = tokens_of(Session(model, Letters(), speculation=Speculation(enabled=False)),
                      max_tokens=12)  # fmt: skip
    session = Session(model, Letters(), speculation=LOOKUP)
    responses = list(session.stream(PROMPT, max_tokens=limit))
    assert [r.token for r in responses] == plain[:limit]
    assert [r.finish_reason for r in responses] == [None] * (limit - 1) + ["length"]
    assert session.tokens == PROMPT + plain[:limit]
    assert session.cache.length == len(session.tokens) - 1


@pytest.mark.parametrize("place", range(1, 14, 2))
def test_end_of_text_stops_exactly_inside_an_accepted_path(model, place):
    prompt = repeating(model)
    free = tokens_of(Session(model, Letters(), speculation=LOOKUP), prompt, max_tokens=20)
    eos = free[place]
    first = free.index(eos)
    session = Session(model, Letters(eos), speculation=LOOKUP)
    responses = list(session.stream(prompt, max_tokens=20))
    assert [r.token for r in responses] == free[: first + 1]
    assert responses[-1].finish_reason == "stop"
    assert "".join(r.text for r in responses) == Letters().decode(free[:first])


def test_a_stop_string_ends_the_text_before_it(model):
    free = tokens_of(Session(model, Letters()), max_tokens=20)
    stop = Letters().decode(free[6:8])
    responses = list(Session(model, Letters(), speculation=LOOKUP).stream(
        PROMPT, max_tokens=20, stop=[stop]))  # fmt: skip
    text = Letters().decode(free)
    assert "".join(r.text for r in responses) == text[: text.find(stop)]
    assert responses[-1].finish_reason == "stop"


@pytest.mark.parametrize("speculation", [LOOKUP, Speculation(), Speculation(enabled=False)])
def test_the_next_turn_computes_only_what_is_new(model, speculation):
    session = Session(model, Letters(), speculation=speculation)
    list(session.stream(PROMPT, max_tokens=17))
    second = [*session.tokens, 3, 1, 4]
    responses = list(session.stream(second, max_tokens=10))
    assert responses[0].cached_tokens == len(PROMPT) + 17 - 1
    fresh = tokens_of(Session(model, Letters(), speculation=speculation), second, max_tokens=10)
    assert [r.token for r in responses] == fresh


def test_a_changed_turn_is_computed_from_where_it_differs(model):
    session = Session(model, Letters(), speculation=LOOKUP)
    list(session.stream(PROMPT, max_tokens=9))
    changed = [*PROMPT[:11], 1, *PROMPT[12:]]
    responses = list(session.stream(changed, max_tokens=10))
    assert responses[0].cached_tokens == 11
    assert [r.token for r in responses] == tokens_of(
        Session(model, Letters()), changed, max_tokens=10
    )


def test_cancelling_ends_within_a_pass_and_the_session_goes_on(model):
    session = Session(model, Letters(), speculation=LOOKUP)
    whole = tokens_of(session, max_tokens=40)
    session.reset()
    seen = []
    for response in session.stream(PROMPT, max_tokens=40):
        seen.append(response)
        if len(seen) == 5:
            session.cancel()
    assert seen[-1].finish_reason == "cancelled"
    assert len(seen) <= 5 + 1
    assert session.tokens == PROMPT + whole[: len(seen)]
    rest = tokens_of(session, session.tokens, max_tokens=10)
    assert rest == whole[len(seen) : len(seen) + 10]


def test_a_reader_that_leaves_early_leaves_a_usable_session(model):
    session = Session(model, Letters(), speculation=LOOKUP)
    whole = tokens_of(session, max_tokens=30)
    session.reset()
    for count, _ in enumerate(session.stream(PROMPT, max_tokens=30), start=1):
        if count == 7:
            break
    assert session.tokens[: len(PROMPT) + 7] == PROMPT + whole[:7]
    assert tokens_of(session, session.tokens, max_tokens=5) == whole[7:12]


def test_a_generation_ends_where_another_begins_on_its_session(model):
    session, other = Session(model, Letters(), speculation=LOOKUP), PROMPT[:7]
    whole = tokens_of(Session(model, Letters()), other, max_tokens=10)
    first = session.stream(PROMPT, max_tokens=30)
    next(first)
    second = session.stream(other, max_tokens=10)
    tokens = [next(second).token]
    with pytest.raises(SpecStreamError, match="was reset or given another text"):
        next(first)
    assert tokens + [r.token for r in second] == whole


@pytest.mark.parametrize("when", range(1, 12))
def test_closing_an_abandoned_generation_leaves_the_new_one_alone(model, when):
    session = Session(model, Letters(), speculation=LOOKUP)
    prompt = repeating(model)
    whole = tokens_of(Session(model, Letters()), prompt, max_tokens=40)
    abandoned, tokens = session.stream(PROMPT, max_tokens=30), []
    next(abandoned)
    for response in session.stream(prompt, max_tokens=40):
        tokens.append(response.token)
        if len(tokens) == when:
            abandoned.close()
    assert tokens == whole
    assert session.cache.length == len(session.tokens) - 1


def test_a_reset_ends_what_is_running(model):
    session = Session(model, Letters(), speculation=LOOKUP)
    run = session.stream(PROMPT, max_tokens=30)
    next(run)
    session.reset()
    with pytest.raises(SpecStreamError, match="was reset"):
        next(run)
    assert (session.cache.length, session.tokens) == (0, [])


def test_one_stop_string_need_not_be_a_list(model):
    text = "".join(r.text for r in Session(model, Letters()).stream(PROMPT, max_tokens=20))
    short = stream_generate(model, Letters(), PROMPT, 20, stop=text[4:6])
    assert "".join(r.text for r in short) == text[:4] != text[: text.find(text[4])]


def test_figures_are_current_at_every_response(model):
    passes = 0
    for n, r in enumerate(Session(model, Letters(), speculation=LOOKUP).stream(
        repeating(model), max_tokens=40), start=1):  # fmt: skip
        assert r.generation_tokens == n
        assert r.passes >= passes
        assert r.tokens_per_pass == n / r.passes
        assert r.accepted["ngram"] <= r.proposed["ngram"]
        assert r.from_draft == (r.proposer == "ngram")
        passes = r.passes
    assert passes < 40
    assert r.peak_memory > 0
    assert r.generation_tps > 0


def test_plain_decoding_commits_one_token_a_pass(model):
    last = list(stream_generate(model, Letters(), PROMPT, 10, speculation=False))[-1]
    assert (last.passes, last.tokens_per_pass, last.proposed) == (10, 1.0, {})


def test_logprobs_are_those_the_token_was_chosen_from(model):
    for r in stream_generate(model, Letters(), PROMPT, 12, tree="ngram:4", ngram_min=1):
        assert int(mx.argmax(r.logprobs)) == r.token
        assert float(mx.logsumexp(r.logprobs)) == pytest.approx(0, abs=1e-5)


def test_a_fresh_seed_is_drawn_where_none_is_given(model):
    texts = {tuple(tokens_of(Session(model, Letters()), max_tokens=12,
                             sampling=Sampling(temp=1.5))) for _ in range(4)}  # fmt: skip
    assert len(texts) > 1
    seeded = {tuple(tokens_of(Session(model, Letters()), max_tokens=12,
                              sampling=Sampling(temp=1.5, seed=4))) for _ in range(2)}  # fmt: skip
    assert len(seeded) == 1


def test_generate_returns_the_text(model):
    text = generate(model, Letters(), PROMPT, max_tokens=9)
    assert text == Letters().decode(tokens_of(Session(model, Letters()), max_tokens=9))


def test_a_prefill_that_is_cancelled_does_not_report_that_it_is_done(model):
    session, seen = Session(model, Letters()), []

    def progress(done, total):
        seen.append(done)
        if done == 16:
            session.cancel()

    run = session.stream(PROMPT * 3, 5, prefill_step_size=16, prompt_progress_callback=progress)
    assert list(run) == [] and seen == [0, 16]
    assert session.cache.length == 16


def test_prefill_reports_progress_in_steps(model):
    seen = []
    list(stream_generate(model, Letters(), PROMPT * 3, 1, prefill_step_size=16,
                         prompt_progress_callback=lambda *a: seen.append(a)))  # fmt: skip
    assert seen == [(0, 60), (16, 60), (32, 60), (48, 60), (59, 60), (60, 60)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": []}, "empty"),
        ({"max_tokens": 0}, "max_tokens cannot be 0"),
        ({"max_kv_size": 8}, "20 tokens but the context holds 8|21 tokens but the context holds 8"),
        ({"tree": "ngram:0"}, "cannot read the tree"),
        ({"tree": "streams:2"}, "there is only ngram"),
        ({"temp": -1.0}, "temp cannot be"),
        ({"ngram_min": 0}, "n-gram lengths"),
        ({"num_draft_tokens": 0}, "num_draft_tokens"),
        ({"nonsense": 1}, "unknown option 'nonsense'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(model, options, message):
    arguments = {"prompt": PROMPT, **options}
    with pytest.raises((UsageError, SpecStreamError), match=message) as caught:
        stream_generate(model, Letters(), **arguments)
    assert "\n" not in str(caught.value)


def test_generation_ends_where_the_context_does(model):
    responses = list(stream_generate(model, Letters(), PROMPT, -1, max_kv_size=32))
    assert len(PROMPT) + len(responses) == 32
    assert responses[-1].finish_reason == "length"


def test_stats_tell_what_the_planner_chose_and_what_is_held(model):
    session = Session(model, Letters())
    before = session.stats()
    assert (before["passes"], before["trees"], before["why"]) == (0, {}, "")
    *_, last = session.stream(PROMPT, 24)
    after = json.loads(json.dumps(session.stats()))
    assert after["passes"] == last.passes == sum(after["trees"].values())
    assert (after["tokens"], after["trees"], after["why"]) == (24, last.trees, last.why)
    assert after["context"] == session.cache.length > 0
    assert after["cost_curve"][0]["rows"] == 1
    assert after["kv_bytes"] == session.cache.nbytes
