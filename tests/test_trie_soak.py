"""The trie under long use: memory is bounded, queries stay fast, and no insertion stalls. A short `benchmarks.trie`."""

from __future__ import annotations

from benchmarks.trie import soak

CAPACITY = 50_000


def test_a_soak_at_capacity_is_bounded_and_queries_stay_fast() -> None:
    result = soak(num_tokens=300_000, capacity=CAPACITY, queries=300)
    assert result["num_tokens"] >= 300_000
    assert result["held_tokens"] <= CAPACITY
    # Per token at most: itself, two links, a pair; and the slack of arrays that are cut now and then.
    assert result["max_elements"] <= 4.4 * CAPACITY + result["vocabulary"]
    assert result["max_elements"] >= 3 * CAPACITY, "the soak must have filled it"
    assert result["query_ms"]["nodes"] > 55, "queries must find drafts, or they prove nothing"
    assert result["query_ms"]["p99"] < 2.0 * 5, "a factor for a busy machine; the benchmark asks for 2 ms"


def test_no_insertion_does_much_work_at_once() -> None:
    """Counted, not timed: what one insertion of a token may forget."""
    from lpr.core.suffix_index import SuffixIndex

    trie = SuffixIndex(64_000)
    forgotten = []
    for token in range(200_000):
        before = len(trie) + 1
        trie.extend([token % 5_000, token % 4_999])
        forgotten.append(before + 1 - len(trie))
        assert len(trie.tokens) <= 64_000 * 17 // 16 + 64
    assert 0 < max(forgotten) <= 64
    assert trie.num_entries <= 4.4 * 64_000 + 5_000
    assert max(map(len, trie.pairs)) < 64_000 / 16, "the index of pairs is split, so that none of its parts grows long"
