"""A streams folder as a whole: heads, a table, or both."""

from __future__ import annotations

import pytest
from tiny import decoded, streams_of, target_of, text_of

from mlx_specstream import Session, SpecStreamError, Speculation
from mlx_specstream.streams.files import identify, save_streams
from mlx_specstream.streams.folder import TABLE_FILE, load_folder, save_table
from mlx_specstream.streams.ngram_table import NgramTable

PROMPT = text_of(19)


class Tokenizer:
    """Just what identities and sessions ask for."""

    bos_token = None
    eos_token_ids = frozenset({-1})

    def __init__(self, letters: str = "abc"):
        self.letters = letters

    def get_vocab(self) -> dict[str, int]:
        return {letter: i for i, letter in enumerate(self.letters)}

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(0x4E00 + t) for t in tokens)


@pytest.fixture
def target():
    return target_of("grouped")


@pytest.fixture
def table(target):
    return NgramTable.build([PROMPT + decoded(target, PROMPT, 30, "none")], target.vocab_size)


def save(folder, target, table, heads=True):
    identity = identify(target, Tokenizer())
    if heads:
        save_streams(folder, streams_of("grouped", "linear"), identity)
    save_table(folder, table, target.vocab_size, identity.tokenizer)


@pytest.mark.parametrize("heads", [True, False])
def test_what_was_saved_comes_back(tmp_path, target, table, heads):
    save(tmp_path, target, table, heads)
    loaded = load_folder(tmp_path, target, Tokenizer())
    assert (loaded.heads is not None) == heads
    assert loaded.table.marks.tolist() == table.marks.tolist()
    assert loaded.table.chains.tolist() == table.chains.tolist()
    added = table.nbytes + (loaded.heads.memory_bytes() if heads else 0)
    assert loaded.nbytes == added
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith(".")) == []


def test_a_folder_of_heads_alone_has_no_table(tmp_path, target):
    save_streams(tmp_path, streams_of("grouped", "fused"), identify(target))
    assert load_folder(tmp_path, target).table is None


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda f: (f / TABLE_FILE).unlink(), "config.json is missing"),
        (lambda f: (f / TABLE_FILE).write_bytes((f / TABLE_FILE).read_bytes()[:-9]), "cannot read"),
        (lambda f: (f / TABLE_FILE).write_bytes(b""), "cannot read"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path, target, table, break_it, message):
    save(tmp_path, target, table, heads=False)
    break_it(tmp_path)
    with pytest.raises(SpecStreamError, match=message):
        load_folder(tmp_path, target)


def test_a_table_of_another_tokenizer_or_vocabulary_is_refused(tmp_path, target, table):
    save(tmp_path, target, table, heads=False)
    with pytest.raises(SpecStreamError, match="another tokenizer"):
        load_folder(tmp_path, target, Tokenizer("abd"))
    save_table(tmp_path, table, target.vocab_size + 1, "")
    with pytest.raises(SpecStreamError, match="another vocabulary"):
        load_folder(tmp_path, target)


@pytest.mark.parametrize("tree", ["auto", "table:4", "ngram:2,table:3,streams:2x1"])
def test_a_session_uses_all_of_a_folder(tmp_path, target, table, tree):
    save(tmp_path, target, table)
    plain = Session(target.model, Tokenizer(), speculation=Speculation(enabled=False))
    session = Session(target.model, Tokenizer(), tmp_path, Speculation(tree=tree))
    assert session.proposers == ["ngram", "table", "streams"]
    texts = [list(s.stream(PROMPT, 24)) for s in (plain, session)]
    assert [r.token for r in texts[0]] == [r.token for r in texts[1]]
    if tree != "auto":
        assert texts[1][-1].accepted["table"] > 3
