"""A forward's host-to-device inputs: a rank's entries of each sequence, in flat arrays. Twin: native/rows.h."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lpr.core.partition import Shard
from lpr.core.state import SequenceState
from lpr.core.tree import TokenTree

WORD_BITS = 64


def row_entries(state: SequenceState, tree: TokenTree, shard: Shard, rank: int) -> np.ndarray:
    """Tokens, parents and positions, int32 [3, entries], of the tokens that a rank evaluates of a sequence.

    These are the rank's pending chain, which ends in the root, and the shard's nodes below it. Parents are indices of
    entries; -1 is the last committed token with K/V on the rank.
    """
    computed = state.num_computed_tokens[rank]
    chain = state.tokens[computed:]
    above = len(chain) - 1
    entry = {node: above + i for i, node in enumerate(shard.nodes)}
    root_position = computed + above
    tokens = chain + [tree.tokens[node] for node in shard.nodes[1:]]
    parents = list(range(-1, above)) + [entry[tree.parents[node]] for node in shard.nodes[1:]]
    positions = list(range(computed, root_position)) + [root_position + tree.depths[node] for node in shard.nodes]
    return np.array([tokens, parents, positions], np.int32)


def place_rows(
    words: np.ndarray,
    batch: int,
    num_entries: int,
    tables: np.ndarray,
    page_size: int,
    spare_row: int,
    num_cached: Sequence[int],
    entries: Sequence[np.ndarray],
) -> None:
    """Write a step's rows into int32 `words`: B rows of T entries, padded on the left.

    In this order: bit masks of ancestors [B, T, 2 * max(2, ceil(T / 64))], tokens, positions and cache rows [B, T],
    numbers of cached tokens and of real entries [B]. `tables` are the rows' block tables, int32 [B, pages]. `entries`
    are int32 [3, n] per row (see `row_entries`); rows beyond them are empty. The K/V of padding goes to the spare row
    of the cache.
    """
    num_words = max(2, -(-num_entries // WORD_BITS))
    sizes = [(batch, num_entries, 2 * num_words), *[(batch, num_entries)] * 3, (batch,), (batch,)]
    ends = np.cumsum([int(np.prod(size)) for size in sizes]).tolist()
    begins = [0, *ends[:-1]]
    parts = [words[begin:end].reshape(size) for begin, end, size in zip(begins, ends, sizes, strict=True)]
    words[: ends[-1]] = 0
    bits, tokens, positions, write_rows, cached, real = parts
    write_rows[:] = spare_row
    for index in range(min(batch, len(entries))):
        if not entries[index].shape[1]:
            continue
        count = entries[index].shape[1]
        first = num_entries - count
        tokens[index, first:], parents, positions[index, first:] = entries[index]
        bits[index, first:] = ancestor_words(parents, num_words).view(np.int32)
        places = np.arange(count) + num_cached[index]
        write_rows[index, first:] = tables[index, places // page_size] * page_size + places % page_size
        cached[index], real[index] = num_cached[index], count


def place_packed(
    words: np.ndarray,
    num_sequences: int,
    num_entries: int,
    num_kept: int,
    tables: np.ndarray,
    page_size: int,
    spare_row: int,
    slots: np.ndarray,
    columns: np.ndarray,
    entries: np.ndarray,
) -> None:
    """Write a step's rows into int32 `words`, packed one after the other at the end of N = `num_entries` entries.

    In this order: bit masks of ancestors [N, 2 * max(2, ceil(N / 64))], tokens, positions and cache rows [N], the
    indices of the entries whose results are wanted (the last ones of each row) [`num_kept`], the first entry of each of
    S = `num_sequences` sequences [S + 1], and per sequence the slot, the number of cached tokens and of real entries
    [S]. Entries before the first row are padding of the first sequence. `tables` are the block tables of all slots,
    int32 [slots, pages]. `slots` are int64 [rows]; `columns` and `entries` are as in StepDraft.
    """
    num_words = max(2, -(-num_entries // WORD_BITS))
    sizes = [num_entries * 2 * num_words, *[num_entries] * 3, num_kept, num_sequences + 1, *[num_sequences] * 3]
    words[: sum(sizes)] = 0
    bits, tokens, positions, write_rows, wanted, starts, slot_of, cached, real = np.split(words, np.cumsum(sizes))[:-1]
    at, kept, begin = num_entries - len(entries) // 3, 0, 0
    write_rows[:], starts[1:], wanted[:] = spare_row, num_entries, num_entries - 1
    for index, (slot, num_cached, num_results, count) in enumerate([*zip(slots, *columns, strict=True)]):
        starts[index] = at if index else 0
        slot_of[index], cached[index], real[index] = slot, num_cached, count
        end = at + count
        tokens[at:end], parents, positions[at:end] = entries[begin : begin + 3 * count].reshape(3, count)
        bits.reshape(num_entries, -1)[at:end] = ancestor_words(parents, num_words).view(np.int32)
        places = np.arange(count) + num_cached
        write_rows[at:end] = tables[slot, places // page_size] * page_size + places % page_size
        wanted[kept : kept + num_results] = np.arange(end - num_results, end)
        at, kept, begin = end, kept + num_results, begin + 3 * count


def ancestor_words(parents: Sequence[int] | np.ndarray, num_words: int) -> np.ndarray:
    """`core.tree.ancestor_bits` as little-endian words: uint64 [n, num_words], 64 * num_words >= n."""
    words = np.zeros((len(parents), num_words), np.uint64)
    for entry, parent in enumerate(parents):
        if parent >= 0:
            words[entry] = words[parent]
        words[entry, entry // WORD_BITS] |= np.uint64(1 << entry % WORD_BITS)
    return words
