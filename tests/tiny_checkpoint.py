"""Tiny checkpoints as Hugging Face has them, and a way to run the convert command."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from tiny import BASE, VOCAB, build
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_specstream.conversion import command

INDEX = "model.safetensors.index.json"


def write_checkpoint(
    folder: Path,
    *,
    shards: int = 1,
    dtype: str = "float32",
    words: int = VOCAB,
    nan_in: str | None = None,
    **changes: object,
) -> dict[str, np.ndarray]:
    """Write a random model; returns its weights, as float32, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    config = BASE | changes
    written, values = {}, {}
    for name, exact in tree_flatten(build(**changes).parameters()):
        array = exact.astype(getattr(mx, dtype))
        if name == nan_in:
            array = mx.where(mx.arange(array.shape[-1]) == 3, mx.nan, array).astype(array.dtype)
        values[name] = np.array(array.astype(mx.float32))
        written[name] = array
    names = list(written)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", written)
    else:
        files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
        for i, file in enumerate(files):
            write_safetensors(folder / file, {name: written[name] for name in names[i::shards]})
        where = {name: files[i % shards] for i, name in enumerate(names)}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": dtype}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    write_tokenizer(folder, words)
    return values


def write_safetensors(path: Path, arrays: dict[str, mx.array]) -> None:
    """The format by its description: header's length, header, data."""
    kinds = {mx.float32: ("F32", mx.uint32), mx.bfloat16: ("BF16", mx.uint16)}
    header, data = {}, b""
    for name, array in arrays.items():
        kind, bits = kinds[array.dtype]
        start = len(data)
        data += np.array(array.view(bits)).tobytes()
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_tokenizer(folder: Path, words: int) -> None:
    """A tokenizer of the words ``w0``, ``w1``, …"""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w2", unk_token="w0")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} w2 {% endfor %}"
    fast.save_pretrained(folder)


def convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """What ``python scripts/convert.py ARGUMENTS`` does, in this process."""
    monkeypatch.setattr(sys, "argv", ["convert.py", *map(str, arguments)])
    command.main()


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: object
) -> str:
    """The one line that a conversion was refused with; it must leave nothing behind."""
    target = Path(str(arguments[arguments.index("--mlx-path") + 1]))
    before = sorted(target.parent.rglob("*")) if target.parent.exists() else []
    with pytest.raises(SystemExit) as end:
        convert(monkeypatch, *arguments)
    assert end.value.code in (1, 2)
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"error: [^\n]+\n", err), err
    assert (sorted(target.parent.rglob("*")) if target.parent.exists() else []) == before
    return err.removeprefix("error: ").rstrip("\n")


def all_weights(folder: Path) -> dict[str, mx.array]:
    """Every tensor of a folder, from all of its files."""
    weights: dict[str, mx.array] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights |= mx.load(str(file))
    return weights


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays agree in dtype, shape and every bit."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool(mx.array_equal(a.reshape(-1).view(mx.uint8), b.reshape(-1).view(mx.uint8)))
