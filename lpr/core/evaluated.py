"""Recycled candidates by their context, on the accepted path and off it. Twin: native/evaluated.h.

*By token pair.* Rejected nodes are evaluated in contexts that never become text. A node's candidates are useful
wherever its last two tokens recur. (The table of recycled candidates is keyed by the last token alone.)

*Rejected siblings.* A path ends at a node none of whose children the model chose. These children have the position of
the next root, and their descendants the positions after it. So their candidates are the model's guesses at the next
tokens, given the whole text with one wrong token: an iteration of Jacobi decoding (Santilli et al. 2023, arXiv
2305.10427; Fu et al. 2024) with the draft as the guess and no additional node. They help most if the root's token is
new to the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lpr.core import constants
from lpr.core.suffix_index import SuffixIndex
from lpr.core.tree import TokenTree

Ranked = tuple[Sequence[int], Sequence[int]]
"""Candidates of a node, most likely first, and their scores (lpr.core.recycle)."""


class EvaluatedNodes:
    """The candidates of a request's evaluated nodes; only its home ranks keep them."""

    __slots__ = ("_by_place", "_candidates", "_children", "_num_tokens", "_pairs", "_scores", "_siblings")

    def __init__(self) -> None:
        self._by_place: dict[int, Ranked] = {}
        """Candidates after a committed token, by the number of tokens before it."""
        self._pairs: dict[int, tuple[int, int, Ranked]] = {}
        self._children: Sequence[Mapping[int, int]] = []
        self._siblings: list[int] = []
        self._candidates: Sequence[Sequence[int]] = []
        self._scores: Sequence[Sequence[int]] = []
        self._num_tokens = -1  # length of the sequence for which `_siblings` holds

    def keep(
        self,
        tree: TokenTree,
        path: Sequence[int],
        num_tokens: int,
        before: int,
        candidates: Sequence[Sequence[int]],
        scores: Sequence[Sequence[int]],
    ) -> None:
        """Keep the results of a step that accepted `path` in a sequence of `num_tokens` tokens, the root included.

        `before` is the token before the root, -1 for none; `candidates` and `scores` are per node.
        """
        tokens, parents = tree.tokens, tree.parents
        for node, ranked in enumerate(zip(candidates, scores, strict=True)):
            left = tokens[parents[node]] if node else before
            if left >= 0:
                self._pairs[_slot(left, tokens[node])] = (left, tokens[node], ranked)
        for place, node in enumerate(path, num_tokens - 1):
            self._by_place[place] = (candidates[node], scores[node])
        self._children, self._candidates, self._scores = tree.children, candidates, scores
        self._siblings = list(tree.children[path[-1]].values())[: constants.MOST_SIBLINGS]
        self._num_tokens = num_tokens + len(path)

    def nearest(self, trie: SuffixIndex, places: Sequence[int], context: Sequence[int]) -> list[Ranked]:
        """The candidates at those of `places` of the suffix index `trie` whose match with `context` is longest.

        The newest come first. If only the last token matches, the candidates of the last two tokens in any tree.
        """
        tokens, start, reach = trie.tokens, trie.start, min(len(context), constants.MAX_MATCH)
        longest, rows = 0, list[Ranked]()
        for after in places:
            row = self._by_place.get(trie.base + after - 1)
            if row is None:
                continue
            length, most = 1, min(reach, after - start)
            while length < most and tokens[after - 1 - length] == context[-1 - length]:
                length += 1
            if length >= longest:
                if length > longest:
                    longest, rows = length, []
                rows.append(row)
        if longest < 2 <= len(context):
            left, last = context[-2], context[-1]
            found = self._pairs.get(_slot(left, last))
            if found is not None and found[:2] == (left, last):
                return [found[2]]
        return rows

    def of_siblings(self, num_tokens: int, below: Sequence[int]) -> list[Ranked]:
        """The candidates of the rejected siblings' descendants along the tokens `below` the root.

        [] if no step was kept that left the sequence at `num_tokens` tokens.
        """
        nodes, children = self._siblings, self._children
        if num_tokens != self._num_tokens:
            return []
        for token in below:
            nodes = [children[node][token] for node in nodes if token in children[node]]
        return [(self._candidates[node], self._scores[node]) for node in nodes]


def _slot(left: int, last: int) -> int:
    return ((left * 0x9E3779B1 + last) * 0x85EBCA77 & 0xFFFFFFFF) >> (32 - constants.PAIR_BITS)
