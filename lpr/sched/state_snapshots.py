"""Snapshots of recurrent states: what lets a request of a recurrent model share the pages of others.

K/V of a prefix is no use without the states behind it. A rank keeps copies of states at some nodes of its pages' tree:
behind the last full page of a prompt and behind a whole output. Pure, and replicated like the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from lpr.sched.prefix_tree import Node

SNAPSHOTS_PER_SLOT = 4
MOST_COMPARED = 64  # leaves behind a page, the latest ones, that are compared with a new prompt


def border(num_prompt: int, page_size: int) -> int:
    """Tokens of a prompt behind which its states are kept: all full pages before the last token."""
    return (num_prompt - 1) // page_size * page_size


class Snapshots:
    """The places for snapshots, and the nodes that have one."""

    def __init__(self, num_slots: int, count: int) -> None:
        """`count` places behind those of `num_slots` slots."""
        self._free = list(range(num_slots + count - 1, num_slots - 1, -1))
        self._held: dict[int, Node] = {}  # by place; the least recently used one first
        self._places: dict[Node, int] = {}

    def place(self, node: Node) -> int:
        """The place of a node's snapshot, which counts as used now."""
        place = self._places[node]
        self._held[place] = self._held.pop(place)
        return place

    def take(self, node: Node) -> int | None:
        """A place for a new snapshot of a node, if need be the least recently used one; None if the node has one."""
        if node in self._places:
            self.place(node)
            return None
        if not self._free and self._held:
            self.drop(next(iter(self._held.values())))
        if not self._free:
            return None
        place = self._free.pop()
        self._held[place], self._places[node] = node, place
        return place

    def drop(self, node: Node) -> None:
        place = self._places.pop(node, None)
        if place is not None:
            del self._held[place]
            self._free.append(place)

    def longest(
        self, root: Node, nodes: Sequence[Node], tokens: Sequence[int], most: int, page_size: int
    ) -> tuple[list[Node], Node | None, int]:
        """Of `nodes`, which hold the first pages of `tokens`, those up to the last snapshot within `most` tokens.

        Behind them the leaf with less than a page that has the snapshot, and its length; None and 0 if there is none.
        """
        for count in range(len(nodes), -1, -1):
            node, start = nodes[count - 1] if count else root, count * page_size
            leaves = [each for each in islice(reversed(node.children.values()), MOST_COMPARED) if each in self._places]
            for leaf in sorted(leaves, key=lambda each: -len(each.tokens)):
                end = start + len(leaf.tokens)
                if len(leaf.tokens) < page_size and end <= most and leaf.tokens == tuple(tokens[start:end]):
                    return list(nodes[:count]), leaf, len(leaf.tokens)
            if node in self._places:
                return list(nodes[:count]), None, 0
        return [], None, 0
