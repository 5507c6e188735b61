"""A streams folder: ``config.json`` (the ``speculators`` envelope), ``streams.safetensors``.

The configuration names the target the streams belong to. What could only give nonsense (another
architecture, vocabulary or tokenizer) is refused; other weights of the same shape (a fine-tune,
another quantization) are accepted, since streams can only cost speed. How much they still predict
there is for a layer above to measure, by the self-test in the configuration (``self_test.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import SpecStreamError
from ..target import Target
from . import StreamHeads, StreamsConfig, make_streams

SPECULATORS_TYPE = "specstream"
FORMAT_VERSION = "1"
CONFIG_FILE = "config.json"


@dataclass(frozen=True)
class Identity:
    """What a streams folder says of its target.

    Args:
        name: The target's name or path, for people.
        architecture: mlx-lm ``model_type``.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the hidden state.
        layers: Number of transformer blocks.
        tokenizer: sha256 of the vocabulary, ids included; "" if unknown.
        weights: sha256 over samples of the weights' values.
    """

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    tokenizer: str
    weights: str


@dataclass(frozen=True)
class OtherWeights:
    """Streams that were just loaded for a target whose weights they were not trained for.

    Args:
        folder: Where they are.
        made_for: The target they were trained for.
        streams: The streams, ready for the target at hand.
        self_test: The configuration's ``self_test`` as it stands there, unchecked; None if absent.
    """

    folder: Path
    made_for: Identity
    streams: StreamHeads
    self_test: Any

    def warn(self, figures: str = "how many of their tokens are accepted here is unknown") -> None:
        """Warn in one line."""
        text = (
            f"the streams in {self.folder} were trained for other weights "
            f"({self.made_for.name or 'unnamed'}): {figures}; the text stays right"
        )
        warnings.warn(" ".join(text.split()), stacklevel=2)


def identify(target: Target, tokenizer: Any = None, name: str = "") -> Identity:
    """The identity of a target (and its tokenizer)."""
    return Identity(
        name=name,
        architecture=getattr(target.model, "model_type", ""),
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        layers=len(target.blocks),
        tokenizer=tokenizer_hash(tokenizer) if tokenizer is not None else "",
        weights=weights_fingerprint(target),
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 over the vocabulary in the order of its ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def weights_fingerprint(target: Target) -> str:
    """sha256 over a row of every block's linear maps and some embeddings, as float16 values.

    Values, not bytes: a quantized model and its exact dequantization agree, and so do a model
    that computes in its own half precision and the same one loaded to compute in float32.
    """
    digest = hashlib.sha256()

    def add(module: Any, ids: mx.array) -> None:
        values = _rows(module, ids).astype(mx.float16)
        digest.update(bytes(memoryview(values)))  # type: ignore[arg-type]

    size = target.vocab_size
    add(target.family.trunk.embed_tokens, mx.arange(0, size, 1 + size // 16))
    for layer in target.family.layers:
        for _, module in layer.named_modules():
            if isinstance(module, (nn.Linear, nn.QuantizedLinear)):
                add(module, mx.arange(1))
    return digest.hexdigest()


def _rows(module: Any, ids: mx.array) -> mx.array:
    """Rows of a weight matrix; of a quantized one their exact values, not rounded to its dtype."""
    weight = module.weight[ids]
    if not isinstance(module, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
        return weight
    scales, biases = module.scales[ids], None
    if "biases" in module:
        scales, biases = scales.astype(mx.float32), module.biases[ids].astype(mx.float32)
    return mx.dequantize(weight, scales, biases, module.group_size, module.bits, module.mode)


def save_streams(
    folder: str | Path,
    streams: StreamHeads,
    identity: Identity,
    extra: dict | None = None,
    dtype: mx.Dtype | None = None,
) -> None:
    """Write a streams folder; each file appears whole or not at all.

    Args:
        folder: Made if missing.
        streams: What to write.
        identity: The target's, from ``identify``.
        extra: More fields for ``config.json`` (training summary, self-test).
        dtype: Of the parameters in the file; as they are by default.

    Raises:
        SpecStreamError: If the folder cannot be written.
    """
    config = {
        "speculators_model_type": SPECULATORS_TYPE,
        "speculators_version": FORMAT_VERSION,
        "speculators_config": {
            "algorithm": SPECULATORS_TYPE,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", **streams.config.to_dict()}],
            "verifier": {"name_or_path": identity.name, "architectures": [identity.architecture]},
        },
        "streams": streams.config.to_dict(),
        "target": vars(identity),
        **(extra or {}),
    }
    arrays = {
        name: value if dtype is None else value.astype(dtype)
        for name, value in tree_flatten(streams.parameters())
    }
    if streams.config.draft_vocab is not None:
        arrays["draft_vocab"] = mx.array(streams.config.draft_vocab, dtype=mx.int32)
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as work:
            weights = Path(work) / "streams.safetensors"
            mx.save_safetensors(str(weights), arrays, metadata={"format": "mlx"})
            text = _write_config(config, Path(work))
            # The configuration goes last: a folder with one is complete.
            os.replace(weights, folder / weights.name)
            os.replace(text, folder / text.name)
    except (OSError, RuntimeError) as error:
        raise SpecStreamError(f"cannot write the streams to {folder}: {error}") from error


def save_self_test(folder: str | Path, self_test: dict[str, Any]) -> None:
    """Write a self-test into an existing streams folder; its configuration is replaced whole.

    Args:
        folder: A streams folder.
        self_test: From ``self_test.make_self_test``; it takes the place of an earlier one.

    Raises:
        SpecStreamError: If there are no streams in the folder, or it cannot be written.
    """
    folder = Path(folder)
    config = {**_read_config(folder), "self_test": self_test}
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as work:
            os.replace(_write_config(config, Path(work)), folder / CONFIG_FILE)
    except OSError as error:
        raise SpecStreamError(f"cannot write the self-test to {folder}: {error}") from error


def load_streams(
    folder: str | Path,
    target: Target,
    tokenizer: Any = None,
    other_weights: Callable[[OtherWeights], None] = OtherWeights.warn,
) -> StreamHeads:
    """Read a streams folder for a target.

    Args:
        folder: The folder.
        target: The target.
        tokenizer: Its tokenizer; None if it is not to be compared.
        other_weights: Called if the streams were trained for other weights than the target's.

    Raises:
        SpecStreamError: If a file is missing, damaged, or made for another kind of target.
    """
    folder = Path(folder)
    config = _read_config(folder)
    try:
        fields, made_for = dict(config["streams"]), Identity(**config["target"])
        arrays = mx.load(str(folder / "streams.safetensors"))
    except (KeyError, TypeError, ValueError) as error:
        raise SpecStreamError(f"{folder / CONFIG_FILE} is not a streams folder's") from error
    except (OSError, RuntimeError) as error:
        raise SpecStreamError(
            f"cannot read {folder / 'streams.safetensors'}: {error}; copy the folder again"
        ) from error
    assert isinstance(arrays, dict)
    ours = identify(target, tokenizer)
    check_identity(made_for, ours, folder)
    draft = arrays.pop("draft_vocab", None)
    ids = None if draft is None else tuple(int(i) for i in np.array(draft))
    try:
        streams = make_streams(StreamsConfig(**fields, draft_vocab=ids), target)
    except TypeError as error:
        raise SpecStreamError(f"{folder / CONFIG_FILE} has unknown fields: {error}") from error
    expected = {name: value.shape for name, value in tree_flatten(streams.parameters())}
    found = {name: value.shape for name, value in arrays.items()}
    if expected != found:
        odd = sorted(expected.items() ^ found.items())[0][0]
        raise SpecStreamError(
            f"{folder}: '{odd}' is {found.get(odd, 'missing')}, expected "
            f"{expected.get(odd, 'nothing of that name')}; the files do not belong together"
        )
    kept = [(name, value.astype(target.dtype)) for name, value in arrays.items()]
    streams.update(tree_unflatten(kept))
    streams.prepare()
    if made_for.weights != ours.weights:
        other_weights(OtherWeights(folder, made_for, streams, config.get("self_test")))
    return streams


def _write_config(config: dict, folder: Path) -> Path:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return path


def _read_config(folder: Path) -> dict:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except FileNotFoundError as error:
        raise SpecStreamError(f"no streams in {folder}: config.json is missing") from error
    except (OSError, ValueError) as error:
        raise SpecStreamError(f"cannot read {folder / CONFIG_FILE}: {error}") from error
    kind = config.get("speculators_model_type") if isinstance(config, dict) else None
    if kind != SPECULATORS_TYPE:
        raise SpecStreamError(f"{folder} holds '{kind}' heads, not '{SPECULATORS_TYPE}' streams")
    return config


def check_identity(made_for: Identity, target: Identity, folder: Path) -> None:
    """Refuse streams of another kind of target; their weights may differ.

    Raises:
        SpecStreamError: If architecture, sizes, vocabulary or tokenizer differ.
    """
    for field in ("architecture", "vocab_size", "hidden_size", "layers", "tokenizer"):
        theirs, ours = getattr(made_for, field), getattr(target, field)
        if theirs != ours and "" not in (theirs, ours):
            what = "another tokenizer" if field == "tokenizer" else f"{field} {theirs}, not {ours}"
            raise SpecStreamError(f"the streams in {folder} were made for {what}")
