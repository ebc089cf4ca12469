"""The tree of pages whose tokens are known, and the order in which its pages are taken for others."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

MOST_COMPARED = 64
"""Pages behind a common prefix, the latest ones, that are compared token by token with a new prompt."""
NOWHERE = -1  # the page of a node that is in host memory only


@dataclass(eq=False)
class Node:
    """A page whose tokens are known, behind the page of its parent. A node with fewer tokens than a page is a leaf.

    Behind a node in host memory all nodes are there, too.
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
        """True if a page behind this one begins with `tokens`, as far as the latest ones are looked at."""
        latest = islice(reversed(self.children.values()), MOST_COMPARED)
        return tokens in self.children or any(child.tokens[: len(tokens)] == tokens for child in latest)

    @property
    def is_unused(self) -> bool:
        """True if its page can be taken: no running request holds it, and none is behind it but in host memory."""
        return self.is_resident and not self.num_users and not self.num_resident and self.parent is not None

    @property
    def is_last_in_host(self) -> bool:
        """True if its page of host memory can be taken: nothing is behind it, and it is not about to come back."""
        return not self.is_resident and not self.num_users and not self.children and self.parent is not None


class LeastRecent:
    """A heap of nodes that can be taken, by their last use."""

    def __init__(self, most: int, in_host: bool) -> None:
        """Of up to `most` nodes, in host memory or not."""
        self._entries: list[tuple[int, int, Node]] = []
        self._most, self._in_host, self._num_pushed = most, in_host, 0

    def push(self, node: Node) -> None:
        """Add a node that can be taken."""
        self._num_pushed += 1
        heappush(self._entries, (node.last_used, self._num_pushed, node))
        if len(self._entries) > 2 * self._most:
            self._entries = [each for each in self._entries if self._is_valid(each)]
            heapify(self._entries)

    def pop(self) -> Node | None:
        """The least recently used node that can be taken, None if there is none."""
        while self._entries:
            entry = heappop(self._entries)
            if self._is_valid(entry):
                return entry[2]
        return None

    def _is_valid(self, entry: tuple[int, int, Node]) -> bool:
        last_used, _, node = entry
        return (node.is_last_in_host if self._in_host else node.is_unused) and node.last_used == last_used
