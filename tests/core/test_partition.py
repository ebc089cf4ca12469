from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lpr.core.partition import partition
from lpr.core.tree import Source, TokenTree
from lpr.core.window import JacobiWindow
from tests.core.test_tree import trees


@given(trees(80), st.integers(1, 9), st.data())
def test_shards(tree: TokenTree, num_ranks: int, data: st.DataObject) -> None:
    pending = data.draw(st.lists(st.integers(0, 12), min_size=num_ranks, max_size=num_ranks))
    shards = partition(tree, num_ranks, pending)
    assert len(shards) == num_ranks
    owners = [node for shard in shards for node in shard.owned]
    assert sorted(owners) == list(range(len(tree))), "every node has exactly one owner"
    for shard in shards:
        assert shard.nodes == sorted(set(shard.nodes)) and shard.nodes[0] == 0
        assert set(shard.owned) <= set(shard.nodes)
        for node in shard.nodes[1:]:
            assert tree.parents[node] in shard.nodes, "a shard holds every node's ancestors"
    assert shards == partition(tree, num_ranks, pending)
    sizes = [chain + len(shard.nodes) for chain, shard in zip(pending, shards, strict=True) if shard.owned]
    # Perfectly equal runs, plus the one branch of ancestors that a run may need, or the longest chain there is.
    even = -(-(len(tree) + sum(pending)) // num_ranks)
    assert max(sizes) <= max(even + max(tree.depths) + 1, max(pending) + max(tree.depths) + 2)


@given(trees(80), st.integers(2, 9), st.integers(0, 5))
def test_capacity(tree: TokenTree, num_ranks: int, slack: int) -> None:
    limit = -(-len(tree) // num_ranks) + slack
    shards = partition(tree, num_ranks, [0] * num_ranks, limit)
    assert max(len(shard.owned) for shard in shards) <= limit
    assert sum(len(shard.owned) for shard in shards) == len(tree)


def test_too_small_capacity_is_an_error() -> None:
    tree = TokenTree(0)
    tree.add_chain(0, range(1, 10), Source.TRIE)
    with pytest.raises(ValueError, match="10 nodes do not fit 3 ranks"):
        partition(tree, 3, [0, 0, 0], 3)


def test_a_longer_pending_chain_means_fewer_nodes() -> None:
    tree = TokenTree(0)
    for token in range(1, 61):
        tree.add(0, token, Source.TRIE)
    shards = partition(tree, 3, [0, 0, 15])
    sizes = [len(shard.nodes) for shard in shards]
    assert max(sizes[0], sizes[1], sizes[2] + 15) - min(sizes[0], sizes[1], sizes[2] + 15) <= 2


def test_window_redundancy_is_one_branch_per_rank() -> None:
    tree = TokenTree(0)
    window = JacobiWindow(60, 5, list(range(1, 300)))
    window.levels = [[1_000 * (level + 1) + j for j in range(60)] for level in range(4)]
    window.add_to(tree, 1000)
    shards = partition(tree, 4, [0] * 4)
    twice = sum(len(shard.nodes) for shard in shards) - len(tree)
    assert twice <= 4 * 63
    assert max(len(s.nodes) for s in shards) - min(len(s.nodes) for s in shards if s.owned) <= 64
