"""The pages of one rank's KV cache: free pages, the prefix cache, and pages swapped out to host memory.

A tree per tenant holds the pages whose tokens are known: the prefix cache. When a request needs a page, the least
recently used one is evicted (vLLM's automatic prefix caching; the tree is SGLang's RadixAttention, Zheng et al. 2024,
section 3, with pages for edges). An evicted page is copied to host memory, if there is any, and copied back when a
request of the tenant, preempted or new, begins with its tokens. Host memory evicts the least recently used page, too.
"""

from collections.abc import Sequence
from itertools import islice

from lpr.sched.page_moves import PageCopy, PageIn, PageMove, PageOut
from lpr.sched.prefix_tree import MOST_COMPARED, NOWHERE, LeastRecent, Node
from lpr.sched.state_snapshots import Snapshots

FIRST_ROOTS = 64  # least number of tenants without pages whose roots are kept


class PagePool:
    """Free pages, and a tree of pages with known tokens per tenant. A page is free, in the tree, or in one table."""

    def __init__(self, num_pages: int, page_size: int, num_host_pages: int = 0) -> None:
        """A pool of `num_pages` free pages and `num_host_pages` free pages in host memory."""
        self.num_pages, self.page_size, self.num_host_pages = num_pages, page_size, num_host_pages
        self.num_held = 0  # pages that running requests hold
        self._used = bytearray(num_pages)  # Per page: 0 if it is free. Bytes, because runs of zeros are found quickly.
        self._num_free = num_pages
        self._kept = bytearray(num_pages)
        """Per page: 1 if it is reserved for the growth of a table; used for others only if no other page is free."""
        self._roots: dict[str, Node] = {}
        self._most_roots = FIRST_ROOTS
        """Number of roots above which those without children and users are deleted."""
        self._unused, self._last_in_host = LeastRecent(num_pages, False), LeastRecent(num_host_pages, True)
        self._host_free: list[int] = []
        """Freed pages of host memory; those from `_num_host_begun` on were never used."""
        self._num_host_begun = 0
        self._clock = 0
        self.num_cached_tokens = 0  # tokens in the tree, those in host memory included
        self.num_out = self.num_in = 0  # pages swapped out to host memory, and swapped in
        self.snapshots: Snapshots | None = None
        """State snapshots of a model with recurrent layers: a prefix can be reused only up to a snapshot."""
        self.moves: list[PageMove] = []  # operations to apply before the next step

    @property
    def num_available(self) -> int:
        """Pages that `take` can still give."""
        return self.num_pages - self.num_held

    @property
    def num_cached_pages(self) -> int:
        """Pages in the tree that no running request holds."""
        return self.num_pages - self.num_held - self._num_free

    @property
    def num_swapped_pages(self) -> int:
        return self._num_host_begun - len(self._host_free)

    @property
    def roots(self) -> list[Node]:
        return list(self._roots.values())

    def root(self, tenant: str) -> Node:
        """The root of a tenant's tree; kept while it has children or a table uses it."""
        if tenant not in self._roots:
            if len(self._roots) >= self._most_roots:
                self._roots = {name: root for name, root in self._roots.items() if root.children or root.num_users}
                self._most_roots = max(FIRST_ROOTS, 2 * len(self._roots))
            self._roots[tenant] = Node(-1, (), None)
        return self._roots[tenant]

    def match(self, root: Node, tokens: Sequence[int], most: int) -> tuple[list[Node], Node | None, int]:
        """The nodes of the longest known prefix of the first `most` of `tokens`; trailing nodes may be in host memory.

        Also returns the child that shares most of the following tokens, and their number; None and 0 if none does.
        """
        size, node = self.page_size, root
        found: list[Node] = []
        while (len(found) + 1) * size <= most:
            start = len(found) * size
            child = node.children.get(tuple(tokens[start : start + size]))
            if child is None:
                break
            found.append(child)
            node = child
        start = len(found) * size
        rest = tuple(tokens[start : min(most, start + size)])
        best, longest = None, 0
        for child in islice(reversed(node.children.values()), MOST_COMPARED) if rest else ():
            length = num_equal(child.tokens, rest)
            if length > longest:
                best, longest = child, length
        return found, best, longest

    def keep_room(self, count: int) -> range:
        """Reserve a run of `count` free pages for a table that will grow, if there is one; see `take`."""
        both = int.from_bytes(self._used, "big") | int.from_bytes(self._kept, "big")
        start = both.to_bytes(self.num_pages, "big").find(bytes(count)) if count else -1
        room = range(start, start + count) if start >= 0 else range(0)
        self._kept[room.start : room.stop] = b"\1" * len(room)
        return room

    def is_free(self, page: int) -> bool:
        """True if `page` exists and is free."""
        return page < self.num_pages and not self._used[page]

    def drop_room(self, room: range) -> None:
        self._kept[room.start : room.stop] = bytes(len(room))

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` pages for one table, in runs as long as possible, starting after page `after` if it is free.

        Attention that needs contiguous keys reads a run without a copy. Raises IndexError if `num_available` is less.
        """
        while self._num_free < count:
            self._evict()
        taken: list[int] = []
        run = count
        while len(taken) < count:
            at = self.num_pages if after is None else after + 1
            if at >= self.num_pages or self._used[at]:
                run = min(run, count - len(taken))
                while (at := self._used.find(bytes(run))) < 0:
                    run = (run + 1) // 2
            self._used[at] = 1
            taken.append(at)
            after = at
        self._num_free -= count
        self.num_held += count
        return taken

    def claim(self, pages: Sequence[int]) -> None:
        for page in pages:
            if not self._used[page]:
                self._used[page] = 1
                self._num_free -= 1
                self.num_held += 1

    def give_back(self, page: int) -> None:
        self._free(page)
        self.num_held -= 1

    def insert(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        """Add a page of one table to the tree; the table keeps holding it."""
        node = parent.children[tokens] = Node(page, tokens, parent, num_users=1)
        parent.num_resident += 1
        self.num_cached_tokens += len(tokens)
        return node

    def hold(self, node: Node) -> None:
        """Count one more running request as a user of a node; it uses the ancestors already."""
        self.num_held += not node.num_users
        node.num_users += 1

    def release(self, nodes: Sequence[Node]) -> None:
        """Count one user less of each of `nodes`, which are in order from the root downwards."""
        self._clock += 1
        for node in reversed(nodes):
            node.num_users -= 1
            self.num_held -= not node.num_users
            node.last_used = self._clock
            self._note(node)

    def adopt(self, node: Node, page: int) -> None:
        """Give a node in host memory a page of one table with the same K/V; the table keeps holding it."""
        self._come_back(node, page)
        node.num_users = 1

    def load(self, nodes: Sequence[Node], after: int | None) -> None:
        """Swap nodes in, from the root downwards, starting after page `after` if that is free.

        One running request holds them then. Raises IndexError as `take` does.
        """
        for node in nodes:
            node.num_users = 1  # so that none is evicted while another is loaded
        for node, page in zip(nodes, self.take(len(nodes), after), strict=True):
            self.moves.append(PageIn(node.host_page, page))
            self._come_back(node, page)
        self.num_in += len(nodes)

    def copy(self, node: Node, num_rows: int, after: int | None) -> int | None:
        """Allocate a page for one table and copy the first rows of a node's page to it; None if no page is left."""
        if self.num_available <= (node.is_resident and not node.num_users):
            return None
        if not node.is_resident:
            node.num_users = 1
            [page] = self.take(1, after)
            node.num_users = 0
            self.moves.append(PageIn(node.host_page, page))
            self._note(node)
            self.num_in += 1
            return page
        self.hold(node)  # so that its own page is not evicted for the copy
        [page] = self.take(1, after)
        self.moves.append(PageCopy(node.page, page, num_rows))
        self.release([node])
        return page

    def drop(self, node: Node) -> None:
        """Delete an evictable node and its descendants in host memory."""
        parent = node.parent
        assert parent is not None and (node.is_unused or node.is_last_in_host)
        del parent.children[node.tokens]
        parent.num_resident -= node.is_resident
        dropped = [node]
        for each in dropped:
            dropped += each.children.values()
            each.parent = None
            if self.snapshots is not None:
                self.snapshots.drop(each)
            self.num_cached_tokens -= len(each.tokens)
            if each.is_resident:
                self._free(each.page)
            else:
                self._host_free.append(each.host_page)
        self._note(parent)

    def forget(self) -> None:
        for known in (self._unused, self._last_in_host):
            while (node := known.pop()) is not None:
                self.drop(node)

    def _note(self, node: Node) -> None:
        if node.is_unused:
            self._unused.push(node)
        elif node.is_last_in_host:
            self._last_in_host.push(node)

    def _free(self, page: int) -> None:
        self._used[page] = 0
        self._num_free += 1

    def _come_back(self, node: Node, page: int) -> None:
        assert node.parent is not None
        self._host_free.append(node.host_page)
        node.page, node.host_page = page, NOWHERE
        node.parent.num_resident += 1

    def _take_in_host(self) -> int | None:
        """Allocate a page of host memory; None if there is none."""
        if not self._host_free and self._num_host_begun < self.num_host_pages:
            self._num_host_begun += 1
            return self._num_host_begun - 1
        if not self._host_free and (oldest := self._last_in_host.pop()) is not None:
            self.drop(oldest)
        return self._host_free.pop() if self._host_free else None

    def _evict(self) -> None:
        """Free the page of the least recently used node, which is swapped out if there is host memory."""
        node = self._unused.pop()
        if node is None:
            raise IndexError("no page is left")
        parent = node.parent
        assert parent is not None
        host_page = self._take_in_host()
        if host_page is None:
            self.drop(node)
            return
        node.host_page = host_page
        self.moves.append(PageOut(node.page, node.host_page))
        self.num_out += 1
        self._free(node.page)
        node.page = NOWHERE
        parent.num_resident -= 1
        self._note(node)
        self._note(parent)


def num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two pages."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
