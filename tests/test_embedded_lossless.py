"""The lossless tests on the embedded default model: real weights, real vocabulary, float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_specstream import Sampling, Session, Speculation, load, make_streams, stream_generate
from mlx_specstream.streams import StreamsConfig, randomise
from mlx_specstream.target import Target

TOKENS = 14
PROSE = (
    "The harbour was quiet in the morning. A boat came in, the gulls followed the boat, and the "
    "men on the quay counted the crates of fish as they were lifted from the boat to the quay. "
)
SAMPLINGS = {
    "greedy": Sampling(),
    "temp 0.7, top-p, penalties": Sampling(
        temp=0.7, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.3, seed=11
    ),
    "temp 1.0, presence, bias": Sampling(
        temp=1.0, presence_penalty=0.5, logit_bias={28: 1.5, 30: -2.0}, seed=12
    ),
}
DRAFT = tuple(range(6000))
STREAMS = {
    "linear": StreamsConfig(method="linear", draft_vocab=DRAFT),
    "fused": StreamsConfig(mode="fused", layers=3, rank=8, draft_vocab=DRAFT),
    "deferred": StreamsConfig(mode="deferred", layers=3, rank=8, draft_vocab=DRAFT),
}
# Every kind of proposer, as a chain and in a tree: (streams, tree, compiled).
METHODS = [
    (None, "ngram:4", True),
    ("linear", "streams:2x1,ngram:3", False),
    ("fused", "streams:3", True),
    ("fused", "streams:2x2,ngram:2", False),
    ("deferred", "ngram:2,streams:2x1x1", False),
]


@pytest.fixture(scope="module")
def loaded(embedded_model: Path):
    return load(embedded_model)


@pytest.fixture(scope="module")
def prompts(loaded) -> dict[int, list[int]]:
    _, tokenizer = loaded
    text = tokenizer.encode(PROSE * 20)
    return {1: [1], 19: text[:19], 600: text[:600]}


@pytest.fixture(scope="module")
def sessions(loaded):
    """A session per method; its cache keeps a prompt's prefix from one test to the next."""
    model, tokenizer = loaded
    target = Target.of(model)
    streams = {name: randomise(make_streams(c, target), seed=5) for name, c in STREAMS.items()}
    made = {"plain": Session(model, tokenizer, speculation=Speculation(enabled=False))}
    for heads, tree, compiled in METHODS:
        speculation = Speculation(tree=tree, ngram_min=1, compile=compiled)
        made[tree] = Session(model, tokenizer, streams.get(heads), speculation)
    return made


@pytest.mark.parametrize("length", [1, 19, 600])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_text_is_the_same_with_any_proposals(sessions, prompts, length, sampling):
    texts = {
        name: [r.token for r in session.stream(prompts[length], TOKENS, sampling)]
        for name, session in sessions.items()
    }
    for name, tokens in texts.items():
        assert tokens == texts["plain"], name


def test_lookup_is_accepted_on_text_that_repeats(sessions, prompts):
    last = list(sessions["ngram:4"].stream(prompts[600], 24))[-1]
    assert last.tokens_per_pass > 1.5
    assert last.accepted["ngram"] > 8


def test_load_without_arguments_gives_the_default_model(embedded_model, loaded):
    model, tokenizer = load()
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    responses = list(stream_generate(model, tokenizer, prompt, max_tokens=20))
    assert "".join(r.text for r in responses) == "The capital of France is Paris."
    assert responses[-1].finish_reason == "stop"


def test_packed_and_expanded_weights_give_the_same_text(embedded_model, loaded):
    packed, tokenizer = load(embedded_model, dequantize=False)
    prompt = tokenizer.encode("The three primary colours are")
    texts = [
        [r.token for r in stream_generate(m, tokenizer, prompt, 6)] for m in (packed, loaded[0])
    ]
    assert texts[0] == texts[1]
