"""The n-gram table: what it counts, how it is packed, and as a proposer."""

from __future__ import annotations

import random
from collections import Counter

import mlx.core as mx
import pytest
from tiny import decoded, reports, target_of, text_of

from mlx_specstream import Sampling
from mlx_specstream.decode.proposers import NgramLookup, TableProposer
from mlx_specstream.streams.ngram_table import (
    SLOTS,
    NgramTable,
    follow,
    followers_of,
    most_frequent,
)

VOCAB = 96


def texts(count: int = 40, size: int = 60, letters: int = 12) -> list[list[int]]:
    chance = random.Random(5)
    return [[chance.randrange(letters) for _ in range(size)] for _ in range(count)]


def naive(context: list[int], corpus: list[list[int]]) -> int | None:
    """What followed the longest known ending of a context most often, the earliest of equals."""
    for order in (3, 2, 1):
        ending = context[-order:]
        counts: Counter[int] = Counter()
        for text in corpus:
            for end in range(order, len(text)):
                if len(ending) == order and text[end - order : end] == ending:
                    counts[text[end]] += 1
        if counts:
            return counts.most_common(1)[0][0]
    return None


def test_a_table_of_a_given_size_keeps_what_is_frequent():
    often, seldom = [1, 2, 3, 4, 5, 6] * 40, [n for n in range(10, 90) for _ in range(2)]
    whole = NgramTable.build([often, seldom], VOCAB)
    small = NgramTable.build([often, seldom], VOCAB, most_bytes=whole.nbytes // 2)
    assert small.nbytes <= whole.nbytes // 2
    for at in range(6):
        ending = [often[at], often[at + 1], often[at + 2]]
        assert small.next_token(ending) == whole.next_token(ending) == often[at + 3]
    tiny = NgramTable.build([often, seldom], VOCAB, most_bytes=1)
    assert tiny.nbytes == SLOTS * (2 + 2 * 4)  # a bucket at least


def test_chains_follow_the_most_frequent_successor_with_back_off():
    corpus = texts(6, 40)
    followers = most_frequent(followers_of(corpus))
    chance = random.Random(1)
    for _ in range(60):
        context = [chance.randrange(13) for _ in range(3)]
        expected = list(context)
        for _ in range(4):
            token = naive(expected, corpus)
            expected.append(expected[-1] if token is None else token)
        assert follow(tuple(context), followers, 4) == expected[3:]


@pytest.mark.parametrize("vocab_size", [VOCAB, 1 << 17])
def test_the_packed_table_says_what_was_counted(vocab_size):
    corpus = texts()
    table = NgramTable.build(corpus, vocab_size)
    assert table.chains.dtype == (mx.uint16 if vocab_size == VOCAB else mx.uint32)
    followers = most_frequent(followers_of(corpus))
    chance, wrong = random.Random(2), 0
    for _ in range(300):
        text = chance.choice(corpus)
        end = chance.randrange(3, len(text))
        chain, found = table.lookup(mx.array(text[end - 3 : end], dtype=mx.int32))
        assert found.item()
        wrong += chain.tolist() != follow(tuple(text[end - 3 : end]), followers, table.depth)
    assert wrong <= 6  # contexts whose bucket was full, or a false mark


def test_short_texts_are_looked_up_by_what_there_is():
    table = NgramTable.build([[5, 6, 7, 8, 9, 5, 6]], VOCAB, depth=2)
    for recent, chain in (([-1, -1, 5], [6, 7]), ([-1, 5, 6], [7, 8]), ([70, 71, 8], [9, 5])):
        tokens, found = table.lookup(mx.array(recent, dtype=mx.int32))
        assert (tokens.tolist(), found.item()) == (chain, True)
    tokens, found = table.lookup(mx.array([1, 2, 3], dtype=mx.int32))
    assert not found.item()


def test_a_table_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least two tokens"):
        NgramTable.build([[3], []], VOCAB)


def test_buckets_are_at_most_half_full_and_sizes_are_counted():
    table = NgramTable.build(texts(), VOCAB)
    assert table.marks.shape[1] == SLOTS
    assert (table.marks != 0).sum().item() <= table.marks.size / 2
    assert table.nbytes == table.marks.size * 2 + table.chains.size * 2


@pytest.mark.parametrize("temp", [0.0, 0.7])
@pytest.mark.parametrize("plan", ["table:4", "ngram:3,table:4", "table:2", "ngram|table:4"])
@pytest.mark.parametrize("compile", [False, True])
def test_text_is_the_same_and_known_text_comes_in_fewer_passes(temp, plan, compile):
    target, prompt, sampling = target_of("grouped"), text_of(19), Sampling(temp=temp)
    expected = decoded(target, prompt, 40, "none", sampling, seed=3)
    table = TableProposer(NgramTable.build([prompt + expected], target.vocab_size))
    made = reports(
        target, prompt, 40, plan, sampling, (NgramLookup(), table), seed=3, compile=compile
    )
    tokens = [token for report in made for token in report.tokens]
    assert tokens[:40] == expected
    assert len(made) < 30
    assert sum(report.proposed["table"] for report in made) > 0


def test_a_short_prompt_has_contexts_that_begin_before_it():
    target = target_of("grouped")
    expected = decoded(target, [17], 12, "none", Sampling())
    table = TableProposer(NgramTable.build([[17, *expected]], target.vocab_size))
    made = reports(target, [17], 12, "table:3", Sampling(), (table,))
    assert [t for r in made for t in r.tokens][:12] == expected
    assert len(made) < 12


def test_a_branch_takes_the_first_proposer_that_has_something_to_say():
    target, prompt = target_of("grouped"), text_of(40)
    expected = decoded(target, prompt, 40, "none")
    table = TableProposer(NgramTable.build([prompt + expected], target.vocab_size))
    proposers = (NgramLookup(), table)
    both = reports(target, prompt, 40, "ngram|table:4", proposers=proposers)
    alone = reports(target, prompt, 40, "ngram:4", proposers=(NgramLookup(),))
    assert [t for r in both for t in r.tokens][:40] == expected[:40]
    assert len(both) < len(alone)
    for report in both:
        assert sorted(report.proposed.values()) == [0, 4]  # one of them, never both
        owners = {owner for owner in report.owners if owner}
        assert all(report.proposed[owner] == 4 for owner in owners)
    assert {name for r in both for name, n in r.proposed.items() if n} == {"ngram", "table"}
