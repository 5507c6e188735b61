"""The streams folder: written, read back, and refused when it does not belong."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import dequantize_model
from tiny import TINY, VOCAB, build, streams_of, target_of

from mlx_specstream.errors import SpecStreamError
from mlx_specstream.streams.files import (
    identify,
    load_streams,
    save_streams,
    weights_fingerprint,
)
from mlx_specstream.target import Target

KINDS = ("linear", "fused", "deferred")


class FakeTokenizer:
    def __init__(self, words: str):
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words)}


@pytest.fixture
def saved(tmp_path):
    streams = streams_of("grouped", "deferred")
    target, tokenizer = target_of("grouped"), FakeTokenizer("abc")
    identity = identify(target, tokenizer, name="me/tiny")
    save_streams(tmp_path, streams, identity, {"training": {"minutes": 8}})
    return tmp_path


def edit(folder, **changes) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for name, value in changes.items():
        content[name] = {**content[name], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["grouped", "quantized"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_loads_as_it_was(tmp_path, kind, name):
    target, streams = target_of(name), streams_of(name, kind)
    save_streams(tmp_path, streams, identify(target, FakeTokenizer("abc"), "me/tiny"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "streams.safetensors",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_streams(tmp_path, target, FakeTokenizer("abc"))
    assert loaded.config.to_dict() == streams.config.to_dict()
    assert loaded.config.draft_vocab == streams.config.draft_vocab and type(loaded) is type(streams)
    ours, theirs = (dict(tree_flatten(s.parameters())) for s in (loaded, streams))
    assert ours.keys() == theirs.keys()
    assert all((ours[key] == theirs[key]).all().item() for key in ours)
    assert (loaded.correction(mx.array([3])) == streams.correction(mx.array([3]))).all().item()


def test_the_configuration_is_a_speculators_envelope_that_names_the_target(saved):
    content = json.loads((saved / "config.json").read_text())
    assert content["speculators_model_type"] == "specstream"
    assert content["speculators_config"]["verifier"]["name_or_path"] == "me/tiny"
    assert content["target"]["vocab_size"] == VOCAB and content["training"] == {"minutes": 8}
    _, metadata = mx.load(str(saved / "streams.safetensors"), return_metadata=True)
    assert metadata == {"format": "mlx"}


@pytest.mark.parametrize(
    ("other", "tokenizer", "message"),
    [
        ("smollm3", "abc", "made for architecture llama, not smollm3"),
        ({"vocab_size": 120}, "abc", "made for vocab_size 101, not 120"),
        ({"hidden_size": 32}, "abc", "made for hidden_size 64, not 32"),
        ({"num_hidden_layers": 4}, "abc", "made for layers 3, not 4"),
        ("grouped", "acb", "made for another tokenizer"),
    ],
)
def test_streams_of_another_kind_of_target_are_refused(saved, other, tokenizer, message):
    target = target_of(other) if isinstance(other, str) else Target.of(build(**other))
    with pytest.raises(SpecStreamError, match=message):
        load_streams(saved, target, FakeTokenizer(tokenizer))


def test_streams_of_other_weights_are_loaded_with_a_warning(saved):
    with pytest.warns(UserWarning, match="trained for other weights .me/tiny."):
        load_streams(saved, Target.of(build(seed=1)), FakeTokenizer("abc"))


def test_whoever_loads_streams_of_other_weights_may_say_it_in_their_own_way(saved):
    edit(saved, self_test=["as it stands there"], target={"name": "me/\ntiny"})
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_streams(saved, target_of("grouped"), FakeTokenizer("abc"), found.append)
        assert found == []
        heads = load_streams(saved, Target.of(build(seed=1)), FakeTokenizer("abc"), found.append)
    (case,) = found
    assert case.streams is heads and case.folder == saved
    assert case.self_test == ["as it stands there"]
    with pytest.warns(UserWarning, match=r"other weights \(me/ tiny\): 1.2, not 1.9; the text"):
        case.warn("1.2, not 1.9")


def test_an_unknown_tokenizer_is_not_held_against_the_streams(saved):
    load_streams(saved, target_of("grouped"))


def truncate(folder) -> None:
    path = folder / "streams.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def reshape(folder) -> None:
    arrays = mx.load(str(folder / "streams.safetensors"))
    arrays["start"] = mx.zeros((2, 64))
    mx.save_safetensors(str(folder / "streams.safetensors"), arrays)


def drop_one(folder) -> None:
    arrays = mx.load(str(folder / "streams.safetensors"))
    del arrays["start_a"]
    mx.save_safetensors(str(folder / "streams.safetensors"), arrays)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "cannot read .*streams.safetensors.*copy the folder again"),
        (lambda f: (f / "streams.safetensors").unlink(), "cannot read .*streams.safetensors"),
        (lambda f: (f / "streams.safetensors").write_bytes(b""), "cannot read .*safetensors"),
        (lambda f: (f / "config.json").unlink(), "no streams in .*config.json is missing"),
        (lambda f: (f / "config.json").write_text("{"), "cannot read .*config.json"),
        (lambda f: (f / "config.json").write_text("[]"), "not 'specstream' streams"),
        (lambda f: edit(f, speculators_model_type="eagle"), "holds 'eagle' heads"),
        (lambda f: edit(f, target=3), "not a streams folder's"),
        (lambda f: edit(f, streams={"wings": 2}), "unknown fields.*wings"),
        (lambda f: edit(f, streams={"gamma": 4}), "'start' is .3, 64., expected .4, 64."),
        (lambda f: edit(f, streams={"gamma": 0}), "gamma must be at least 1"),
        (reshape, "'start' is .2, 64., expected .3, 64."),
        (drop_one, "'start_a' is missing, expected .3, 128, "),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(saved, damage, message):
    damage(saved)
    with pytest.raises(SpecStreamError, match=message) as refusal:
        load_streams(saved, target_of("grouped"), FakeTokenizer("abc"))
    assert "\n" not in str(refusal.value)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    streams = streams_of("grouped", "linear")
    with pytest.raises(SpecStreamError, match="cannot write the streams"):
        save_streams(tmp_path / "file", streams, identify(target_of("grouped")))


@pytest.mark.parametrize("tied", [True, False])
def test_a_quantized_model_and_its_exact_dequantization_have_one_fingerprint(tied):
    quantized = build(quantize=True, tie_word_embeddings=tied)
    exact = dequantize_model(build(quantize=True, tie_word_embeddings=tied))
    assert not any(isinstance(m, nn.QuantizedLinear) for m in exact.modules())
    mark = weights_fingerprint(Target.of(quantized))
    assert mark == weights_fingerprint(Target.of(exact))
    assert mark != weights_fingerprint(Target.of(build(tie_word_embeddings=tied)))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("quantize", [True, False])
def test_a_half_precision_model_and_itself_loaded_in_float32_have_one_fingerprint(tied, quantize):
    shape = {"quantize": quantize, "dtype": mx.bfloat16, "tie_word_embeddings": tied}
    own, wider = build(**shape), build(**shape)
    wider.set_dtype(mx.float32)
    assert weights_fingerprint(Target.of(own)) == weights_fingerprint(Target.of(wider))
    if quantize:
        expanded = dequantize_model(wider)
        assert weights_fingerprint(Target.of(own)) == weights_fingerprint(Target(expanded))


@pytest.mark.parametrize("name", sorted({*TINY} - {"mistral", "gemma3", "mixtral"}))
@pytest.mark.parametrize("where", ["embedding", "first", "last"])
def test_one_changed_matrix_changes_no_other_part_of_the_identity(name, where):
    model = TINY[name]()
    before = identify(Target.of(model))
    matrix = {
        "embedding": model.model.embed_tokens,
        "first": model.layers[0].self_attn.o_proj,
        "last": model.layers[-1].mlp.down_proj,
    }[where]
    part = "scales" if "scales" in matrix else "weight"
    matrix[part] = matrix[part] * 1.5
    after = identify(Target.of(model))
    assert after.weights != before.weights
    assert replace(after, weights=before.weights) == before
