"""Loading models: what works, and the one line that says why something does not."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tiny import TINY

from mlx_specstream import SpecStreamError, UsageError, accelerate, load, loading
from mlx_specstream.target import Target

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 96,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, embedded_model: Path) -> Path:
    """A tiny model's folder with a real tokenizer, in two shards."""
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    weights = dict(tree_flatten(model.parameters()))
    names = sorted(weights)
    halves = names[::2], names[1::2]
    index = {}
    for number, half in enumerate(halves, start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        mx.save_safetensors(str(tmp_path / file), {n: weights[n] for n in half})
        index |= dict.fromkeys(half, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((embedded_model / name).read_bytes())
    return tmp_path


def refused(folder: Path | str, **options) -> str:
    with pytest.raises(SpecStreamError) as caught:
        load(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def configure(folder: Path, **changes) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def test_a_sharded_folder_loads_and_runs(folder):
    model, tokenizer = load(folder)
    assert Target.of(model).vocab_size == 96
    assert tokenizer.eos_token_ids == {2}
    assert model.model.norm.weight.dtype == mx.float32
    assert "float32" in loading.description(model)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtype_chooses_what_the_model_computes_in(folder, dtype):
    model, _ = load(folder, dtype=dtype)
    assert str(model.model.norm.weight.dtype) == f"mlx.core.{dtype}"
    assert str(Target.of(model).make_cache().kv[0].dtype) == f"mlx.core.{dtype}"


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_on_the_cpu_a_quantized_model_is_expanded_if_it_fits(folder, monkeypatch, dtype):
    def packed(**options) -> bool:
        return "scales" in load(folder, dtype=dtype, **options)[0].layers[0].mlp.up_proj

    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    nn.quantize(model, group_size=32, bits=4)
    for shard in folder.glob("model*"):
        shard.unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    configure(folder, quantization={"group_size": 32, "bits": 4})
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    monkeypatch.setattr(accelerate, "_status", accelerate.Status(False, None, "off", None))
    assert not packed() and packed(dequantize=False)
    monkeypatch.setattr(loading, "_fits", lambda nbytes: False)
    assert packed() and not packed(dequantize=True)
    exact = load(folder, dtype="float32", dequantize=True)[0].layers[0].mlp.up_proj.weight
    rounded = load(folder, dtype=dtype, dequantize=True)[0].layers[0].mlp.up_proj.weight
    assert (rounded == exact.astype(rounded.dtype)).all().item()


def test_a_missing_folder(tmp_path):
    assert "no model folder" in refused(tmp_path / "absent")
    assert "no model folder" in refused("~nobody-has-this-name/model")


def test_a_hub_id_that_cannot_be_fetched(monkeypatch):
    def offline(name: str) -> str:
        raise OSError("offline\nand a second line")

    monkeypatch.setattr(loading.mlx_lm_utils, "_download", offline)
    assert "could not be fetched from the hub: offline" in refused("someone/model")


def test_a_hub_id_loads_from_its_snapshot(folder, monkeypatch):
    monkeypatch.setattr(loading.mlx_lm_utils, "_download", lambda name, **options: folder)
    assert loading.description(load("someone/model")[0]).startswith("someone/model")


def test_a_folder_without_configuration(tmp_path):
    assert "no config.json" in refused(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    assert "is not a model folder" in refused(tmp_path / "a.gguf")


@pytest.mark.parametrize("text", ["{", "[]", '{"vocab_size": 3}', '{"model_type": 7}'])
def test_an_unusable_configuration(folder, text):
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


def test_an_unknown_architecture_is_refused_before_weights_are_read(folder):
    configure(folder, model_type="mamba2")
    for file in folder.glob("*.safetensors"):
        file.write_bytes(b"not weights")
    message = refused(folder)
    assert "mamba2" in message
    assert "supported" in message


def test_a_missing_shard(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "lacks 1 of 2 weight files (model-00002-of-00002.safetensors)" in refused(folder)


def test_a_missing_tensor(folder):
    file = folder / "model-00001-of-00002.safetensors"
    weights = mx.load(str(file))
    name = min(weights)
    weights.pop(name)
    mx.save_safetensors(str(file), weights)
    assert refused(folder).endswith(f"Missing 1 parameters: {name}.")


def test_no_weights_at_all(folder):
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink()
    assert "no weights" in refused(folder)


@pytest.mark.parametrize("keep", [0, 20, 0.6])
def test_truncated_weights(folder, keep):
    file = folder / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    assert "cannot load" in refused(folder)


def test_weights_of_another_shape(folder):
    configure(folder, intermediate_size=128)
    assert "cannot load" in refused(folder)


def test_a_missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert "cannot load" in refused(folder)


def test_a_damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text('{"version": 1}')
    assert "cannot load" in refused(folder)


def test_a_long_text_makes_no_warning_of_transformers(folder, caplog):
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 8}))
    tokenizer = load(folder)[1]
    logging.getLogger("transformers.tokenization_utils_base").addHandler(caplog.handler)
    assert len(tokenizer.encode("word " * 20)) > tokenizer.model_max_length == 8
    assert caplog.records == []


def test_an_unknown_dtype_is_a_usage_error(folder):
    with pytest.raises(UsageError, match="float32, float16, bfloat16"):
        load(folder, dtype="int8")


def test_a_missing_adapter(folder, tmp_path):
    assert "cannot load" in refused(folder, adapter_path=str(tmp_path / "none"))


def test_expanding_a_quantized_model_is_counted_before_it_is_done():
    packed, plain = TINY["quantized"](), TINY["grouped"]()
    arrays = [array for _, array in tree_flatten(plain.parameters())]
    assert loading.expanded_bytes(packed) == sum(array.size * 4 for array in arrays)
