"""A GGUF file into an MLX model folder, without changing a value.

What MLX has a quantization for is repacked (:mod:`.gguf_blocks`); everything else is expanded to
float32, which holds every value exactly. One tensor at a time is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from mlx_specstream.errors import SpecStreamError

from . import gguf_architectures as architectures
from . import safetensors_file
from .gguf_blocks import BITS, GROUP_SIZE, Array
from .gguf_metadata import value
from .gguf_tokenizer import tokenizer, tokenizer_config
from .gguf_weights import layout, packed_kinds, weights

KINDS = ("F32", "F16", "BF16", *BITS, "Q2_K", "Q3_K", "Q6_K")


def read(path: Path) -> GGUFReader:
    """Open a GGUF file and check that it is one we can repack.

    Raises:
        SpecStreamError: The file is missing, truncated, of another architecture, or has a tensor
            whose name or type is not known.
    """
    if not path.is_file():
        raise SpecStreamError(f"{path} does not exist")
    try:
        reader = GGUFReader(path)
    except Exception as error:  # the reader walks raw offsets: a short file fails anywhere
        raise SpecStreamError(
            f"{path} is truncated or not a GGUF file; install or copy it again"
        ) from error
    if value(reader, "split.count", 1) > 1:
        raise SpecStreamError(
            f"{path} is one of several parts: join them (llama-gguf-split --merge)"
        )
    for tensor, _ in architectures.tensors(reader):
        if tensor.tensor_type.name not in KINDS:
            raise SpecStreamError(
                f"{path}: {tensor.name} is of type {tensor.tensor_type.name}; "
                f"only {', '.join(KINDS)} are supported"
            )
    return reader


def config(reader: GGUFReader, expand: bool = False) -> dict[str, Any]:
    """The ``config.json`` that mlx-lm loads the repacked weights with."""
    result, packed = architectures.config(reader), packed_kinds(reader, expand)
    if not packed:
        return result
    quantization: dict[str, Any] = {"group_size": GROUP_SIZE, "bits": 4}
    quantization |= {
        name: {"group_size": GROUP_SIZE, "bits": BITS[kind]}
        for name, kind in packed.items()
        if BITS[kind] != 4
    }
    return result | {"quantization": quantization, "quantization_config": quantization}


def repack(
    source: Path,
    folder: Path,
    progress: Callable[[float], None] | None = None,
    *,
    expand: bool = False,
) -> None:
    """Write ``source`` as an MLX model folder: weights, config, tokenizer.

    Args:
        source: A GGUF file.
        folder: An existing folder.
        progress: Called with the fraction done, 0 to 1.
        expand: Repack nothing, expand everything to floating numbers.

    Raises:
        SpecStreamError: See :func:`read` and :func:`tokenizer`; or its metadata makes no sense.
        OSError: The folder cannot be written.
    """
    report = progress or (lambda fraction: None)
    reader = read(source)
    report(0.2)  # parsing the vocabulary takes about as long as the weights
    try:
        tokenizer_json = tokenizer(reader).to_str(pretty=False)
        report(0.4)
        settings, plan = config(reader, expand), layout(reader, expand)
        tokenizer_settings = tokenizer_config(reader)
    except SpecStreamError:
        raise
    except Exception as error:  # metadata of the wrong kind: no end of ways
        raise SpecStreamError(f"{source} has unusable metadata: {error!r:.200}") from error

    def reported() -> Iterator[tuple[str, Array]]:
        for done, named in enumerate(weights(reader, expand)):
            report(0.4 + 0.6 * done / len(plan))
            yield named

    safetensors_file.write(folder / "model.safetensors", plan, reported())
    _write_json(folder / "config.json", settings)
    _write_json(folder / "tokenizer_config.json", tokenizer_settings)
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    report(1.0)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
