"""What streams are trained on: corpora, and the trunk's states of them."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
from texts import PROMPT, corpus_of
from tiny import build, target_of

from mlx_specstream import SpecStreamError
from mlx_specstream.target import Target
from mlx_specstream.training.corpus import Corpus, answers, from_answers
from mlx_specstream.training.trunk import TrunkCache

LAYERS = 2


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return corpus_of()


# Corpus -----------------------------------------------------------------------------------------


def test_a_corpus_comes_back_as_it_was(corpus, tmp_path):
    corpus.save(tmp_path / "c.npz")
    again = Corpus.load(tmp_path / "c.npz")
    assert again.tokenizer == corpus.tokenizer
    for ours, theirs in zip(corpus, again, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours[1:] == theirs[1:]
    assert not list(tmp_path.glob(".c.npz*"))


@pytest.mark.parametrize("keep", [0, 30, 0.5, 0.99])
def test_a_damaged_corpus_is_refused(corpus, tmp_path, keep):
    path = tmp_path / "c.npz"
    corpus.save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else keep])
    with pytest.raises(SpecStreamError, match="not a corpus"):
        Corpus.load(path)


def test_merged_corpora_hold_every_text_once(corpus):
    first, second = Corpus(corpus.texts[:10], "h"), Corpus(corpus.texts[6:], "h")
    merged = Corpus.merged([first, second])
    assert [t.tokens.tolist() for t in merged] == [t.tokens.tolist() for t in corpus]
    with pytest.raises(SpecStreamError, match="different tokenizers"):
        Corpus.merged([first, Corpus(second.texts, "other")])


def test_anchors_have_a_next_token_in_the_answer_and_one_after_it(corpus):
    text = corpus.texts[0]
    assert text.anchors[0] == PROMPT - 1
    assert text.anchors[-1] + 2 == len(text.tokens) - 1
    assert next(iter(answers(corpus))) == text.tokens[PROMPT - 3 :].tolist()


class Words:
    """A tokenizer of single letters with a chat template."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) - 96 for c in text]

    def apply_chat_template(self, messages: list, add_generation_prompt: bool) -> list[int]:
        return [50, *self.encode(messages[0]["content"]), 51]


@pytest.mark.parametrize("packed", [False, True])
def test_answers_as_text_become_ids(tmp_path, packed):
    rows = [
        {"prompt": "ab", "answer": "cde", "category": "x"},
        {"prompt": "ab", "answer": "again"},
        {"prompt": "b", "answer": ""},
        {"prompt": "c", "answer": "abcdefgh"},
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(text) if packed else text)
    made = from_answers(path, Words(), "h", cut_at=8)
    assert [t.tokens.tolist() for t in made] == [
        [50, 1, 2, 51, 3, 4, 5, 0],
        [50, 3, 51, 1, 2, 3, 4, 5, 6, 7, 8],
    ]
    assert [t.answer for t in made] == [4, 3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no answer of at least two tokens"),
        ('{"prompt": "a"}\n', "line 1: a prompt and an answer"),
        ("[1]\n", "line 1 is not an object"),
        ("{\n", "cannot read"),
    ],
)
def test_an_unusable_file_of_answers_is_refused(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(SpecStreamError, match=message):
        from_answers(path, Words(), "h")
    with pytest.raises(SpecStreamError, match="no file"):
        from_answers(tmp_path / "absent.jsonl", Words(), "h")


# Trunk cache ------------------------------------------------------------------------------------


def test_the_trunk_cache_holds_what_the_target_computes(corpus, tmp_path):
    trunk = TrunkCache(tmp_path, target_of("grouped"), corpus, LAYERS)
    trunk.build()
    for number in (0, 11, 23):
        here, there = trunk.compute(corpus.texts[number]), trunk.read(number)
        for name in ("final", "entering", "kv"):
            ours, theirs = np.array(getattr(here, name)), np.array(getattr(there, name))
            assert ours.shape == theirs.shape
            assert np.abs(ours - theirs).max() < 4e-3 * np.abs(ours).max()  # float16 on disk
    on_disk = sum(file.stat().st_size for file in trunk.folder.iterdir())
    assert trunk.nbytes() <= on_disk <= 1.3 * trunk.nbytes()  # and safetensors' headers


def test_a_stopped_cache_goes_on_where_it_was(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_specstream.training.trunk.SHARD", 7)
    trunk = TrunkCache(tmp_path, target_of("grouped"), corpus, 0)

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trunk.build(stop)
    left = trunk.missing()
    assert 0 < len(left) < trunk.shards
    seen = []
    trunk.build(lambda done, total: seen.append(total))
    assert trunk.missing() == []
    parts = [corpus.texts[n * 7 : (n + 1) * 7] for n in left]
    assert seen[-1] == sum(len(text.tokens) for part in parts for text in part)


def test_a_corpus_that_grows_keeps_its_shards(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_specstream.training.trunk.SHARD", 8)
    target = target_of("grouped")
    TrunkCache(tmp_path, target, Corpus(corpus.texts[:20], "h"), 0).build()
    grown = TrunkCache(tmp_path, target, corpus, 0)
    assert grown.missing() == [2]  # 16 texts fill two shards; the rest is a shard of its own
    other = Target.of(build(seed=1))
    assert TrunkCache(tmp_path, other, corpus, 0).missing() == [0, 1, 2]
    assert TrunkCache(tmp_path, target, corpus, 1).missing() == [0, 1, 2]


def test_a_cache_that_does_not_fit_the_disk_is_refused(corpus, tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(SpecStreamError, match="GB are free"):
        TrunkCache(tmp_path, target_of("grouped"), corpus, 0).build()
