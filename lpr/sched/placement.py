"""Placement: which ranks hold which running request, in which pages.

A request runs on its *home ranks* (lpr.sched.homes): they hold its K/V and evaluate its trees. A rank that joins gives
the request a slot and computes its pending chain beside other work; it becomes a home rank when the rest is cheap.
Each rank has its own pages (lpr.sched.block_tables). Pure, and replicated on every rank.
"""

import hashlib
from array import array
from collections.abc import Sequence
from functools import cache, partial
from typing import Generic

from lpr.sched.block_tables import GROWTH, RankPages
from lpr.sched.homes import Candidate, choose, rank_beside, stay
from lpr.sched.limits import Limits, R, Schedulable
from lpr.sched.page_moves import PageMove
from lpr.sched.page_pool import PagePool
from lpr.sched.prefix_tree import Node

REVIEW_EVERY = 16  # steps between two reviews of the number of home ranks
PATIENCE = 2  # steps before a finished request's ranks join others: the client's next request may be on its way


class Placement(Generic[R]):
    """The running requests, their home ranks, and the pages of all ranks."""

    def __init__(self, limits: Limits[R]) -> None:
        self.limits = limits
        self.running: list[R] = []
        self.wanted: list[list[int]] = []  # wanted home ranks of each running request, ascending
        self.digest = 0  # of every change of a home rank, a slot or its content in this epoch
        self._pages = self._empty()
        self._num_admitted = 0
        self._until_review = 0
        self._is_final = True  # True if the home ranks of all requests are the wanted ones
        self._has_changed = False  # True if a running request has come to or left a rank

    def _empty(self) -> list[RankPages[R]]:
        limits = self.limits
        sizes = limits.num_pages, limits.page_size, limits.num_host_pages
        return [
            RankPages(rank, limits.num_slots, PagePool(*sizes), limits.retains, limits.num_snapshots)
            for rank in range(limits.num_ranks)
        ]

    @property
    def retained(self) -> tuple[int, int]:
        """Number of pages that no running request holds, and of the tokens in the prefix cache."""
        found = [pages.retained for pages in self._counted]
        return sum(count for count, _ in found), sum(tokens for _, tokens in found)

    @property
    def usage(self) -> float:
        """Share of the pages that running requests hold, from 0 to 1."""
        held = [pages.pool.num_held / pages.pool.num_pages for pages in self._counted]
        return sum(held) / len(held)

    @property
    def _counted(self) -> list[RankPages[R]]:
        """The ranks whose pages are counted: all if requests may differ in home ranks, else one (all hold the same)."""
        serving = [self._pages[rank] for rank in self.limits.serving]
        return serving if self.limits.is_elastic else serving[:1]

    @property
    def swapped(self) -> tuple[int, int, int]:
        """Numbers of pages in host memory now, swapped out so far, and swapped in so far."""
        pools = [pages.pool for pages in self._counted]
        counts = [(pool.num_swapped_pages, pool.num_out, pool.num_in) for pool in pools]
        now, out, back = map(sum, zip(*counts, strict=True))
        return now, out, back

    def take_moves(self) -> list[list[PageMove]]:
        """Per rank, the operations on pages and states since the last call, in order."""
        taken = [pages.pool.moves for pages in self._pages]
        for pages in self._pages:
            pages.pool.moves = []
        return taken

    def take_tables(self, rank: int) -> list[tuple[int, list[int], int]]:
        """The changes of a rank's tables since the last call (RankPages.take_changed)."""
        return self._pages[rank].take_changed()

    def tables(self, request: R) -> list[list[int]]:
        """Per rank, the pages of a running request."""
        held = zip(self._pages, request.slots, strict=True)
        return [pages.table(request).pages if slot >= 0 else [] for pages, slot in held]

    def is_alone(self, request: R) -> bool:
        """True if no home rank of a request serves another one."""
        return all(len(self._pages[rank].running) == 1 for rank in request.homes)

    def plan(self, request: R) -> tuple[list[int], list[list[int]]]:
        """The home ranks for a request to admit, and the wanted home ranks of the running requests after that."""
        request.slots, request.homes = [-1] * self.limits.num_ranks, []
        serving = self.limits.serving
        if self._is_lone() and (rank := rank_beside(self._loads(), self._candidate(request, serving))) is not None:
            return [serving[rank]], self.wanted
        *wanted, own = self._choose([*self.running, request])
        return own, wanted

    def num_lacking(self, request: R) -> int:
        """Uncomputed tokens of a waiting request on the rank with its longest known prefix."""
        return len(request.tokens) - max(pages.known(request) for pages in self._pages)

    def admit(self, request: R, own: Sequence[int], wanted: Sequence[list[int]]) -> list[int] | None:
        """Give a request slots and pages on its planned ranks `own`, after requests that should not be there have left.

        Returns the leading tokens whose K/V each rank holds in its pages; None if no rank has room.
        """
        if is_new := wanted is not self.wanted:
            self._want(wanted)
            self.leave()
        own = [rank for rank in own if self._pages[rank].has_room(request, self.limits.num_ahead)]
        if not own or (len(own) < self.limits.num_serving and not self.limits.is_elastic):
            return None
        computed = [0] * self.limits.num_ranks
        for rank in own:
            computed[rank] = self._enter(request, rank)
        request.homes = list(own)
        if self.limits.is_elastic:
            lacking = {rank: len(request.tokens) - 1 - computed[rank] for rank in own}
            limit = max(min(lacking.values()), self.limits.cheap)
            request.homes = [rank for rank in own if lacking[rank] <= limit]  # the other ranks join when they lack less
        self.running.append(request)
        self._num_admitted += 1
        request.admission = self._num_admitted
        self.wanted.append(own)
        self._is_final = self._is_final and request.homes == own
        if is_new:
            self._settle()
        self._sign(*request.homes, -1, *computed)
        return computed

    def remove(self, request: R, keep: bool) -> None:
        """Take slots and pages from a running request; the last running one takes its place in the list.

        With `keep`, its pages stay in the prefix cache.
        """
        self._give_back(request, keep)
        index, last, wanted = self.running.index(request), self.running.pop(), self.wanted.pop()
        if last is not request:
            self.running[index], self.wanted[index] = last, wanted
        self._until_review = PATIENCE

    def resume(self, running: Sequence[R], tables: Sequence[Sequence[list[int]]]) -> None:
        """Take over the running requests of another rank, in its order, and their pages per rank.

        Their home ranks and slots are already set.
        """
        self.running = list(running)
        self.wanted = [list(request.homes) for request in running]
        self._num_admitted = max([request.admission for request in running], default=0)
        self._resume_pages(tables)
        self._until_review = 0

    def _resume_pages(self, tables: Sequence[Sequence[list[int]]]) -> None:
        for rank, pages in enumerate(self._pages):
            here = [index for index, request in enumerate(self.running) if request.slots[rank] >= 0]
            here.sort(key=lambda index: self.running[index].slots[rank])
            pages.resume([self.running[index] for index in here], [tables[index][rank] for index in here])

    def regroup(self, kept: Sequence[int | None]) -> list[R]:
        """Change to other ranks: `kept` has each one's former number, None for a newcomer without K/V.

        Returns the requests whose home ranks are all lost; they have left their slots. The result depends only on the
        requests, also if a rank had scheduled a step that was then dropped.
        """
        self.limits.num_ranks = len(kept)
        self._until_review = self.digest = 0
        before, self._pages = self._pages, self._empty()
        for rank, old in enumerate(kept):
            if old is not None:
                self._pages[rank] = before[old]
                before[old].rank = rank
        for request in self.running:
            request.slots = [-1 if old is None else request.slots[old] for old in kept]
            request.num_computed_tokens = regrouped(request.num_computed_tokens, kept)
            request.homes = [rank for rank, old in enumerate(kept) if old in request.homes]
            if request.homes and not self.limits.most_homes:  # trees are not sent, so all ranks draft them
                request.homes = self.limits.serving
        lost = [request for request in self.running if not request.homes]
        self.running = [request for request in self.running if request.homes]
        self._want([list(request.homes) for request in self.running])
        for request in lost:
            self._give_back(request, True)
        if None in kept:  # a newcomer has only the tables of running requests, so all drop their prefix trees
            self._resume_pages([self.tables(request) for request in self.running])
            for request in self.running:
                for rank in request.homes:
                    if request.slots[rank] < 0:
                        self._pages[rank].enter(request)
            self.register(self.running)
        return lost

    def forget(self) -> None:
        for pages in self._pages:
            pages.forget()

    def take_changed(self) -> bool:
        """True if a request has come to or left a rank since the last call, but for the last admitted ones."""
        changed, self._has_changed = self._has_changed, False
        return changed

    def update(self) -> None:
        """Review the home ranks if it is time, and let ranks join and leave when that is cheap.

        An unwanted home rank leaves when one of the wanted ones serves the request.
        """
        self._until_review -= 1
        if self._until_review < 0:
            self._until_review = REVIEW_EVERY
            if not self._stay():
                self._want(self._choose(self.running))
        if self._is_final:
            return
        self.leave()
        for request, wanted in zip(self.running, self.wanted, strict=True):
            for rank in wanted:
                if request.slots[rank] < 0 and self._pages[rank].has_room(request, self.limits.num_ahead):
                    _count(request, rank, self._enter(request, rank))
                    self._has_changed = True
            lacking = [len(request.tokens) - 1 - held for held in request.num_computed_tokens]
            able = [rank for rank in wanted if request.slots[rank] >= 0 and lacking[rank] <= self.limits.cheap]
            if not set(able) <= set(request.homes):
                request.homes = sorted({*request.homes, *able})
                self._sign(*request.homes)
                self._has_changed = True
        self.leave()
        self._settle()

    def _settle(self) -> None:
        self._is_final = all([each.homes == wanted for each, wanted in zip(self.running, self.wanted, strict=True)])

    def _loads(self) -> list[int]:
        return [len(self._pages[rank].running) for rank in self.limits.serving]

    def _is_lone(self) -> bool:
        """True if each running request is on the one rank that it wants."""
        return self._is_final and self.limits.is_elastic and sum(self._loads()) == len(self.running)

    def _stay(self) -> bool:
        """True if all running requests stay where they are."""
        serving = self.limits.serving
        known = cache(lambda index: self._candidate(self.running[index], serving))
        return self._is_lone() and stay([serving.index(rank) for (rank,) in self.wanted], known, len(serving))

    def _choose(self, requests: Sequence[R]) -> list[list[int]]:
        limits = self.limits
        if not limits.is_elastic:
            return [limits.serving for _ in requests]
        serving = limits.serving
        candidates = [self._candidate(request, serving) for request in requests]
        chosen = choose(candidates, len(serving), limits.most_homes)
        return [[serving[place] for place in each] for each in chosen]

    def _candidate(self, request: R, serving: Sequence[int]) -> Candidate:
        limits, found = self.limits, dict[int, int]()
        candidate = Candidate(
            [serving.index(rank) for rank in request.homes],
            partial(self._lacking, request, serving, found),
            request.num_left,
        )
        if limits.speedup is not None:
            candidate.speedup = partial(limits.speedup, request)
        if limits.targets is not None:
            candidate.is_late = partial(limits.targets.is_late, request)
        return candidate

    def _lacking(self, request: R, serving: Sequence[int], found: dict[int, int], place: int) -> int:
        if place not in found:
            found[place] = len(request.tokens) - 1 - self._pages[serving[place]].held(request)
        return found[place]

    def _want(self, wanted: Sequence[list[int]]) -> None:
        self.wanted = list(wanted)
        self._is_final = False

    def _enter(self, request: R, rank: int) -> int:
        held = self._pages[rank].enter(request)
        self._sign(rank, request.slots[rank], held)
        return held

    def leave(self) -> None:
        """Remove requests from ranks that are not among their wanted home ranks."""
        for request, wanted in zip(self.running, self.wanted, strict=True):
            is_served = not set(wanted).isdisjoint(request.homes)
            for rank in range(self.limits.num_ranks):
                if request.slots[rank] < 0 or rank in wanted or (rank in request.homes and not is_served):
                    continue
                self._leave(request, rank)

    def _leave(self, request: R, rank: int) -> None:
        self._pages[rank].leave(request)
        self._has_changed = True
        _count(request, rank, 0)
        request.homes = [home for home in request.homes if home != rank]
        self._sign(rank, *request.homes)

    def _give_back(self, request: R, keep: bool) -> None:
        for rank, pages in enumerate(self._pages):
            if request.slots[rank] >= 0:
                pages.leave(request, keep)

    # Pages.

    def follow(self, request: R) -> int:
        """Share pages of a request's prompt that others have computed since it was admitted.

        Returns the tokens that no home rank has to compute any more.
        """
        lacked = request.num_pending
        for rank, pages in enumerate(self._pages):
            if request.slots[rank] >= 0:
                before = request.num_computed_tokens[rank]
                now = pages.follow(request, before)
                if now != before:
                    _count(request, rank, now)
                    self._sign(rank, request.slots[rank], now)
        return lacked - request.num_pending

    def next_pages(self, request: R) -> list[tuple[int, Node, tuple[int, ...]]]:
        """Per rank, the page that a request fills next, (rank, parent node, tokens): no other request computes it."""
        found: list[tuple[int, Node, tuple[int, ...]]] = []
        for rank, pages in enumerate(self._pages):
            if request.slots[rank] >= 0 and (key := pages.next_page(request)) is not None:
                found.append((rank, *key))
        return found

    def reserve(self, request: R, length: int, most: int) -> int | None:
        """Give a request pages for `length` rows, or `most` uncomputed ones; returns a rank without room if any."""
        computed = request.num_computed_tokens
        for rank, slot in enumerate(request.slots):
            if slot >= 0 and not self._pages[rank].reserve(request, min(length, computed[rank] + most)):
                return rank
        return None

    def withdraw(self, request: R, rank: int) -> bool:
        """Remove a request from a rank if another one serves it; the rank cannot rejoin before the next review."""
        if not self.limits.is_elastic or set(request.homes) <= {rank}:
            return False
        index, others = self.running.index(request), [home for home in request.homes if home != rank]
        self.wanted[index] = [each for each in self.wanted[index] if each != rank] or others
        self._leave(request, rank)
        return True

    def room(self, request: R) -> int:
        """Number of cache rows of a request's pages on its first home rank."""
        return len(self._pages[request.homes[0]].table(request).pages) * self.limits.page_size

    def register(self, requests: Sequence[R]) -> None:
        """Add the full pages of `requests` to the prefix trees, of their outputs GROWTH at a time."""
        size, ahead = GROWTH * self.limits.page_size, self.limits.num_ahead
        for request in requests:
            computed = request.num_computed_tokens
            for rank, slot in enumerate(request.slots):
                if slot >= 0:
                    num_computed = computed[rank]
                    grown = (num_computed + ahead) // size * size - ahead  # where its table grows, too
                    self._pages[rank].register(request, min(num_computed, max(request.num_prompt, grown)))

    def _sign(self, *words: int) -> None:
        data = array("q", [*words, len(words)]).tobytes() + self.digest.to_bytes(8, "little")
        self.digest = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _count(request: Schedulable, rank: int, num_computed: int) -> None:
    counts = request.num_computed_tokens
    request.num_computed_tokens = [*counts[:rank], num_computed, *counts[rank + 1 :]]


def regrouped(counts: Sequence[int], kept: Sequence[int | None]) -> list[int]:
    """Counts per rank after a change of ranks, see `Placement.regroup`."""
    return [0 if before is None else counts[before] for before in kept]
