"""Streams that come with the project are used for the model they were made for, and only there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from test_streams_folder import PROMPT, Tokenizer
from tiny import TINY, decoded, target_of

from mlx_specstream import Session, embedded, shipped
from mlx_specstream.streams.folder import TABLE_FILE, save_table
from mlx_specstream.streams.ngram_table import NgramTable


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "__file__", str(tmp_path / "package" / "shipped.py"))
    place = tmp_path / "weights" / shipped.NAMES[embedded.NAME]
    target = target_of("grouped")
    text = PROMPT + decoded(target, PROMPT, 30, "none")
    save_table(place, NgramTable.build([text], target.vocab_size), target.vocab_size, "")
    return place


@pytest.fixture
def model():
    """The tiny model, passing for the embedded one."""
    model = TINY["grouped"]()
    model._specstream_loaded = SimpleNamespace(name=embedded.NAME)
    return model


def test_they_are_found_loaded_once_and_used(folder, model):
    assert shipped.folders() == [folder]
    sessions = [Session(model, Tokenizer()) for _ in range(2)]
    assert sessions[0].proposers == ["ngram", "table"]
    assert sessions[0].streams is sessions[1].streams
    assert Session(model, Tokenizer(), None).proposers == ["ngram"]


def test_other_models_get_none(folder):
    assert Session(TINY["grouped"](), Tokenizer()).proposers == ["ngram"]


def test_what_cannot_be_used_is_left_out_with_a_warning(folder, model):
    (folder / TABLE_FILE).write_bytes(b"")
    with pytest.warns(UserWarning, match="going on without streams"):
        assert Session(model, Tokenizer()).proposers == ["ngram"]
