"""A tree as it travels in the gather: what its ranks say of their nodes, and what all others make of that.

A rank drafts the trees of those requests only that it serves. Of any other tree it needs the accepted path, and the
candidates of its nodes. So besides its result (see TreeResult) each node sends two words: a token, and in the other one
its number, its parent's and its source. With the nodes that each rank owns, others have the whole tree and its shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lpr.core.partition import Shard
from lpr.core.tree import TokenTree

NODE_BITS = 14
"""A tree has up to 2^14 nodes (see DecodeConfig). The parent's number follows in as many bits, then the source in 3."""
_NODE = (1 << NODE_BITS) - 1


def node_words(tree: TokenTree, nodes: Sequence[int]) -> np.ndarray:
    """The two words of each of `nodes`, int64 [n]: the token above the number, its parent's and its source."""
    words = [
        tree.tokens[node] << 32
        | int(tree.sources[node]) << 2 * NODE_BITS
        | max(0, tree.parents[node]) << NODE_BITS
        | node
        for node in nodes
    ]
    return np.array(words, np.int64)


def read_tree(
    words: np.ndarray, homes: Sequence[int], places: Sequence[int], counts: Sequence[int], num_ranks: int
) -> tuple[TokenTree, list[Shard]]:
    """The tree that `homes` evaluated, and its shards, from the words of the nodes that each of them owns.

    `words` is int32 [ranks, trees, capacity, 2]; `places` says the tree's number per rank and `counts` how many nodes
    a rank owns. ValueError if these are no tree.
    """
    if not all(0 <= counts[rank] <= words.shape[2] for rank in homes):
        raise ValueError("the nodes that ranks have sent are no tree")
    mine = [words[rank, places[rank], : counts[rank]] for rank in homes]
    rows = np.concatenate(mine)
    numbers = rows[:, 0] & _NODE
    order = np.argsort(numbers, kind="stable")
    if not len(rows) or not np.array_equal(numbers[order], np.arange(len(rows))):
        raise ValueError("the nodes that ranks have sent are no tree")
    parents = rows[order, 0] >> NODE_BITS & _NODE
    sources = rows[order, 0] >> 2 * NODE_BITS
    tree = TokenTree(int(rows[order[0], 1]))
    for node, (token, parent, source) in enumerate(zip(rows[order, 1], parents, sources, strict=True)):
        if node and (parent >= node or tree.add(int(parent), int(token), int(source)) != node):
            raise ValueError("the nodes that ranks have sent are no tree")
    shards = [Shard([], []) for _ in range(num_ranks)]
    for rank, those in zip(homes, mine, strict=True):
        owned = (those[:, 0] & _NODE).tolist()
        shards[rank] = Shard(sorted({0}.union(*(tree.path_to(node) for node in owned))), owned)
    return tree, shards
