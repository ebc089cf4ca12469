"""The shared index under long use: memory is bounded, queries stay fast, and no insertion stalls."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from benchmarks.replay import learn
from lpr.config import DecodeConfig
from lpr.core import suffix_index
from lpr.native import Drafter, SuffixIndex, TokenTree

VOCABULARY, CAPACITY, NODES = 32_000, 50_000, 64


def documents() -> Iterator[list[int]]:
    """Endless documents of phrases by Zipf's law, some new in every document, so that token pairs come and go."""
    draw = random.Random(0)

    def phrase() -> list[int]:
        return [int(VOCABULARY ** draw.random()) for _ in range(draw.randint(3, 12))]

    phrases = [phrase() for _ in range(20_000)]
    while True:
        for _ in range(20):
            phrases[draw.randrange(len(phrases))] = phrase()
        document: list[int] = []
        length = draw.randint(200, 2000)
        while len(document) < length:
            document += phrases[int(len(phrases) ** draw.random()) - 1]
            if draw.random() < 0.3:
                document.append(draw.randrange(VOCABULARY))
        yield document[:length]


def test_an_index_at_capacity_is_bounded_and_queries_stay_fast() -> None:
    trie, draw = SuffixIndex(CAPACITY), random.Random(1)
    config = DecodeConfig(window_size=0, trie_nodes=NODES).resolved()
    inserted = most = num_drafted = 0
    milliseconds: list[float] = []
    for document in documents():
        learn(trie, [document])
        inserted += len(document) + 1
        most = max(most, trie.num_entries)
        if inserted >= CAPACITY:
            start = draw.randrange(len(document) - 40)
            drafter = Drafter(config, trie)
            drafter.observe(document[start : start + 8])
            tree = TokenTree(document[start + 7])
            began = time.thread_time()
            drafter.draft(tree, NODES)
            milliseconds.append((time.thread_time() - began) * 1e3)
            num_drafted += len(tree) - 1
        if inserted >= 300_000:
            break
    assert len(trie) <= CAPACITY
    # Per token at most: itself, two links, a pair; and the slack of arrays that are compacted now and then.
    assert 3 * CAPACITY <= most <= 4.4 * CAPACITY + VOCABULARY
    assert num_drafted > 55 * len(milliseconds), "queries must find drafts, or they prove nothing"
    assert sorted(milliseconds)[int(0.99 * len(milliseconds))] < 10.0, "2 ms, and a factor for a busy machine"


def test_no_insertion_does_much_work_at_once() -> None:
    """Counted, not timed: the entries that one insertion may drop."""
    trie = suffix_index.SuffixIndex(64_000)
    forgotten = []
    for token in range(200_000):
        before = len(trie) + 1
        trie.extend([token % 5_000, token % 4_999])
        forgotten.append(before + 1 - len(trie))
        assert len(trie.tokens) <= 64_000 * 17 // 16 + 64
    assert 0 < max(forgotten) <= 64
    assert trie.num_entries <= 4.4 * 64_000 + 5_000
    assert max(map(len, trie.pairs)) < 64_000 / 16, "the index of pairs is split, so that none of its parts grows long"
