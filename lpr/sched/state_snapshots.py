"""Snapshots of recurrent states: the prefix cache of models with recurrent layers.

The K/V of a prefix is useless without the recurrent states after it. A rank keeps copies of states at some nodes of its
prefix tree: after the last full page of a prompt and after a whole output. Pure, and replicated like the pages.
"""

from collections.abc import Sequence
from itertools import islice

from lpr.sched.prefix_tree import Node

SNAPSHOTS_PER_SLOT = 4
MOST_COMPARED = 64  # most leaves of a node, the latest ones, that are compared with a new prompt


def border(num_prompt: int, page_size: int) -> int:
    """The number of prompt tokens after which a snapshot is kept: all full pages before the last token."""
    return (num_prompt - 1) // page_size * page_size


class Snapshots:
    """The places of snapshots, and the nodes that have one."""

    def __init__(self, num_slots: int, count: int) -> None:
        """`count` places, numbered after those of `num_slots` slots."""
        self._free = list(range(num_slots + count - 1, num_slots - 1, -1))
        self._held: dict[int, Node] = {}  # by place, the least recently used first
        self._places: dict[Node, int] = {}

    def place(self, node: Node) -> int:
        """The place of a node's snapshot; marks it as most recently used."""
        place = self._places[node]
        self._held[place] = self._held.pop(place)
        return place

    def take(self, node: Node) -> int | None:
        """Allocate a place for a node's snapshot, evicting the least recently used one if all are used.

        None if the node has a snapshot.
        """
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
        """The `nodes` (first pages of `tokens`) up to the last snapshot within `most` tokens.

        If that snapshot is at a leaf with less than a page, also returns the leaf and its length; else None and 0.
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
