"""The prefix tree: pages whose tokens are known, and the order of their eviction."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

MOST_COMPARED = 64
"""Most children of a node, the latest ones, that are compared token by token with a new prompt."""
NOWHERE = -1  # the page of a node that is in host memory only


@dataclass(eq=False)
class Node:
    """A page whose tokens are known and follow those of its parent. A node with fewer tokens than a page is a leaf.

    The descendants of a node in host memory are all in host memory.
    """

    page: int  # NOWHERE if it is in host memory
    tokens: tuple[int, ...]
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    num_users: int = 0  # Running requests that hold it. They hold its ancestors, too.
    last_used: int = 0
    host_page: int = NOWHERE
    num_resident: int = 0  # children that are not in host memory

    @property
    def is_resident(self) -> bool:
        """True unless it is in host memory."""
        return self.page != NOWHERE

    def knows(self, tokens: tuple[int, ...]) -> bool:
        """True if one of the MOST_COMPARED latest children begins with `tokens`."""
        latest = islice(reversed(self.children.values()), MOST_COMPARED)
        return tokens in self.children or any(child.tokens[: len(tokens)] == tokens for child in latest)

    @property
    def is_unused(self) -> bool:
        """True if its page can be evicted: no running request holds it, and no child is on the device."""
        return self.is_resident and not self.num_users and not self.num_resident and self.parent is not None

    @property
    def is_last_in_host(self) -> bool:
        """True if its page of host memory can be evicted: it has no child, and is not about to be swapped in."""
        return not self.is_resident and not self.num_users and not self.children and self.parent is not None


class LeastRecent:
    """A heap of evictable nodes, ordered by their last use."""

    def __init__(self, most: int, in_host: bool) -> None:
        """A heap of up to `most` nodes in host memory or on the device."""
        self._entries: list[tuple[int, int, Node]] = []
        self._most, self._in_host, self._num_pushed = most, in_host, 0

    def push(self, node: Node) -> None:
        """Add an evictable node."""
        self._num_pushed += 1
        heappush(self._entries, (node.last_used, self._num_pushed, node))
        if len(self._entries) > 2 * self._most:
            self._entries = [each for each in self._entries if self._is_valid(each)]
            heapify(self._entries)

    def pop(self) -> Node | None:
        """Remove and return the least recently used evictable node; None if there is none."""
        while self._entries:
            entry = heappop(self._entries)
            if self._is_valid(entry):
                return entry[2]
        return None

    def _is_valid(self, entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        return (node.is_last_in_host if self._in_host else node.is_unused) and node.last_used == last_used
