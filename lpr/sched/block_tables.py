"""The block tables of the requests that one rank serves: which page holds which tokens' K/V.

A *page* holds the K/V of `page_size` consecutive tokens in all layers. A running request has a *block table*, its pages
in the order of its tokens, and reads no other pages. Full pages are shared: requests of one tenant with a common prefix
hold the same pages. Pages with known tokens that no running request holds are the prefix cache (lpr.sched.page_pool).

Pure, and replicated: every rank keeps the tables of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from lpr.sched.limits import R
from lpr.sched.page_moves import PageClear, StateCopy
from lpr.sched.page_pool import PagePool
from lpr.sched.prefix_tree import Node
from lpr.sched.state_snapshots import Snapshots, border

GROWTH = 4
"""Pages that a request takes at once, and by which its known pages grow while it decodes: every rank looks at every
request that grows, also at those of other ranks."""


@dataclass(eq=False)
class Table:
    """The pages of one running request."""

    root: Node  # root of the tenant's prefix tree
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """The nodes of the leading pages, all full; the pages after them belong to this request alone."""
    num_known: int = 0  # leading pages that are unchanged since the last `take_changed`
    room: range = range(0)  # free pages reserved for its growth

    def __post_init__(self) -> None:
        self.root.num_users += 1

    @property
    def last(self) -> Node:
        return self.nodes[-1] if self.nodes else self.root


class RankPages(Generic[R]):
    """The block tables of the requests that one rank serves."""

    def __init__(
        self, rank: int, num_slots: int, pool: PagePool, retains: bool = True, num_snapshots: int | None = None
    ) -> None:
        """Tables for up to `num_slots` running requests, which share pages if `retains`.

        `num_snapshots` is the number of state snapshots of a model with recurrent layers (lpr.sched.state_snapshots),
        None for a model without.
        """
        self.rank, self.num_slots, self.pool, self.retains = rank, num_slots, pool, retains
        self.running: list[R] = []  # by slot, which is a request's place in the batch
        self._tables: list[Table] = []
        self._changed: set[int] = set()
        """Slots whose tables may have changed since the last `take_changed`."""
        self._num_snapshots = num_snapshots
        self._begin_snapshots()

    def _begin_snapshots(self) -> None:
        if self._num_snapshots is not None:
            self.pool.snapshots = Snapshots(self.num_slots, self._num_snapshots)

    def resume(self, requests: Sequence[R], tables: Sequence[Sequence[int]]) -> None:
        """Start over with these requests, by slot, and their pages; the prefix tree is empty."""
        states = [move for move in self.pool.moves if isinstance(move, StateCopy)]  # copies into slots stay
        pool = self.pool = PagePool(self.pool.num_pages, self.pool.page_size, self.pool.num_host_pages)
        pool.moves += states
        self._begin_snapshots()
        self.running, self._tables = list(requests), []
        for pages in tables:
            pool.claim(pages)
        for request, pages in zip(requests, tables, strict=True):
            self._tables.append(Table(pool.root(request.tenant), list(pages)))
        self._changed = set(range(len(requests)))

    def table(self, request: R) -> Table:
        return self._tables[request.slots[self.rank]]

    @property
    def retained(self) -> tuple[int, int]:
        """Number of pages that no running request holds, and of the tokens in the prefix cache."""
        return self.pool.num_cached_pages, self.pool.num_cached_tokens

    def take_changed(self) -> list[tuple[int, list[int], int]]:
        """Slots of the tables that have changed since the last call, their new pages, and the first one's place."""
        if not self._changed:
            return []
        slots, found = sorted(slot for slot in self._changed if slot < len(self._tables)), []
        self._changed.clear()
        for slot in slots:
            table = self._tables[slot]
            if table.num_known < len(table.pages):
                found.append((slot, table.pages[table.num_known :], table.num_known))
                table.num_known = len(table.pages)
        return found

    def num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.page_size)

    def held(self, request: R) -> int:
        """Leading tokens of a request whose K/V is on this rank, in its own pages or in ones that it may share."""
        if request.slots[self.rank] >= 0:
            return request.num_computed_tokens[self.rank]
        return self.known(request)

    def known(self, request: R) -> int:
        """Leading tokens of a waiting request whose K/V is in this rank's prefix cache."""
        nodes, _, length = self._match(request)
        return len(nodes) * self.pool.page_size + length

    def has_room(self, request: R, num_ahead: int) -> bool:
        """True if the pages suffice for the request and all running ones, with `num_ahead` rows each for a tree."""
        if len(self.running) >= self.num_slots:
            return False
        shared = sum(1 for node in self._match(request)[0] if node.num_users)
        wanted = self.num_pages(len(request.tokens) + num_ahead) - shared
        return self.pool.num_available - self.num_lacking(num_ahead) >= wanted

    def num_lacking(self, num_ahead: int) -> int:
        """Pages that the running requests still need for their present tokens and `num_ahead` rows each."""
        wanted = [self.num_pages(len(request.tokens) + num_ahead) for request in self.running]
        return sum(max(0, count - len(table.pages)) for count, table in zip(wanted, self._tables, strict=True))

    def enter(self, request: R) -> int:
        """Give a request the next slot and the pages of its known prefix; returns the prefix's number of tokens."""
        nodes, partial, length = self._match(request)
        if self.pool.snapshots is not None:
            nodes, partial, length = self._begin_states(nodes, partial, length)
        table = Table(self.pool.root(request.tenant))
        self._changed.add(len(self.running))
        request.slots[self.rank] = len(self.running)
        self.running.append(request)
        self._tables.append(table)
        resident = [node for node in nodes if node.is_resident]
        for node in resident:
            self._share(request, node)
        if swapped := nodes[len(resident) :]:
            keeps = partial if self.pool.snapshots is not None else None
            if keeps is not None:
                keeps.num_users += 1
            self.pool.load(swapped, table.pages[-1] if table.pages else None)
            table.pages += [node.page for node in swapped]
            table.nodes += swapped
            if keeps is not None:
                keeps.num_users -= 1
            else:
                _, partial, length = self._match(request)  # `load` may have taken the partial page
        num_held = len(nodes) * self.pool.page_size
        if partial is not None:
            page = self.pool.copy(partial, length, table.pages[-1] if table.pages else None)
            if page is not None:
                table.pages.append(page)
                num_held += length
        return num_held

    def _begin_states(
        self, nodes: list[Node], partial: Node | None, length: int
    ) -> tuple[list[Node], Node | None, int]:
        """Copy to the next slot the states after the prefix that `_match` found, shortened to its last snapshot."""
        assert self.pool.snapshots is not None
        last = partial or (nodes[-1] if nodes else None)
        taken = sum(not node.num_users for node in [*nodes, *([partial] if partial is not None else [])])
        if last is None or self.pool.num_available < taken + (partial is not None):
            return [], None, 0
        self.pool.moves.append(StateCopy(self.pool.snapshots.place(last), len(self.running)))
        return nodes, partial, length

    def reserve(self, request: R, num_tokens: int) -> bool:
        """Give a request pages for its first `num_tokens` tokens; returns False and takes none if too few are free."""
        table = self.table(request)
        missing = self.num_pages(num_tokens) - len(table.pages)
        if missing > self.pool.num_available:
            return False
        if missing <= 0:
            return True
        if self.pool.num_available - missing > 2 * GROWTH * len(self.running):  # there are enough for all
            size = GROWTH * self.pool.page_size
            most = min(-(-num_tokens // size) * size, num_tokens + request.num_left)
            missing = max(missing, self.num_pages(most) - len(table.pages))
        self._changed.add(request.slots[self.rank])
        if not table.room and not (table.pages and self.pool.is_free(table.pages[-1] + 1)):
            longest = num_tokens + request.num_left
            table.room = self.pool.keep_room(self.num_pages(longest) - len(table.pages))
            self._extend(table, missing, table.room.start - 1 if table.room else None)
        else:
            self._extend(table, missing, table.pages[-1])
        return True

    def follow(self, request: R, num_computed: int) -> int:
        """Share pages that other requests have computed since; returns the request's number of computed tokens."""
        size, table, tokens = self.pool.page_size, self.table(request), request.tokens
        shares = self.retains and self.pool.snapshots is None
        while shares and num_computed == len(table.nodes) * size and num_computed + size < len(tokens):
            child = table.last.children.get(tuple(tokens[num_computed : num_computed + size]))
            if child is None or not child.is_resident:
                break
            self._share(request, child)
            num_computed += size
        return num_computed

    def next_page(self, request: R) -> tuple[Node, tuple[int, ...]] | None:
        """The parent node and the tokens of the page that a request fills next; None if it is within a page."""
        table, size = self.table(request), self.pool.page_size
        start = len(table.nodes) * size
        if not self.retains or self.pool.snapshots is not None or request.num_computed_tokens[self.rank] != start:
            return None
        return table.last, tuple(request.tokens[start : start + size])

    def register(self, request: R, num_computed: int) -> None:
        """Add the full pages of a request's `num_computed` tokens to the prefix tree.

        A snapshot of its states is kept at the end of its prompt's last full page.
        """
        table, size = self.table(request), self.pool.page_size
        while self.retains and (len(table.nodes) + 1) * size <= num_computed:
            start = len(table.nodes) * size
            tokens = tuple(request.tokens[start : start + size])
            known = table.last.children.get(tokens)
            if known is not None and known.is_resident:
                self._share(request, known)  # another request computed the same page
            elif known is not None:
                self.pool.adopt(known, table.pages[len(table.nodes)])
                table.nodes.append(known)
            else:
                table.nodes.append(self.pool.insert(table.last, tokens, table.pages[len(table.nodes)]))
        keeps_states = self.pool.snapshots is not None
        if keeps_states and 0 < num_computed == len(table.nodes) * size == border(request.num_prompt, size):
            self._keep_states(request, table.last)

    def _keep_states(self, request: R, node: Node) -> None:
        """Make a snapshot of a request's states at the node whose tokens they follow."""
        place = self.pool.snapshots.take(node) if self.pool.snapshots is not None else None
        if place is not None:
            self.pool.moves.append(StateCopy(request.slots[self.rank], place))

    def leave(self, request: R, keep: bool = True) -> None:
        """Take the slot from a request; the last request moves into it. With `keep`, its pages join the prefix tree.

        Without, its unshared pages are zeroed, because its K/V may be NaN.
        """
        slot, table, pool = request.slots[self.rank], self.table(request), self.pool
        num_computed = request.num_computed_tokens[self.rank]
        own = table.pages[len(table.nodes) :]
        if keep and self.retains:
            self.register(request, num_computed)
            own = table.pages[len(table.nodes) :]
            tail = tuple(request.tokens[len(table.nodes) * pool.page_size : num_computed])
            is_new = not table.last.knows(tail) if pool.snapshots is None else tail not in table.last.children
            if tail and is_new:
                table.nodes.append(pool.insert(table.last, tail, own.pop(0)))
            # If a request ended within an accepted path, its states are ahead of its tokens.
            if pool.snapshots is not None and 0 < num_computed <= len(request.tokens):
                self._keep_states(request, table.last if is_new else table.last.children[tail])
        for page in own:
            pool.give_back(page)
        pool.release(table.nodes)
        pool.drop_room(table.room)
        table.root.num_users -= 1
        if not keep:
            for node in reversed(table.nodes):
                if not node.is_unused:
                    break
                own.append(node.page)
                pool.drop(node)
        last, last_table = self.running.pop(), self._tables.pop()
        if last is not request:
            last_table.num_known = 0
            self._changed.add(slot)
            if pool.snapshots is not None:
                pool.moves.append(StateCopy(last.slots[self.rank], slot))
            last.slots[self.rank], self.running[slot], self._tables[slot] = slot, last, last_table
        request.slots[self.rank] = -1
        if not keep:
            pool.moves += [PageClear(page) for page in own]

    def forget(self) -> None:
        self.pool.forget()

    def _match(self, request: R) -> tuple[list[Node], Node | None, int]:
        """As PagePool.match, without the request's last token, which is always evaluated (the root of its tree)."""
        if not self.retains:
            return [], None, 0
        root, tokens, most = self.pool.root(request.tenant), request.tokens, len(request.tokens) - 1
        found = self.pool.match(root, tokens, most)
        if self.pool.snapshots is None:
            return found
        return self.pool.snapshots.longest(root, found[0], tokens, most, self.pool.page_size)

    def _extend(self, table: Table, count: int, after: int | None) -> None:
        table.pages += self.pool.take(count, after)

    def _share(self, request: R, node: Node) -> None:
        """Append a node to a table's nodes; it replaces the table's own page at that place, if any."""
        table = self.table(request)
        place = len(table.nodes)
        self._changed.add(request.slots[self.rank])
        table.num_known = min(table.num_known, place)
        self.pool.hold(node)
        if place < len(table.pages):
            if table.pages[place] != node.page:
                self.pool.give_back(table.pages[place])
            table.pages[place] = node.page
        else:
            table.pages.append(node.page)
        table.nodes.append(node)
