"""What cannot be converted is refused in one line, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from tiny_checkpoint import INDEX, convert, refusal, write_checkpoint, write_tokenizer


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of three files, to be damaged."""
    write_checkpoint(tmp_path / "hf", shards=3)
    return tmp_path / "hf"


@pytest.fixture
def refused(checkpoint: Path, tmp_path: Path, monkeypatch, capsys):
    """The line that converting it ends in, with further flags."""

    def run(*flags: object, source: tuple = ("--hf-path", checkpoint)) -> str:
        target = tmp_path / "out" / "mlx"
        target.parent.mkdir(exist_ok=True)
        return refusal(monkeypatch, capsys, *source, "--mlx-path", target, *flags)

    return run


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def test_missing_file_named_by_the_index(checkpoint: Path, refused):
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    assert "lacks 1 weight file(s) (model-00002-of-00003.safetensors)" in refused()


def test_missing_file_without_an_index(checkpoint: Path, refused):
    (checkpoint / INDEX).unlink()
    (checkpoint / "model-00003-of-00003.safetensors").unlink()
    assert "lacks 1 weight file(s) (model-00003-of-00003.safetensors)" in refused()


def test_index_that_names_an_absent_tensor(checkpoint: Path, refused):
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"]["model.more.weight"] = "model-00001-of-00003.safetensors"
    edit(checkpoint / INDEX, **index)
    assert "names model.more.weight in model-00001-of-00003.safetensors" in refused()


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map":{"a":1}}']
)
def test_damaged_index(checkpoint: Path, refused, content: str):
    (checkpoint / INDEX).write_text(content)
    assert INDEX in refused()


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, 0.999])
def test_truncated_weights(checkpoint: Path, refused, kept: float):
    path = checkpoint / "model-00002-of-00003.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept if kept >= 1 else kept * len(whole))])
    assert f"{path} is truncated or no safetensors file" in refused()


def test_no_weights_at_all(checkpoint: Path, refused):
    (checkpoint / INDEX).unlink()
    for file in checkpoint.glob("*.safetensors"):
        file.unlink()
    assert "has no weights (model*.safetensors)" in refused()


def test_a_tensor_that_the_model_needs_is_missing(checkpoint: Path, refused):
    edit(checkpoint / "config.json", num_hidden_layers=4)
    assert "Missing 9 parameters" in refused()


@pytest.mark.parametrize("flags", [(), ("-q",), ("-q", "--q-mode", "mxfp4")], ids=str)
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"]
)
def test_weights_that_are_not_numbers(tmp_path: Path, refused, flags: tuple, name: str):
    write_checkpoint(tmp_path / "nan", nan_in=name)
    line = refused(*flags, source=("--hf-path", tmp_path / "nan"))
    assert line.startswith(f"{name} holds values that are not finite numbers")


def test_a_dtype_that_cannot_hold_the_weights(tmp_path: Path, refused, monkeypatch):
    monkeypatch.setattr("tiny_checkpoint.build", huge)
    write_checkpoint(tmp_path / "huge")
    line = refused("--dtype", "float16", source=("--hf-path", tmp_path / "huge"))
    assert "not finite numbers (NaN or too large)" in line


@pytest.mark.parametrize("flags", [(), ("-q",)], ids=str)
def test_config_without_a_model_type(checkpoint: Path, refused, flags: tuple):
    edit(checkpoint / "config.json", model_type=None)
    assert "config.json names no model_type" in refused(*flags)


@pytest.mark.parametrize("content", ["{", "", "[]", "\ufeff\0"])
def test_damaged_config(checkpoint: Path, refused, content: str):
    (checkpoint / "config.json").write_text(content)
    assert "config.json" in refused()


def test_code_of_the_checkpoints_runs_only_when_asked(
    checkpoint: Path, tmp_path: Path, monkeypatch, refused
):
    (checkpoint / "mine.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    edit(checkpoint / "config.json", model_file="mine.py")
    assert "wants its own mine.py to be run" in refused()
    target = tmp_path / "mlx"
    convert(monkeypatch, "--hf-path", checkpoint, "--mlx-path", target, "--trust-remote-code")
    assert (target / "mine.py").exists()


def test_unknown_model_type(checkpoint: Path, refused):
    edit(checkpoint / "config.json", model_type="nothing_like_it")
    assert "nothing_like_it" in refused()


def test_tokenizer_with_more_tokens_than_the_embedding(checkpoint: Path, refused):
    write_tokenizer(checkpoint, 102)
    line = refused()
    assert "does not match the model: it has 102 tokens, the embedding 101 rows" in line


def test_added_tokens_beyond_the_embedding_are_only_warned_about(
    checkpoint: Path, tmp_path: Path, monkeypatch, capsys
):
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    marker = content["added_tokens"][0] | {"id": 101, "content": "<image>"}
    edit(checkpoint / "tokenizer.json", added_tokens=[*content["added_tokens"], marker])
    convert(monkeypatch, "--hf-path", checkpoint, "--mlx-path", tmp_path / "mlx")
    assert capsys.readouterr().err == (
        "warning: 1 added token(s) of the tokenizer have no embedding\n"
    )


def test_no_tokenizer(checkpoint: Path, refused):
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    assert "has no usable tokenizer" in refused()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--q-bits", 4), "need -q"),
        (("--quant-predicate", "mixed_4_6"), "need -q"),
        (("-q", "-d"), "either -q or -d"),
        (("-q", "--q-bits", 7), "invalid choice: 7"),
        (("-q", "--q-mode", "mxfp4", "--q-group-size", 64), "mxfp4 takes groups of 32 and 4 bits"),
        (("-q", "--q-group-size", 16), "affine takes groups of 32 or 64 or 128"),
        (("-q", "--q-mode", "mxfp8", "--quant-predicate", "mixed_4_6"), "affine only"),
        (("-q", "--q-group-size", 128), "no matrix divides into such groups"),
        (("-d",), "nothing to dequantize"),
        (("--gguf", "a.gguf"), "name one source"),
    ],
    ids=str,
)
def test_options_that_cannot_work(refused, flags: tuple, line: str):
    assert line in refused(*flags)


def test_quantizing_twice(checkpoint: Path, tmp_path: Path, monkeypatch, capsys, refused):
    convert(monkeypatch, "--hf-path", checkpoint, "--mlx-path", tmp_path / "small", "-q")
    capsys.readouterr()
    assert "it is already" in refused("-q", source=("--hf-path", tmp_path / "small"))


def test_no_such_source(refused, tmp_path: Path):
    assert "there is no model folder" in refused(source=("--hf-path", tmp_path / "none"))
    assert "does not exist" in refused(source=("--gguf", tmp_path / "none.gguf"))


@pytest.mark.parametrize("kept", [0, 0.001, 0.5, 0.999])
def test_truncated_gguf(refused, tmp_path: Path, write_tiny_gguf, kept: float):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    assert "is truncated or not a GGUF file" in refused(source=("--gguf", path))


def test_gguf_of_another_architecture_or_type(refused, tmp_path: Path, write_tiny_gguf):
    write_tiny_gguf(tmp_path / "a.gguf", architecture="mamba")
    assert "is of architecture mamba" in refused(source=("--gguf", tmp_path / "a.gguf"))
    write_tiny_gguf(tmp_path / "b.gguf", Kind.Q4_0)
    retype(tmp_path / "b.gguf", "blk.1.attn_v.weight", Kind.IQ4_NL)
    line = refused(source=("--gguf", tmp_path / "b.gguf"))
    assert "blk.1.attn_v.weight is of type IQ4_NL; only F32, F16, BF16, Q4_0" in line


def test_weights_whose_sizes_make_no_sense(checkpoint: Path, refused):
    path = checkpoint / "model-00001-of-00003.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"shape": [101, 64]', b'"shape": [101, 63]'))
    assert f"{path} is truncated or no safetensors file" in refused()


def test_gguf_whose_metadata_make_no_sense(refused, tmp_path: Path, write_tiny_gguf, monkeypatch):
    path = tmp_path / "tiny.gguf"
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_token_merges", lambda self, merges: None)
        write_tiny_gguf(path)
    assert refused(source=("--gguf", path)) == "the GGUF file lacks tokenizer.ggml.merges"
    add = gguf.GGUFWriter.add_token_merges
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_token_merges", lambda self, _: add(self, ["no no"]))
        write_tiny_gguf(path)
    assert f"{path} has unusable metadata" in refused(source=("--gguf", path))
    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_feed_forward_length", wrong_length)
        write_tiny_gguf(path)
    line = refused(source=("--gguf", path))
    assert line.startswith(f"cannot load {path}: ") and "shape" in line


def wrong_length(writer: gguf.GGUFWriter, length: int) -> None:
    writer.add_uint32("llama.feed_forward_length", length + 32)


def test_an_existing_folder_is_never_written_over(checkpoint: Path, tmp_path, monkeypatch, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    line = refusal(monkeypatch, capsys, "--hf-path", checkpoint, "--mlx-path", tmp_path / "full")
    assert line.startswith(f"{tmp_path}/full exists already")
    (tmp_path / "file").write_text("mine")
    line = refusal(monkeypatch, capsys, "--hf-path", checkpoint, "--mlx-path", tmp_path / "file")
    assert line.startswith(f"{tmp_path}/file exists already")
    (tmp_path / "empty").mkdir()
    convert(monkeypatch, "--hf-path", checkpoint, "--mlx-path", tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_a_full_disk_leaves_nothing(checkpoint: Path, refused, monkeypatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copy", full)  # the last step
    assert refused().endswith("No space left on device")


def retype(path: Path, name: str, kind: Kind) -> None:
    """Call a tensor's blocks blocks of another type, of the same size."""
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == name)
    tensor.field.parts[-2][0] = kind
    reader.data.flush()


def huge(**changes: object):
    """A model with a weight above float16's largest number."""
    from tiny import build

    model = build(**changes)
    model.model.norm.weight = model.model.norm.weight * 1e6
    return model
