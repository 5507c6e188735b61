"""Whole GGUF files of the llama architecture: mlx-lm runs the result, and bad files are refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import dequantize_model, load_model, load_tokenizer
from tiny_gguf import greedy, repacked

from mlx_specstream.conversion import gguf as conversion
from mlx_specstream.errors import SpecStreamError


@pytest.mark.parametrize(
    ("kind", "embedding_kind", "tied"),
    [
        (Kind.Q4_1, Kind.Q8_0, True),
        (Kind.Q4_0, Kind.Q4_1, False),
        (Kind.Q8_0, Kind.F16, True),
        (Kind.Q5_0, Kind.Q8_0, True),
        (Kind.Q5_1, Kind.BF16, False),
        (Kind.F16, Kind.F32, False),
    ],
)
def test_mlx_lm_runs_the_repacked_model_as_the_original_weights(
    tmp_path: Path, write_tiny_gguf, kind: Kind, embedding_kind: Kind, tied: bool
):
    exact = write_tiny_gguf(tmp_path / "tiny.gguf", kind, embedding_kind, tied=tied)
    folder = repacked(tmp_path / "tiny.gguf", tmp_path / "tiny")
    model, config = load_model(folder)
    plain = dequantize_model(load_model(folder)[0])
    # A model that never saw our code's packing, names aside.
    reference = llama.Model(llama.ModelArgs.from_dict(config))
    reference.load_weights([(name, mx.array(value)) for name, value in exact.items()])

    for name, value in dict(tree_flatten(plain.parameters())).items():
        np.testing.assert_array_equal(np.array(value), exact[name], err_msg=name)
    prompt = [1, 17, 60, 99, 4]
    expected = greedy(reference, prompt, 12)
    assert greedy(plain, prompt, 12) == expected
    assert greedy(model, prompt, 12) == expected


def test_config_names_each_layer_whose_bits_differ(tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    config = conversion.config(conversion.read(tmp_path / "tiny.gguf"))
    eight = {"group_size": 32, "bits": 8}
    assert config["quantization"] == {"group_size": 32, "bits": 4, "model.embed_tokens": eight}
    assert config["quantization_config"] == config["quantization"]
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    assert config["head_dim"] == 16 and config["tie_word_embeddings"] is True
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_tokenizer_loads_with_its_special_tokens_and_template(tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf")
    tokenizer = load_tokenizer(repacked(tmp_path / "tiny.gguf", tmp_path / "tiny"))
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "the 12"}])
    assert ids[0] == 1 and ids[-1] == 2 == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == "<|start|>the 12<|end|>"


def test_other_architectures_are_refused_by_name(tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf", architecture="mamba")
    with pytest.raises(SpecStreamError, match="architecture mamba"):
        conversion.read(tmp_path / "tiny.gguf")


def test_other_quantizations_are_refused_by_name(tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "tiny.gguf", Kind.MXFP4)
    with pytest.raises(SpecStreamError, match=r"blk.0.attn_q.weight is of type MXFP4"):
        conversion.read(tmp_path / "tiny.gguf")


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path, write_tiny_gguf, kept: float):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(SpecStreamError, match="truncated"):
        conversion.read(path)


def add_rope_factors(monkeypatch: pytest.MonkeyPatch, factors: np.ndarray) -> None:
    """Have the tiny files hold what llama.cpp's converter writes for Llama 3."""
    then = gguf.GGUFWriter.add_block_count

    def add(self: gguf.GGUFWriter, count: int) -> None:
        self.add_tensor("rope_freqs.weight", factors.astype(np.float32))
        then(self, count)

    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", add)


def test_llama_3_positions_are_scaled_by_the_factors_of_the_file(
    tmp_path: Path, write_tiny_gguf, monkeypatch: pytest.MonkeyPatch
):
    # Worked out by hand for base 100,000 and heads of 16, that is waves of 6.28, 26.5, 112, 471,
    # 1987, 8379, 35334 and 149002 positions, of which 8192 hold 4.12 and 0.98 for the fifth and
    # the sixth: the first five are short, the rest long.
    factors = np.array([1, 1, 1, 1, 1, 32, 32, 32])
    add_rope_factors(monkeypatch, factors)
    write_tiny_gguf(tmp_path / "tiny.gguf")
    model, config = load_model(repacked(tmp_path / "tiny.gguf", tmp_path / "tiny"))
    assert config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = np.array(model.layers[0].self_attn.rope._freqs)
    np.testing.assert_allclose(scaled, factors * 1e5 ** (np.arange(0, 16, 2) / 16), rtol=1e-5)


def test_other_factors_of_positions_are_refused(
    tmp_path: Path, write_tiny_gguf, monkeypatch: pytest.MonkeyPatch
):
    add_rope_factors(monkeypatch, np.array([1, 1, 2, 3, 4, 5, 6, 7]))
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(SpecStreamError, match="in an unknown way"):
        repacked(tmp_path / "tiny.gguf", tmp_path / "tiny")


def test_a_part_of_a_file_is_refused(
    tmp_path: Path, write_tiny_gguf, monkeypatch: pytest.MonkeyPatch
):
    then = gguf.GGUFWriter.add_block_count
    monkeypatch.setattr(
        gguf.GGUFWriter,
        "add_block_count",
        lambda self, count: (self.add_uint16("split.count", 2), then(self, count)),
    )
    write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(SpecStreamError, match="one of several parts"):
        conversion.read(tmp_path / "tiny.gguf")


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(SpecStreamError, match="does not exist"):
        conversion.read(tmp_path / "none.gguf")
