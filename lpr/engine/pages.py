"""The pages of one rank's KV cache: which tokens' K/V lies where, and the prefix cache.

A *page* holds the K/V of `page_size` consecutive tokens in all layers. A running request has a *block table*, its pages
in the order of its tokens, and reads no other. Full pages are shared: requests of one tenant that begin alike hold the
same pages, while they run and afterwards. What no running request holds is the prefix cache; its least recently used
page is taken first when a request needs one (vLLM's automatic prefix caching; the tree is SGLang's RadixAttention,
Zheng et al. 2024, section 3, with pages for edges).

Pure, and replicated: every rank keeps the tables of all ranks, so all know what each of them holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic

from lpr.engine.limits import R
from lpr.engine.state_snapshots import Snapshots, StateCopy, border

MOST_COMPARED = 64
"""Pages behind a common prefix, the latest ones, that are compared token by token with a new prompt."""


@dataclass(frozen=True)
class PageCopy:
    """The first `num_rows` rows of one page of a rank, to be copied to another page before the next step."""

    rank: int
    source: int
    target: int
    num_rows: int


@dataclass(frozen=True)
class PageClear:
    """A page of a rank to be zeroed: its K/V may be NaN, which would reach the page's next request."""

    rank: int
    page: int


PageMove = PageCopy | PageClear | StateCopy


@dataclass(eq=False)
class Node:
    """A page whose tokens are known, behind the page of its parent. A node with fewer tokens than a page is a leaf."""

    page: int
    tokens: tuple[int, ...]
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    num_users: int = 0
    """Running requests that hold it. They hold its ancestors, too."""
    last_used: int = 0

    def knows(self, tokens: tuple[int, ...]) -> bool:
        """True if a page behind this one begins with `tokens`, as far as the latest ones are looked at."""
        latest = islice(reversed(self.children.values()), MOST_COMPARED)
        return tokens in self.children or any(child.tokens[: len(tokens)] == tokens for child in latest)

    @property
    def is_unused(self) -> bool:
        """True if its page can be taken: a leaf of the tree that no running request holds."""
        return not self.num_users and not self.children and self.parent is not None


@dataclass(eq=False)
class Table:
    """The pages of one running request."""

    root: Node
    """Of the tenant's tree."""
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """The nodes of the leading pages, all full; the pages behind them are this request's alone."""
    is_known: bool = False
    """True if the cache has the pages as they are."""
    room: range = range(0)
    """Pages that are kept for it to grow into."""

    @property
    def last(self) -> Node:
        """The last node, or the root."""
        return self.nodes[-1] if self.nodes else self.root


class PagePool:
    """Free pages, and a tree of pages with known tokens per tenant. A page is free, in the tree, or in one table."""

    def __init__(self, num_pages: int, page_size: int, snapshots: Snapshots | None = None) -> None:
        """All of `num_pages` pages are free. With `snapshots`, nodes are of use only as far as there is one."""
        self.snapshots = snapshots
        self.num_pages, self.page_size = num_pages, page_size
        self.num_held = 0
        """Pages that running requests hold."""
        self._used = bytearray(num_pages)
        """Per page: 0 if it is free. Bytes, as runs of them are found quickly."""
        self._num_free = num_pages
        self._kept = bytearray(num_pages)
        """Per page: 1 if it is kept for a table that may grow into it, as long as there are others."""
        self._roots: dict[str, Node] = {}
        self._unused: list[tuple[int, int, Node]] = []
        """A heap of nodes that were unused, by their last use then."""
        self._clock = 0
        self._num_pushed = 0
        self.num_cached_tokens = 0
        """Tokens in the tree."""

    @property
    def num_available(self) -> int:
        """Pages that `take` can still give."""
        return self.num_pages - self.num_held

    @property
    def num_cached_pages(self) -> int:
        """Pages in the tree that no running request holds."""
        return self.num_pages - self.num_held - self._num_free

    @property
    def roots(self) -> list[Node]:
        """The roots of all tenants' trees."""
        return list(self._roots.values())

    def root(self, tenant: str) -> Node:
        """The root of a tenant's tree."""
        return self._roots.setdefault(tenant, Node(-1, (), None))

    def match(self, root: Node, tokens: Sequence[int], most: int) -> tuple[list[Node], Node | None, int]:
        """The nodes of the first `most` of `tokens`, as far as they are known.

        Behind them the node that begins with most of the tokens that follow, and their number; None and 0 if none does.
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
        """Keep `count` neighbouring free pages for a table that will grow, if there are so many; see `take`."""
        both = int.from_bytes(self._used, "big") | int.from_bytes(self._kept, "big")
        start = both.to_bytes(self.num_pages, "big").find(bytes(count)) if count else -1
        room = range(start, start + count) if start >= 0 else range(0)
        self._kept[room.start : room.stop] = b"\1" * len(room)
        return room

    def is_free(self, page: int) -> bool:
        """True if there is such a page and it is free."""
        return page < self.num_pages and not self._used[page]

    def drop_room(self, room: range) -> None:
        """Keep these pages no longer."""
        self._kept[room.start : room.stop] = bytes(len(room))

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages for one table, in runs as long as can be, the first one behind page `after` if that is free.

        Neighbouring pages are read without a copy where attention needs its keys side by side. Raises IndexError if
        `num_available` is less.
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
        """Take these pages, if they are free."""
        for page in pages:
            if not self._used[page]:
                self._used[page] = 1
                self._num_free -= 1
                self.num_held += 1

    def give_back(self, page: int) -> None:
        """A page of one table is free."""
        self._free(page)
        self.num_held -= 1

    def insert(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        """Put a page of one table, which goes on to hold it, into the tree."""
        node = parent.children[tokens] = Node(page, tokens, parent, num_users=1)
        self.num_cached_tokens += len(tokens)
        return node

    def hold(self, node: Node) -> None:
        """One more running request holds a node, whose ancestors it holds already."""
        self.num_held += not node.num_users
        node.num_users += 1

    def release(self, nodes: Sequence[Node]) -> None:
        """A request no longer holds its nodes, which go from the root downwards."""
        self._clock += 1
        for node in reversed(nodes):
            node.num_users -= 1
            self.num_held -= not node.num_users
            node.last_used = self._clock
            self._note(node)

    def drop(self, node: Node) -> None:
        """Free the page of an unused node."""
        parent = node.parent
        assert node.is_unused and parent is not None
        if self.snapshots is not None:
            self.snapshots.drop(node)
        del parent.children[node.tokens]
        node.parent = None
        self.num_cached_tokens -= len(node.tokens)
        self._free(node.page)
        self._note(parent)

    def forget(self) -> None:
        """Free all pages that no running request holds."""
        while self.num_cached_pages:
            self._evict()

    def _note(self, node: Node) -> None:
        if node.is_unused:
            self._num_pushed += 1
            heappush(self._unused, (node.last_used, self._num_pushed, node))
        if len(self._unused) > 2 * self.num_pages:
            self._unused = [each for each in self._unused if each[2].is_unused and each[2].last_used == each[0]]
            heapify(self._unused)

    def _free(self, page: int) -> None:
        self._used[page] = 0
        self._num_free += 1

    def _evict(self) -> None:
        while self._unused:
            last_used, _, node = heappop(self._unused)
            if node.is_unused and node.last_used == last_used:
                self.drop(node)
                return
        raise IndexError("no page is left")


class RankPages(Generic[R]):
    """The block tables of the requests that one rank serves."""

    def __init__(
        self, rank: int, num_slots: int, pool: PagePool, retains: bool = True, num_snapshots: int | None = None
    ) -> None:
        """For up to `num_slots` running requests. With `retains`, requests share pages.

        `num_snapshots` is of a model with recurrent states (lpr.engine.state_snapshots), None for one without.
        """
        self.rank, self.num_slots, self.pool, self.retains = rank, num_slots, pool, retains
        self.running: list[R] = []
        """By slot, which is a request's place in the batch."""
        self._tables: list[Table] = []
        self._num_snapshots = num_snapshots
        self._begin_snapshots()

    def _begin_snapshots(self) -> None:
        if self._num_snapshots is not None:
            self.pool.snapshots = Snapshots(self.num_slots, self._num_snapshots)

    def resume(self, requests: Sequence[R], tables: Sequence[Sequence[int]]) -> None:
        """Begin again with these requests, by slot, and their pages; nothing else is known, until `register`."""
        pool = self.pool = PagePool(self.pool.num_pages, self.pool.page_size)
        self._begin_snapshots()
        self.running, self._tables = list(requests), []
        for pages in tables:
            pool.claim(pages)
        for request, pages in zip(requests, tables, strict=True):
            self._tables.append(Table(pool.root(request.tenant), list(pages)))

    def table(self, request: R) -> Table:
        """The table of a running request."""
        return self._tables[request.slots[self.rank]]

    @property
    def retained(self) -> tuple[int, int]:
        """Number of pages that no running request holds, and of the tokens in the prefix cache."""
        return self.pool.num_cached_pages, self.pool.num_cached_tokens

    def take_changed(self) -> list[tuple[int, list[int]]]:
        """Slots and pages of the tables that have changed since the last call."""
        changed = [(slot, table.pages) for slot, table in enumerate(self._tables) if not table.is_known]
        for slot, _ in changed:
            self._tables[slot].is_known = True
        return changed

    def num_pages(self, num_tokens: int) -> int:
        """Pages that so many tokens fill or begin."""
        return -(-num_tokens // self.pool.page_size)

    def held(self, request: R) -> int:
        """Leading tokens of a request whose K/V is on this rank, in its own pages or in any that it may share."""
        if request.slots[self.rank] >= 0:
            return request.num_computed_tokens[self.rank]
        nodes, _, length = self._match(request)
        return len(nodes) * self.pool.page_size + length

    def has_room(self, request: R, num_ahead: int) -> bool:
        """True if a request can run with `num_ahead` rows for a step's tree, and all that run can go on so far."""
        if len(self.running) >= self.num_slots:
            return False
        shared = sum(1 for node in self._match(request)[0] if node.num_users)
        wanted = self.num_pages(len(request.tokens) + num_ahead) - shared
        return self.pool.num_available - self.num_lacking(num_ahead) >= wanted

    def num_lacking(self, num_ahead: int) -> int:
        """Pages that the running requests still need for their present tokens and `num_ahead` rows each."""
        wanted = [self.num_pages(len(request.tokens) + num_ahead) for request in self.running]
        return sum(max(0, count - len(table.pages)) for count, table in zip(wanted, self._tables, strict=True))

    def enter(self, request: R) -> tuple[int, list[PageMove]]:
        """Give a request the next slot, and the pages that begin as it does.

        Returns the tokens whose K/V they hold, and the copy of what it shares with part of one more page. Before it
        that of the states behind them.
        """
        nodes, partial, length = self._match(request)
        copies: list[PageMove] = []
        if self.pool.snapshots is not None and (nodes or partial is not None):
            unheld = [node for node in nodes if not node.num_users]
            if partial is not None and self.pool.num_available - len(unheld) <= (not partial.num_users):
                nodes, partial, length = [], None, 0  # its snapshot is of no use without the page
            else:
                place = self.pool.snapshots.place(partial or nodes[-1])
                copies.append(StateCopy(self.rank, place, len(self.running)))
        table = Table(self.pool.root(request.tenant))
        request.slots[self.rank] = len(self.running)
        self.running.append(request)
        self._tables.append(table)
        for node in nodes:
            self._share(table, node)
        if partial is not None and self.pool.num_available > (not partial.num_users):
            self.pool.hold(partial)  # so that its page is not taken for the copy
            self._extend(table, 1, table.pages[-1] if table.pages else None)
            copies.append(PageCopy(self.rank, partial.page, table.pages[-1], length))
            self.pool.release([partial])
        else:
            length = 0
        return len(nodes) * self.pool.page_size + length, copies

    def reserve(self, request: R, num_tokens: int) -> bool:
        """Give a request pages for its first `num_tokens` tokens; False, and no page, if there are too few."""
        table = self.table(request)
        missing = self.num_pages(num_tokens) - len(table.pages)
        if missing > self.pool.num_available:
            return False
        if missing <= 0:
            return True
        if not table.room and not (table.pages and self.pool.is_free(table.pages[-1] + 1)):
            longest = num_tokens + request.num_left
            table.room = self.pool.keep_room(self.num_pages(longest) - len(table.pages))
            self._extend(table, missing, table.room.start - 1 if table.room else None)
        else:
            self._extend(table, missing, table.pages[-1])
        return True

    def follow(self, request: R, num_computed: int) -> int:
        """Share pages that others have computed meanwhile; the leading tokens whose K/V a request has then."""
        size, table, tokens = self.pool.page_size, self.table(request), request.tokens
        retains = self.retains and self.pool.snapshots is None
        while retains and num_computed == len(table.nodes) * size and num_computed + size < len(tokens):
            child = table.last.children.get(tuple(tokens[num_computed : num_computed + size]))
            if child is None:
                break
            self._share(table, child)
            num_computed += size
        return num_computed

    def next_page(self, request: R) -> tuple[Node, tuple[int, ...]] | None:
        """The node before the page that a request fills next, and that page's tokens; None within a page."""
        table, size = self.table(request), self.pool.page_size
        start = len(table.nodes) * size
        if not self.retains or self.pool.snapshots is not None or request.num_computed_tokens[self.rank] != start:
            return None
        return table.last, tuple(request.tokens[start : start + size])

    def register(self, request: R, num_computed: int) -> list[StateCopy]:
        """Let others share the pages that a request has filled with `num_computed` tokens.

        Returns the snapshot of its states where its prompt is to have one.
        """
        table, size = self.table(request), self.pool.page_size
        while self.retains and (len(table.nodes) + 1) * size <= num_computed:
            start = len(table.nodes) * size
            tokens = tuple(request.tokens[start : start + size])
            known = table.last.children.get(tokens)
            if known is not None:
                self._share(table, known)  # computed by two at once
            else:
                table.nodes.append(self.pool.insert(table.last, tokens, table.pages[len(table.nodes)]))
        if self.pool.snapshots is None or num_computed != border(request.num_prompt, size):
            return []
        return self._snapshot(request, table.last) if 0 < num_computed == len(table.nodes) * size else []

    def _snapshot(self, request: R, node: Node) -> list[StateCopy]:
        """The copy of a request's states to a snapshot of a node, if the node is to get one."""
        place = self.pool.snapshots.take(node) if self.pool.snapshots is not None else None
        return [StateCopy(self.rank, request.slots[self.rank], place)] if place is not None else []

    def leave(self, request: R, keep: bool = True) -> list[PageMove]:
        """Take the slot from a request; the last request gets it. With `keep`, its tokens and K/V stay known.

        Returns snapshots and moves of states. Without `keep` also the clearing of the pages that were its own: its K/V
        may be NaN.
        """
        moves: list[PageMove] = []
        slot, table, pool = request.slots[self.rank], self.table(request), self.pool
        num_computed = request.num_computed_tokens[self.rank]
        own = table.pages[len(table.nodes) :]
        if keep and self.retains:
            self.register(request, num_computed)
            own = table.pages[len(table.nodes) :]
            tail = tuple(request.tokens[len(table.nodes) * pool.page_size : num_computed])
            children = table.last.children
            if tail and (tail not in children if pool.snapshots is not None else not table.last.knows(tail)):
                table.nodes.append(pool.insert(table.last, tail, own.pop(0)))
            known = sum(len(node.tokens) for node in table.nodes)
            if table.nodes and known == num_computed:
                moves += self._snapshot(request, table.last)
        for page in own:
            pool.give_back(page)
        pool.release(table.nodes)
        pool.drop_room(table.room)
        if not keep:
            for node in reversed(table.nodes):
                if not node.is_unused:
                    break
                own.append(node.page)
                pool.drop(node)
        last, last_table = self.running.pop(), self._tables.pop()
        last_table.is_known = last_table.is_known and last is request
        if last is not request:
            if pool.snapshots is not None:
                moves.append(StateCopy(self.rank, last.slots[self.rank], slot))
            last.slots[self.rank], self.running[slot], self._tables[slot] = slot, last, last_table
        request.slots[self.rank] = -1
        return moves if keep else [*moves, *(PageClear(self.rank, page) for page in own)]

    def forget(self) -> None:
        """Keep no page that no running request holds."""
        self.pool.forget()

    def _match(self, request: R) -> tuple[list[Node], Node | None, int]:
        """As PagePool.match; the root of the request's tree is evaluated in any case."""
        if not self.retains:
            return [], None, 0
        root, tokens, most = self.pool.root(request.tenant), request.tokens, len(request.tokens) - 1
        found = self.pool.match(root, tokens, most)
        if self.pool.snapshots is None:
            return found
        return self.pool.snapshots.longest(root, found[0], tokens, most, self.pool.page_size)

    def _extend(self, table: Table, count: int, after: int | None) -> None:
        table.is_known = False
        table.pages += self.pool.take(count, after)

    def _share(self, table: Table, node: Node) -> None:
        """Let a table hold a node next, in place of a page of its own if it has one there."""
        place = len(table.nodes)
        table.is_known = False
        self.pool.hold(node)
        if place < len(table.pages):
            if table.pages[place] != node.page:
                self.pool.give_back(table.pages[place])
            table.pages[place] = node.page
        else:
            table.pages.append(node.page)
        table.nodes.append(node)


def num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix of two pages."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count
