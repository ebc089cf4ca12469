"""The scheduler: which requests run, on which ranks, in which slots, and what each does in the next step.

Pure: no tensor, no clock, no world. Every rank runs it on the same replicated facts and comes to the same schedule.
There is no prefill and no decode phase: a request has a pending chain, tokens whose K/V some rank lacks, and as long as
that is longer than a tree it is filled piece by piece; otherwise the request decodes.

A request runs on its *home ranks* (lpr.engine.homes): they hold its K/V and evaluate its trees. A rank that is to
become one fills its pending chain beside its other work, and is one as soon as what it lacks is cheap. Each rank has
slots of its own (lpr.engine.slots).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Generic, Protocol, TypeVar

from lpr.engine.chains import Limits, fill, in_turn, rooms
from lpr.engine.homes import Candidate, choose
from lpr.engine.slots import Holder, RankSlots, SlotMove
from lpr.engine.targets import Targets
from lpr.engine.waiting import Entry, Waiting

REVIEW_EVERY = 16
"""Steps between two looks at whether wide requests are still worth their ranks."""
PATIENCE = 2
"""Steps after a request's end before its ranks go to others: the client's next request may be on its way."""


class Schedulable(Holder, Protocol):
    """What the scheduler must know of a request."""

    priority: int
    arrived: float
    """When it arrived, in seconds; orders the queue (lpr.engine.waiting)."""
    homes: list[int]
    """The ranks that serve it, ascending; written by the scheduler."""
    num_computed_tokens: list[int]
    """Per rank: leading tokens whose K/V it holds in the request's slot; the scheduler writes it for ranks that come or
    go. Asked of running requests only."""

    @property
    def num_pending(self) -> int:
        """Tokens that some home rank lacks the K/V of, the root included; asked of running requests only."""
        ...

    arrived_ms: float
    """When it came, on the clock of the targets; written by the scheduler."""

    @property
    def num_left(self) -> int:
        """Most tokens that it may still emit."""
        ...


R = TypeVar("R", bound=Schedulable)


@dataclass(frozen=True)
class Admission(Generic[R]):
    """A request that begins to run."""

    request: R
    num_computed_tokens: list[int]
    """Per rank: leading tokens whose K/V the request's slot holds already."""


@dataclass(frozen=True)
class Schedule(Generic[R]):
    """What the running requests do in one step."""

    decoding: list[R]
    """They draft, evaluate and accept a tree; in the order of their slots where all ranks serve them."""
    filling: list[tuple[R, list[int]]]
    """They compute the K/V of so many tokens of their pending chain, per rank; some of them decode on other ranks."""

    @property
    def is_empty(self) -> bool:
        """Is there nothing to do?"""
        return not self.decoding and not self.filling


@dataclass
class Scheduler(Generic[R]):
    """Waiting and running requests, and the slots of all ranks."""

    num_slots: int
    """Of each rank."""
    num_ranks: int
    prefill_chunk: int
    """Most tokens that a rank spends in a step on pending chains longer than a tree."""
    longest_chain: int
    """A pending chain of up to so many tokens above the root is evaluated together with a tree."""
    packed: bool
    """Are unequal rows evaluated without padding? Else a chunk is filled by itself, in turn with decoding steps."""
    retains: bool = True
    """Do slots keep the prefixes of finished requests?"""
    most_homes: int = 0
    """Most home ranks of a request; 0: always all ranks."""
    join_chunk: int | None = None
    """Most tokens that a rank spends in a step on a request that others decode; default: `prefill_chunk`."""
    speedup: Callable[[R, int], float] | None = None
    """By what factor a further rank speeds a request up that has so many; None: no rank is ever too many."""
    targets: Targets[R] | None = None
    """What is promised; None: nothing."""
    running: list[R] = field(default_factory=list)
    num_queries: int = 0
    """Prompt tokens of admitted requests."""
    num_hits: int = 0
    """Those of them that were reused."""
    signature: int = 0
    """Of every change of a home, a slot or what they hold, since the ranks began to work together."""
    _wanted: list[list[int]] = field(default_factory=list)
    """The home ranks that each running request should have, ascending."""
    _waiting: Waiting[R] = field(default_factory=Waiting)
    _filled_last: bool = False
    _slots: list[RankSlots[R]] = field(default_factory=list)
    _until_review: int = 0
    _is_settled: bool = True
    """Is every rank that should be a home rank one, and no other?"""
    _moves: list[SlotMove] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with empty slots."""
        self._slots = self._empty_slots()

    def _empty_slots(self) -> list[RankSlots[R]]:
        return [RankSlots(rank, self.num_slots, self.retains) for rank in range(self.num_ranks)]

    def take_moves(self) -> list[SlotMove]:
        """What to do to K/V before the next step, in this order, since the last call."""
        moves, self._moves = self._moves, []
        return moves

    @property
    def is_elastic(self) -> bool:
        """May a request have fewer ranks than there are?"""
        return self.num_ranks > 1 and self.most_homes > 0

    @property
    def capacity(self) -> int:
        """Most requests that can run at once."""
        return self.num_slots * (self.num_ranks if self.is_elastic else 1)

    @property
    def is_idle(self) -> bool:
        """Is no request waiting or running?"""
        return not self._waiting and not self.running

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def requests(self) -> list[R]:
        """All requests, the running ones first."""
        return [*self.running, *(request for _, _, request in self.waiting)]

    @property
    def waiting(self) -> list[Entry[R]]:
        """The requests without a slot in their order, each with its place in it and the number of its arrival."""
        return list(self._waiting)

    @property
    def retained(self) -> tuple[int, int]:
        """How many slots retain a prefix, and how many tokens they retain together; slots as `capacity` counts them."""
        found = [slots.retained for slots in (self._slots if self.is_elastic else self._slots[:1])]
        return sum(count for count, _ in found), sum(tokens for _, tokens in found)

    def resume(self, running: Sequence[R], waiting: Sequence[Entry[R]], num_arrivals: int) -> None:
        """Take over the requests of another rank's scheduler, in its order; homes and slots are theirs already."""
        self.running = list(running)
        self._waiting.resume(waiting, num_arrivals)
        self._wanted = [list(request.homes) for request in running]
        for rank, slots in enumerate(self._slots):
            here = [request for request in running if request.slots[rank] >= 0]
            slots.running = sorted(here, key=lambda request: request.slots[rank])
        self._until_review = 0

    @property
    def num_arrivals(self) -> int:
        """Requests that were ever added."""
        return self._waiting.num_arrivals

    def add(self, request: R) -> None:
        """Let a request wait for a slot."""
        request.arrived_ms = self.targets.now if self.targets is not None else 0.0
        self._waiting.add(request)

    def withdraw(self, request: R) -> bool:
        """Forget a request that waits; False if it does not."""
        return self._waiting.remove(request)

    def admit(self) -> Admission[R] | None:
        """Give slots to the next waiting request, on the ranks that are to serve it; None if no rank has room for it.

        Requests of several ranks make room for it first. With targets it also waits while others would miss theirs.
        """
        request = self._waiting.first(self.targets.is_lost if self.targets is not None else None)
        if request is None or len(self.running) >= self.capacity:
            return None
        request.slots, request.homes = [-1] * self.num_ranks, []
        *wanted, own = self._choose([*self.running, request])
        if not self._is_allowed(request, own, wanted):
            return None
        self._want(wanted)
        self._leave()
        own = [rank for rank in own if self._slots[rank].has_room]
        if not own:
            return None
        self._waiting.remove(request)
        computed = [0] * self.num_ranks
        for rank in own:
            computed[rank] = self._enter(request, rank)
        lacking = {rank: len(request.tokens) - 1 - computed[rank] for rank in own}
        limit = max(min(lacking.values()), self._cheap)
        request.homes = [rank for rank in own if lacking[rank] <= limit]  # the others join when they lack less
        self.running.append(request)
        self._want([*wanted, own])
        self._sign(*request.homes, -1, *computed)
        self.num_queries += len(request.tokens)
        self.num_hits += min(computed[rank] for rank in request.homes)
        return Admission(request, computed)

    def _is_allowed(self, request: R, own: Sequence[int], wanted: Sequence[Sequence[int]]) -> bool:
        """Do a request and those that have its ranks keep their time per token?"""
        if self.targets is None:
            return True
        beside = [each for each, ranks in zip(self.running, wanted, strict=True) if not set(ranks).isdisjoint(own)]
        batch = 1 + max(sum(rank in ranks for ranks in wanted) for rank in own)
        return self.targets.allow([request, *beside], batch, len(own))

    def schedule(self) -> Schedule[R]:
        """What the running requests do in the next step.

        Chains longer than a tree share `prefill_chunk` tokens of a rank's step, so that the other requests never wait
        for a whole prompt. The last piece of a chain is evaluated together with the first tree, where rows are not
        padded.
        """
        if self.num_ranks > 1 and self.running:  # idle ranks look for work more or less often
            self._update_homes()
        room = rooms(self.running, self._limits, self.targets)
        decoding: list[R] = []
        filling: list[tuple[R, list[int]]] = []
        for request, wanted in zip(self.running, self._wanted, strict=True):
            counts, most = [0] * self.num_ranks, self.prefill_chunk
            if request.num_pending - 1 <= self.longest_chain or self._fill_up(request, counts, room):
                decoding.append(request)
                counts, most = [0] * self.num_ranks, self._join_chunk
            if len(request.homes) < len(wanted):
                fill(request, [rank for rank in wanted if rank not in request.homes], counts, room, most)
            if any(counts):
                filling.append((request, counts))
        if filling and not self.packed:
            fills_first = not self._filled_last
            schedule, self._filled_last = in_turn(decoding, filling, fills_first)
            return Schedule(*schedule)
        self._filled_last = bool(filling)
        return Schedule(decoding, filling)

    def _fill_up(self, request: R, counts: list[int], room: list[int]) -> bool:
        """Take room for the pending chain on the home ranks; does it end with this piece, and may a tree follow it?"""
        together = self.packed or all(len(self._slots[rank].running) == 1 for rank in request.homes)
        return fill(request, request.homes, counts, room, self.prefill_chunk) == 0 and together

    @property
    def _limits(self) -> Limits:
        return Limits(self.num_ranks, self.longest_chain, self._join_chunk, self.prefill_chunk, self.is_elastic)

    def finish(self, request: R, keep: bool = True) -> None:
        """Take its slots from a running request; the last running one takes its place.

        With `keep`, the request's tokens and K/V are retained behind the running ones.
        """
        self._give_back(request, keep)
        index, last, wanted = self.running.index(request), self.running.pop(), self._wanted.pop()
        if last is not request:
            self.running[index], self._wanted[index] = last, wanted
        self._until_review = PATIENCE

    def regroup(self, kept: Sequence[int | None]) -> list[R]:
        """Go on with other ranks: `kept` says of each which one it was before, None for one without any K/V.

        Returns the requests whose home ranks are all lost, which wait again. What is left follows from the requests
        alone, however often a rank has scheduled a step that was then dropped.
        """
        self.num_ranks = len(kept)
        self._filled_last, self._until_review, self.signature = False, 0, 0
        before, self._slots = self._slots, self._empty_slots()
        for rank, old in enumerate(kept):
            if old is not None:
                self._slots[rank] = before[old]
                before[old].rank = rank
        if None in kept:  # a newcomer cannot know what the others retain
            self.forget()
        for request in self.running:
            request.slots = [-1 if old is None else request.slots[old] for old in kept]
            request.num_computed_tokens = regrouped(request.num_computed_tokens, kept)
            request.homes = [rank for rank, old in enumerate(kept) if old in request.homes]
        lost = [request for request in self.running if not request.homes]
        self.running = [request for request in self.running if request.homes]
        self._want([list(request.homes) for request in self.running])
        for request in lost:
            self._give_back(request, True)
        self._waiting.put_back(lost)
        return lost

    def _give_back(self, request: R, keep: bool) -> None:
        for rank, slots in enumerate(self._slots):
            if request.slots[rank] >= 0:
                self._moves += slots.leave(request, keep)

    def forget(self) -> None:
        """Retain nothing any more."""
        for slots in self._slots:
            slots.forget()

    # Home ranks.

    @property
    def _join_chunk(self) -> int:
        return self.prefill_chunk if self.join_chunk is None else min(self.join_chunk, self.prefill_chunk)

    @property
    def _cheap(self) -> int:
        """A rank that lacks no more tokens than this can as well evaluate them together with a tree."""
        return min(self.longest_chain, self._join_chunk)

    def _choose(self, requests: Sequence[R]) -> list[list[int]]:
        if not self.is_elastic:
            return [list(range(self.num_ranks)) for _ in requests]
        candidates = []
        for request in requests:
            lacking = cache(partial(self._lacking, request))
            factor = (lambda width: math.inf) if self.speedup is None else partial(self.speedup, request)
            late = partial(self._is_late, request) if self.targets is not None else (lambda width: False)
            candidates.append(Candidate(request.homes, lacking, request.num_left, factor, late))
        return choose(candidates, self.num_ranks, self.most_homes)

    def _is_late(self, request: R, width: int) -> bool:
        return self.targets is not None and self.targets.token_ms(request, 1, width) > self.targets.per_token_ms

    def _lacking(self, request: R, rank: int) -> int:
        return len(request.tokens) - 1 - self._slots[rank].held(request)

    def _want(self, wanted: Sequence[list[int]]) -> None:
        self._wanted = list(wanted)
        self._is_settled = False

    def _update_homes(self) -> None:
        """Choose home ranks now and then, and take those on and leave those that differ, as soon as that costs little.

        A rank that is to serve a request enters it in a slot and fills; it is a home rank when it lacks little. A home
        rank that is none of the chosen ones goes when one of them serves.
        """
        self._until_review -= 1
        if self._until_review < 0:
            self._until_review = REVIEW_EVERY
            self._want(self._choose(self.running))
        if self._is_settled:
            return
        self._leave()
        for request, wanted in zip(self.running, self._wanted, strict=True):
            for rank in wanted:
                if request.slots[rank] < 0 and self._slots[rank].has_room:
                    held = self._enter(request, rank)
                    counts = request.num_computed_tokens
                    request.num_computed_tokens = [*counts[:rank], held, *counts[rank + 1 :]]
            lacking = [len(request.tokens) - 1 - held for held in request.num_computed_tokens]
            able = [rank for rank in wanted if request.slots[rank] >= 0 and lacking[rank] <= self._cheap]
            if not set(able) <= set(request.homes):
                request.homes = sorted({*request.homes, *able})
                self._sign(*request.homes)
        self._leave()
        self._is_settled = all(map(_are_equal, self.running, self._wanted))

    def _enter(self, request: R, rank: int) -> int:
        held, moves = self._slots[rank].enter(request)
        self._moves += moves
        self._sign(rank, request.slots[rank], held)
        return held

    def _leave(self) -> None:
        """Let ranks go that requests have and should not have."""
        for request, wanted in zip(self.running, self._wanted, strict=True):
            is_served = not set(wanted).isdisjoint(request.homes)
            for rank in range(self.num_ranks):
                if request.slots[rank] < 0 or rank in wanted or (rank in request.homes and not is_served):
                    continue
                self._moves += self._slots[rank].leave(request)
                counts = request.num_computed_tokens
                request.num_computed_tokens = [*counts[:rank], 0, *counts[rank + 1 :]]
                request.homes = [home for home in request.homes if home != rank]
                self._sign(rank, *request.homes)

    def _sign(self, *words: int) -> None:
        data = array("q", [*words, len(words)]).tobytes() + self.signature.to_bytes(8, "little")
        self.signature = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _are_equal(request: Schedulable, wanted: Sequence[int]) -> bool:
    return request.homes == wanted


def regrouped(counts: Sequence[int], kept: Sequence[int | None]) -> list[int]:
    """Counts per rank after a change of ranks, see `Scheduler.regroup`."""
    return [0 if before is None else counts[before] for before in kept]
