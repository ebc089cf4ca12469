"""The trie against a list of documents searched from end to end."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lpr.core.suffix_index import END, MAX_MATCH, SuffixIndex

DOCUMENTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=6)


def build(documents: list[list[int]], capacity: int = 10_000) -> tuple[SuffixIndex, list[int]]:
    """A trie of `documents` (the last one still open), and the flat text that it should hold."""
    trie, flat = SuffixIndex(capacity), []
    for document in documents:
        trie.end_document()
        flat += [END] * bool(flat) + document
        trie.extend(document)
    return trie, flat


def pairs_of(trie: SuffixIndex) -> dict[int, int]:
    """The index of pairs without its shards."""
    return {key: position for shard in trie.pairs for key, position in shard.items()}


def occurrences(flat: list[int], suffix: list[int], at_least: int) -> list[tuple[int, int]]:
    """(index of what follows, match length) of each place, the newest first, by looking everywhere."""
    found = []
    for end in range(len(flat) - 2, -1, -1):
        length = 0
        while (
            length < min(len(suffix), MAX_MATCH, end + 1)
            and flat[end - length] == suffix[-1 - length]
            and flat[end - length] != END
        ):
            length += 1
        if length >= at_least and flat[end + 1] != END:
            found.append((end + 1, length))
    return found


@given(DOCUMENTS, st.lists(st.integers(0, 3), min_size=2, max_size=20))
def test_every_occurrence_is_found_with_its_match_length(documents, suffix):
    trie, flat = build(documents)
    assert trie.tokens.tolist() == flat
    assert trie.match(suffix, limit=1000) == occurrences(flat, suffix, 2)
    assert trie.match_last(suffix[-1], limit=1000) == [index for index, _ in occurrences(flat, suffix[-1:], 1)]


@given(DOCUMENTS)
def test_the_current_text_matches_itself_at_earlier_places(documents):
    trie, flat = build(documents)
    suffix = documents[-1]
    if len(suffix) >= 2:
        assert trie.match(suffix, limit=1000) == occurrences(flat, suffix, 2)


@given(DOCUMENTS, st.integers(1, 4))
def test_a_limit_keeps_the_newest_places(documents, limit):
    trie, flat = build(documents)
    found = trie.match([1, 2], limit)
    assert found == occurrences(flat, [1, 2], 2)[: len(found)]
    assert len(found) <= limit
    ends = [i for i in range(1, len(flat)) if flat[i - 1 : i + 1] == [1, 2]]
    looked_at = ends[::-1][:limit]
    assert len(found) == sum(i + 1 < len(flat) and flat[i + 1] != END for i in looked_at)


def test_nothing_crosses_a_document():
    trie, _ = build([[1, 2], [3, 1, 2, 4], [2]])
    assert [trie.tokens[index : index + 2].tolist() for index, _ in trie.match([1, 2])] == [[4, END]]
    assert trie.match([2, 3]) == []
    assert trie.match([9, 3, 1, 2]) == [(6, 3)]
    [after] = trie.match_last(3)
    assert trie.tokens[after : after + 2].tolist() == [1, 2]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), min_size=1, max_size=12), st.integers(1, 80))
def test_eviction_forgets_the_oldest_and_leaves_nothing_dangling(documents, capacity):
    trie, flat = build(documents, capacity)
    held = trie.history().tolist()
    assert len(trie) == len(held) <= capacity
    assert held == flat[len(flat) - len(held) :]
    first = trie.base + trie.start
    assert first == len(flat) - len(held)
    assert len(trie.previous_token) == len(trie.previous_pair) == len(trie.tokens)
    inner = {(held[i - 1], held[i]): i + first for i in range(1, len(held)) if END not in held[i - 1 : i + 1]}
    assert pairs_of(trie) == {left << 32 | right: position for (left, right), position in inner.items()}
    assert trie.singles == {token: i + first for i, token in enumerate(held) if token != END}
    for suffix in ([0, 1], [2, 2], [3, 0, 1]):
        found = [(index - trie.start, length) for index, length in trie.match(suffix, 1000)]
        assert found == occurrences(held, suffix, 2)
        singles = [index - trie.start for index in trie.match_last(suffix[-1], 1000)]
        assert singles == [index for index, _ in occurrences(held, suffix[-1:], 1)]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=30), max_size=12),
    st.integers(1, 200),
    st.lists(st.integers(0, 3), max_size=20),
)
def test_a_trie_made_from_a_history_at_once_is_the_one_made_token_by_token(documents, capacity, more):
    slow, flat = build(documents, capacity=100_000)
    fast = SuffixIndex.from_history(flat, 100_000)
    for name in SuffixIndex.__slots__:
        assert getattr(fast, name) == getattr(slow, name), name
    # With less room, the newest tokens stay, and it goes on as any trie.
    small, alike = SuffixIndex.from_history(flat, capacity), SuffixIndex.from_history(flat[-capacity:], 100_000)
    assert small.history() == alike.history()
    for trie in (small, alike):
        trie.extend(more)
    held = small.history().tolist()
    assert len(held) <= capacity and held == (flat + more)[len(flat) + len(more) - len(held) :]
    assert pairs_of(small).keys() == pairs_of(SuffixIndex.from_history(held, capacity)).keys()


def test_memory_stays_bounded_over_a_long_history():
    trie = SuffixIndex(2_000)
    token = 1
    for _ in range(100):
        document = []
        for _ in range(1_000):
            token = token * 48271 % 2147483647
            document.append(token % 30_000)  # nearly every pair is new: the worst case for the index
        trie.extend(document)
        trie.end_document()
        assert len(trie) <= 2_000 and len(trie.tokens) <= 2_200
        assert len(pairs_of(trie)) <= 2_000 and len(trie.singles) <= 2_000
    assert trie.base + len(trie) == 100 * 1_001
    assert all(isinstance(column, array) for column in (trie.tokens, trie.previous_token, trie.previous_pair))


def test_a_query_does_not_depend_on_the_size_of_the_history():
    class Counting(dict):
        reads = 0

        def get(self, *args):
            Counting.reads += 1
            return super().get(*args)

    trie, _ = build([[5, 6, 7] * 20_000], capacity=100_000)
    trie.pairs = [Counting(shard) for shard in trie.pairs]
    assert len(trie.match([5, 6], limit=16)) == 16
    assert Counting.reads == 1


def test_a_capacity_below_one_is_refused():
    with pytest.raises(ValueError, match="capacity_tokens=0"):
        SuffixIndex(0)


def test_an_empty_trie_knows_nothing():
    trie = SuffixIndex(4)
    trie.end_document()
    assert trie.match([1, 2]) == [] and trie.match([]) == [] and trie.match_last(1) == [] and len(trie) == 0
