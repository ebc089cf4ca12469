"""The token tree: the one structure that a step builds, evaluates and accepts from. Twin: native/tree.h.

Node 0 is the root, the last committed token. Every other node is a guess at the token that follows its
parent. A node's position is the root's position plus its depth, and it attends to the committed tokens and
to its own ancestors: that is the whole mask rule. Two guesses with the same parent and the same token are the
same node, so merging the drafts of several sources removes duplicates for free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum


class Source(IntEnum):
    """The source that proposed a node first."""

    ROOT = 0
    WINDOW = 1
    POOL = 2
    TRIE = 3
    SHARED_TRIE = 4
    RECYCLED = 5
    PREDICTION = 6
    HEAD = 7
    COPY = 8


class TokenTree:
    """Growing arrays `tokens[i]`, `parents[i] < i`, `depths[i]`, `sources[i]`; node 0 is the root."""

    __slots__ = ("children", "depths", "parents", "sources", "tokens")

    def __init__(self, root_token: int) -> None:
        self.tokens: list[int] = [root_token]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.sources: list[int] = [Source.ROOT]
        self.children: list[dict[int, int]] = [{}]  # `children[i]` maps a token to the child of node i that holds it

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, source: int) -> int:
        """Return the child of `parent` that holds `token`; add it if there is none."""
        siblings = self.children[parent]
        node = siblings.get(token)
        if node is None:
            node = siblings[token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.sources.append(source)
            self.children.append({})
        return node

    def find(self, parent: int, token: int) -> int:
        """The child of `parent` that holds `token`; -1 if there is none."""
        return self.children[parent].get(token, -1)

    def add_chain(self, parent: int, tokens: Iterable[int], source: int) -> int:
        """Add `tokens` one below the other under `parent`; return the last node."""
        for token in tokens:
            parent = self.add(parent, token, source)
        return parent

    def truncate(self, count: int) -> None:
        """Keep the first `count` nodes; parents come before their children, so a tree remains."""
        for node in range(count, len(self.tokens)):
            if self.parents[node] < count:
                del self.children[self.parents[node]][self.tokens[node]]
        for rows in (self.tokens, self.parents, self.depths, self.sources, self.children):
            del rows[count:]

    def path_to(self, node: int) -> list[int]:
        """The nodes from the root to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def verify(self) -> None:
        """Check the invariants of a tree; raises AssertionError that names the node."""
        count = len(self.tokens)
        lengths = {len(self.parents), len(self.depths), len(self.sources), len(self.children), count}
        assert lengths == {count} and count >= 1, f"arrays of unequal length: {lengths}"
        assert self.parents[0] == -1 and self.depths[0] == 0, "node 0 is not a root"
        seen = set()
        for node in range(1, count):
            parent = self.parents[node]
            assert 0 <= parent < node, f"node {node}: parent {parent} does not come before it"
            assert self.depths[node] == self.depths[parent] + 1, f"node {node}: depth is not its parent's plus one"
            assert self.tokens[node] >= 0, f"node {node}: token {self.tokens[node]} is negative"
            edge = (parent, self.tokens[node])
            assert edge not in seen, f"node {node}: a second child {edge[1]} of node {parent}"
            seen.add(edge)
            assert self.children[parent].get(self.tokens[node]) == node, f"node {node}: not among its parent's children"
        assert sum(map(len, self.children)) == count - 1, "children that are no nodes"


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """Per node i, a bit mask: bit j is set if node j is i or an ancestor of i (`parents[i] < i`; < 0: none)."""
    bits: list[int] = []
    for node, parent in enumerate(parents):
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << node)
    return bits
