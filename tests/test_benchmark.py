"""``python -m mlx_specstream.benchmark``: what it measures, refuses to show, and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import build, streams_of, target_of

from mlx_specstream import Sampling, Session, SpecStreamError, Speculation, StreamSet, Target, load
from mlx_specstream.benchmarking import forms, mlx_lm_methods, prompts
from mlx_specstream.benchmarking.arguments import arguments
from mlx_specstream.benchmarking.bandwidth import copy_bandwidth, weights_read
from mlx_specstream.benchmarking.memory import Meter
from mlx_specstream.benchmarking.methods import Ours, bytes_of_asking, paid
from mlx_specstream.benchmarking.mlx_lm_methods import MlxLm
from mlx_specstream.decode.costs import CostCurve
from mlx_specstream.streams import StreamsConfig, make_streams, randomise
from mlx_specstream.training.report_memory import parameter_bytes

SIZE = 14
GREEDY, SAMPLED = Sampling(seed=3), Sampling(temp=0.9, top_k=50, seed=3)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> tuple[Any, Any]:
    return load(tiny_model)


@pytest.fixture(scope="module")
def prompt(tiny) -> list[int]:
    return tiny[1].encode("the thing that they think of then", add_special_tokens=False)


def ways(model: Any, tokenizer: Any, streams: StreamSet = StreamSet()) -> tuple[Ours, list]:
    plain = Ours("plain", model, tokenizer, StreamSet(), Speculation(enabled=False))
    chain = Ours("speculative", model, tokenizer, streams, Speculation(tree="ngram:3"))
    others = [MlxLm(model, tokenizer), MlxLm(model, tokenizer, model, 2)]
    return plain, [chain, *others]


# Forms ------------------------------------------------------------------------------------------


def args_for(folder: Path, *more: str):
    return arguments(["--model", str(folder), *more])


@pytest.mark.parametrize(
    ("bits", "dtype"), [(32, mx.float32), (16, mx.bfloat16), (8, mx.float32), (4, mx.float32)]
)
def test_each_form_holds_what_it_says(tiny_model, tiny, bits, dtype):
    model, _ = forms.load_form(args_for(tiny_model), bits)
    assert forms.held_bits(model) == bits
    assert Target.of(model).dtype == dtype
    assert model._specstream_loaded.bits == (bits if bits < 16 else None)
    assert model._specstream_loaded.nbytes == parameter_bytes(model)
    whole = parameter_bytes(tiny[0])
    assert parameter_bytes(model) / whole == pytest.approx(
        {32: 1, 16: 1 / 2, 8: 9 / 32, 4: 5 / 32}[bits], rel=0.15
    )


def test_a_packed_checkpoint_keeps_its_own_values_and_is_packed_otherwise_from_them(
    tiny_model, tmp_path
):
    weights = arrays_of(build(vocab_size=268, quantize=True))
    for file in tiny_model.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"vocab_size": 268, "num_hidden_layers": 3, "tie_word_embeddings": True}
    config["quantization"] = {"group_size": 32, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    four, _ = forms.load_form(args_for(tmp_path), 4)
    eight, _ = forms.load_form(args_for(tmp_path), 8)
    whole, _ = forms.load_form(args_for(tmp_path), 32)
    assert all(mx.array_equal(arrays_of(four)[name], value) for name, value in weights.items())
    exact = arrays_of(whole)["model.layers.0.mlp.up_proj.weight"]
    packed = eight.model.layers[0].mlp.up_proj
    values = mx.dequantize(
        packed.weight, packed.scales, packed.biases, packed.group_size, packed.bits
    )
    assert packed.bits == forms.held_bits(eight) == 8
    assert mx.max(mx.abs(values - exact)).item() < mx.max(mx.abs(exact)).item() / 100


def arrays_of(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def test_without_bits_the_model_is_as_it_loads(tiny_model):
    model, _ = forms.load_form(args_for(tiny_model, "--dtype", "float16"), None)
    assert (forms.held_bits(model), Target.of(model).dtype) == (16, mx.float16)


# Prompts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [60, 200, 900])
def test_a_prompt_is_padded_to_its_context(tiny, count):
    tokenizer = tiny[1]
    tokens = prompts.padded(tokenizer, "the end", count)
    assert count - 16 < len(tokens) <= count  # a word of this tokenizer is many tokens
    asked = prompts.tokens_of(tokenizer, "the end")
    assert tokens[-5:] == asked[-5:]


def test_a_prompt_that_is_longer_stays_as_it_is(tiny):
    text = "that " * 30
    assert prompts.padded(tiny[1], text, 20) == prompts.tokens_of(tiny[1], text)


def test_neutral_text_does_not_come_back():
    words = prompts.neutral_words(4000)
    sentences = " ".join(words).split(".")[:-1]
    assert len(words) == 4000
    assert len(set(sentences)) == len(sentences)


def test_without_a_file_there_are_prompts_of_several_kinds():
    tasks = prompts.named_tasks(None)
    assert len(tasks) == len({task.category for task in tasks.values()}) > 3


# Memory and bandwidth ---------------------------------------------------------------------------


def test_a_copy_tells_the_bandwidth():
    assert 1e7 < copy_bandwidth(1 << 20, rounds=2) < 1e13


def test_an_embedding_that_is_not_the_head_is_not_read():
    tied, untied = build(), build(tie_word_embeddings=False)
    assert weights_read(tied) == parameter_bytes(tied)
    assert weights_read(untied) == parameter_bytes(untied) - 101 * 64 * 4


def test_streams_are_read_where_they_are_asked_and_deferred_ones_read_the_top_again():
    target = target_of("grouped")
    assert bytes_of_asking(StreamSet(), target) == 0
    fused, deferred = (streams_of("grouped", kind) for kind in ("fused", "deferred"))
    assert bytes_of_asking(StreamSet(fused), target) == fused.memory_bytes()
    top = parameter_bytes(target.model.model.layers[-1])
    assert bytes_of_asking(StreamSet(deferred), target) == deferred.memory_bytes() + 2 * top


def test_the_meter_counts_peaks_beyond_what_was_held_and_apart():
    kept = mx.ones((1 << 20,))
    mx.eval(kept)
    meter = Meter()
    meter.start()
    mx.eval(mx.ones((1 << 22,)))  # 16 MB before the first token
    meter.token()
    more = mx.ones((1 << 19,))
    mx.eval(more)
    meter.token()
    meter.stop()
    assert 16e6 < meter.prefill_peak < 20e6
    assert 2e6 < meter.decode_peak < 4e6
    assert meter.first_seconds > 0 and meter.decode_seconds > 0
    assert meter.cache_bytes >= 16e6


# Methods ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_method_gives_plain_decodings_tokens(tiny, prompt, sampling):
    plain, others = ways(*tiny)
    right = plain.decode(prompt, SIZE, sampling)
    assert right.tokens == tuple(
        r.token for r in Session(*tiny, None, Speculation(enabled=False)).stream(
            prompt, SIZE, sampling
        )
    )  # fmt: skip
    for method in others:
        assert method.decode(prompt, SIZE, sampling).tokens == right.tokens, method.name


def test_a_decoding_counts_passes_proposals_and_bytes(tiny, prompt):
    plain, (chain, theirs, drafted) = ways(*tiny)
    length = len(prompt) + SIZE / 2
    row = 2 * 5 * 2 * 16 * 4  # keys and values, layers, heads, width, float32
    weights, read = parameter_bytes(tiny[0]), weights_read(tiny[0])
    for method in (plain, theirs):
        found = method.decode(prompt, SIZE, GREEDY)
        assert (found.passes, found.first_tokens) == (SIZE, 1)
        assert (found.proposed, found.added, found.cost) == ({}, 0, None)
        assert found.weights == weights
        assert found.pass_bytes == pytest.approx(read + row * length)
        assert found.kv == 256 * row
        assert found.decode_peak > weights
    found = drafted.decode(prompt, SIZE, GREEDY)
    assert found.added == weights
    assert found.proposed == found.accepted == {"draft": 10}
    assert (found.passes, found.first_tokens) == (5, 3)  # it agrees with itself: 3 a pass
    assert found.kv == 2 * 256 * row
    assert found.pass_bytes > 2 * read
    found = chain.decode(prompt, SIZE, GREEDY)
    assert set(found.proposed) == {"ngram"}
    extra = found.passes + found.accepted["ngram"] - SIZE
    assert extra in (0, 1)  # a last pass may be cut before the target's own token


def test_added_bytes_and_costs_are_the_streams_and_the_curves(tiny, prompt):
    streams = StreamSet(streams_for(tiny[0]))
    auto = Ours("speculative", *tiny, streams, Speculation())
    found = auto.decode(prompt, SIZE, GREEDY)
    assert found.added == streams.nbytes
    assert found.cost == pytest.approx(found.passes, rel=1)


def streams_for(model: Any) -> Any:
    return randomise(make_streams(StreamsConfig("linear", 3), Target.of(model)), 1)


def test_what_passes_cost_is_read_off_the_curve():
    curve = CostCurve.from_ratios({1: 1.0, 5: 2.0}, 0.1)
    assert paid({"none": 3, "ngram:4": 2}, curve, 50) == pytest.approx(7.0)
    assert paid({"none": 3}, None, 50) is None


def test_the_margin_is_between_the_two_likeliest(tiny, prompt):
    plain, _ = ways(*tiny)
    said = plain.decode(prompt, 4, GREEDY).tokens
    logits = tiny[0](mx.array([[*prompt, *said[:3]]]))[0, -1]
    second, first = np.sort(np.array(logits))[-2:]
    assert plain.margin(prompt, 3, GREEDY) == pytest.approx(first - second, abs=1e-4)


def test_a_draft_model_of_other_tokens_is_refused(tiny):
    class Other:
        def get_vocab(self) -> dict[str, int]:
            return {"a": 0}

    mlx_lm_methods.check_draft(tiny[1], tiny[1])
    with pytest.raises(SpecStreamError, match="another vocabulary"):
        mlx_lm_methods.check_draft(tiny[1], Other())
