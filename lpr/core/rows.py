"""What goes up to the device, in flat arrays: a rank's part of a step, and who is whose ancestor in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lpr.core.partition import Shard, partition
from lpr.core.state import SequenceState
from lpr.core.tree import TokenTree

WORD_BITS = 64


def workload(states: Sequence[SequenceState]) -> tuple[int, int]:
    """What a step costs besides its nodes: the most pending tokens of a rank, and the longest cached length."""
    if not states:
        return 0, 0
    pending = [
        sum(len(state.tokens) - 1 - state.num_computed_tokens[rank] for state in states)
        for rank in range(len(states[0].num_computed_tokens))
    ]
    return max(pending), max(len(state.tokens) for state in states)


def split(state: SequenceState, tree: TokenTree, num_ranks: int, max_owned: int | None) -> list[Shard]:
    """The shards of `tree`; ranks with a longer pending chain get fewer nodes."""
    pending = [len(state.tokens) - held - 1 for held in state.num_computed_tokens]
    return partition(tree, num_ranks, pending, max_owned)


def row_entries(state: SequenceState, tree: TokenTree, shard: Shard, rank: int) -> np.ndarray:
    """Tokens, parents and positions, int32 [3, entries], of a rank's part of a step.

    It is the rank's pending chain, which ends in the root, and the shard's nodes below it. Parents are entries; -1
    attaches to the committed tokens that the rank has computed.
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


def ancestor_words(parents: Sequence[int] | np.ndarray, num_words: int) -> np.ndarray:
    """`core.tree.ancestor_bits` as little-endian words: uint64 [n, num_words], 64 * num_words >= n.

    Pointer doubling: after round k an entry holds its ancestors up to distance 2^k, so a chain of 512 entries takes
    nine rounds and a flat tree one or two.
    """
    count = len(parents)
    jump = np.full(count + 1, count, np.int64)  # the last row stands for "no parent"
    jump[:count] = parents
    jump[jump < 0] = count
    words = np.zeros((count + 1, num_words), np.uint64)
    entry = np.arange(count)
    words[entry, entry // WORD_BITS] = np.left_shift(np.uint64(1), (entry % WORD_BITS).astype(np.uint64))
    while jump.min() < count:
        words |= words[jump]
        jump = jump[jump]
    return words[:count]
