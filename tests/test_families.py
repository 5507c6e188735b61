"""Every family beyond Llama's own: what it generates, proposes and refuses.

That a tree pass gives each row the logits of its own path, tests/test_target.py says for all of
them; here they write text.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from tiny import FAMILIES, TINY, VOCAB, Oracle, decoded, reports, target_of, text_of

from mlx_specstream import SpecStreamError, load
from mlx_specstream.decode.loop import Decoder
from mlx_specstream.decode.plan import TreePlan
from mlx_specstream.decode.processors import Sampling
from mlx_specstream.decode.proposers import NgramLookup
from mlx_specstream.speculation import Speculation, fixed_plan, menu_of
from mlx_specstream.target import families
from mlx_specstream.target.families import adapter_for
from mlx_specstream.target.vector_math import vectorised

COUNT, PROMPT = 30, text_of(19)  # both longer than the sliding windows, which are 8 wide


@cache
def plain(name: str, temp: float) -> list[int]:
    return decoded(target_of(name), PROMPT, COUNT, "none", Sampling(temp=temp))


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("name", FAMILIES)
def test_proposals_leave_the_text_as_it_is(name, temp):
    expected = plain(name, temp)
    proposers = (NgramLookup(min_length=1), Oracle(PROMPT + expected))
    sampling = Sampling(temp=temp)
    made = reports(target_of(name), PROMPT, COUNT, "ngram:3,oracle:3x2x1", sampling, proposers)
    tokens = [token for report in made for token in report.tokens]
    assert tokens[:COUNT] == expected
    assert len(tokens) / len(made) > 1.25  # else nothing was accepted and nothing has been tested


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "opt", "qwen3_moe", "phi3_long"])
def test_a_traced_pass_writes_the_same_text(name):
    oracle = (Oracle(PROMPT + plain(name, 0.0)),)
    assert decoded(
        target_of(name), PROMPT, COUNT, "oracle:3x1", None, oracle, compile=True
    ) == plain(name, 0.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_mlx_lms_own_loop_writes_the_same_text(name):
    steps = generate_step(mx.array(PROMPT), target_of(name).model, max_tokens=COUNT)
    assert plain(name, 0.0) == [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_the_head_make_its_logits(name):
    target, ids = target_of(name), mx.array([3, 77, 12])
    hidden = mx.array(np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32))
    some = target.family.scaled(target.family.head_rows(ids)(hidden))
    np.testing.assert_allclose(
        np.array(some), np.array(target.logits(hidden))[:, [3, 77, 12]], atol=1e-5
    )
    assert target.logits(hidden).shape == (4, VOCAB)


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "mixtral", "opt"])
def test_a_model_for_mlx_lms_loops_computes_the_same(name):
    model, tokens = target_of(name).model, mx.array([PROMPT])
    np.testing.assert_allclose(
        np.array(vectorised(model)(tokens)), np.array(model(tokens)), atol=1e-4
    )


def test_only_mixtures_of_experts_are_sparse():
    sparse = {name for name in TINY if target_of(name).family.sparse}
    assert sparse == {"qwen3_moe", "mixtral"}


def test_a_quantized_model_is_known_by_its_blocks():
    packed = {name for name in TINY if target_of(name).is_packed}
    assert packed == {"quantized", "quantized_untied", "opt_quantized"}


def test_soft_caps_and_factors_are_strong_enough_to_be_tested():
    model, tokens = FAMILIES["gemma2"](), mx.array([PROMPT])
    capped = np.array(model(tokens))
    for layer in model.layers:
        layer.self_attn.attn_logit_softcapping = 1e6
    assert np.abs(np.array(model(tokens)) - capped).max() > 0.1
    assert np.abs(capped).max() > 4  # of 5 at most


RECURRENT = "keep a recurrent state, which a tree of proposals cannot share"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "mamba2"}, RECURRENT),
        ({"model_type": "falcon_mamba"}, RECURRENT),
        ({"model_type": "rwkv7"}, RECURRENT),
        ({"model_type": "qwen3_next"}, RECURRENT),
        ({"model_type": "recurrent_gemma"}, RECURRENT),
        ({"model_type": "novel", "layer_types": ["full_attention", "mamba"]}, RECURRENT),
        ({"model_type": "t5"}, "encoder-decoder"),
        ({"model_type": "novel", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "novel", "layer_types": 3}, r"not supported \(supported: gemma, gemma2"),
    ],
)
def test_what_can_never_be_a_target_is_refused_by_name_and_reason(config, why):
    with pytest.raises(SpecStreamError, match=why) as caught:
        adapter_for(config)
    assert f"'{config['model_type']}'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_in_half_precision_on_the_cpu_are_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    with pytest.raises(SpecStreamError, match="in float32 only, not in bfloat16"):
        load(tmp_path, dtype="bfloat16")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma3", "opt", "mixtral"])
def test_what_is_supported_is_not_refused(model_type):
    assert adapter_for({"model_type": model_type}).sparse == (model_type == "mixtral")


def test_every_adapter_has_a_tiny_model():
    modules = {type(target_of(name).model).__module__.rsplit(".", 1)[-1] for name in TINY}
    assert modules == set(families.FAMILIES)


def test_lookups_are_off_for_a_mixture_of_experts_unless_asked_for():
    decoder = Decoder(target_of("mixtral"), [NgramLookup()])
    assert menu_of(decoder, Speculation()) == []
    assert fixed_plan(decoder.proposers, Speculation(tree="ngram:4")) == TreePlan.parse("ngram:4")
    assert menu_of(Decoder(target_of("grouped"), [NgramLookup()]), Speculation())
