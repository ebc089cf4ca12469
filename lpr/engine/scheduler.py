"""The scheduler: which requests run, in which slots, and what each does in the next step.

Pure: no tensor, no clock, no world. Every rank runs it on the same replicated facts and comes to the same schedule.
There is no prefill and no decode phase: a request has a pending chain, tokens whose K/V some rank lacks, and as long as
that is longer than a tree it is filled piece by piece; otherwise the request decodes.

Running requests hold the slots 0, 1, 2, ... without a gap, since a batch of padded rows is one block of neighbouring
slots. The slots behind them are free, or *retain* the tokens and K/V of finished requests (prefix reuse): a new request
begins behind the longest prefix that it shares with any slot, and the least recently used prefix goes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

MOST_OVERTAKEN = 64
"""A request is admitted before at most this many earlier ones for each step of priority; so none waits for ever."""
CONTINUED = 0.5
"""A retained prefix is continued in its own slot if a new prompt shares this part of it; else it is copied."""


class Schedulable(Protocol):
    """What the scheduler must know of a request."""

    tokens: list[int]
    """Prompt and output so far."""
    priority: int
    tenant: str
    """K/V is shared among requests of one tenant only."""
    slot: int
    """Written by the scheduler; meaningless while the request waits."""

    @property
    def num_pending(self) -> int:
        """Tokens that some rank lacks the K/V of, the root included; asked of running requests only."""
        ...

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """Per rank: leading tokens whose K/V it holds; asked of running requests only."""
        ...


R = TypeVar("R", bound=Schedulable)


@dataclass(frozen=True)
class SlotMove:
    """K/V to copy from one slot to another before the next step, or to exchange."""

    source: int
    target: int
    num_rows: tuple[int, ...]
    """Per rank: leading rows that matter."""
    exchange: bool = False


@dataclass(frozen=True)
class Admission(Generic[R]):
    """A request that begins to run."""

    request: R
    num_computed_tokens: tuple[int, ...]
    """Per rank: leading tokens whose K/V the request's slot holds already."""
    moves: list[SlotMove]


@dataclass(frozen=True)
class Schedule(Generic[R]):
    """What the running requests do in one step."""

    decoding: list[R]
    """They draft, evaluate and accept a tree; in the order of their slots."""
    filling: list[tuple[R, int]]
    """They compute the K/V of so many tokens of their pending chain."""

    @property
    def is_empty(self) -> bool:
        """Is there nothing to do?"""
        return not self.decoding and not self.filling


@dataclass
class Prefix:
    """What a slot retains of a finished request."""

    tokens: list[int]
    num_computed_tokens: tuple[int, ...]
    last_used: int
    tenant: str


@dataclass
class Scheduler(Generic[R]):
    """Waiting and running requests, and the slots."""

    num_slots: int
    num_ranks: int
    prefill_chunk: int
    """Most tokens that a step spends on pending chains longer than a tree."""
    longest_chain: int
    """A pending chain of up to so many tokens above the root is evaluated together with a tree."""
    packed: bool
    """Are unequal rows evaluated without padding? Else a chunk is filled by itself, in turn with decoding steps."""
    retains: bool = True
    """Do slots keep the prefixes of finished requests?"""
    running: list[R] = field(default_factory=list)
    """By slot."""
    num_queries: int = 0
    """Prompt tokens of admitted requests."""
    num_hits: int = 0
    """Those of them that were reused."""
    _waiting: list[tuple[int, int, R]] = field(default_factory=list)
    _arrivals: int = 0
    _clock: int = 0
    _retained: dict[int, Prefix] = field(default_factory=dict)
    _filled_last: bool = False

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
    def waiting(self) -> list[tuple[int, int, R]]:
        """The requests without a slot in their order, each with its place in it and the number of its arrival."""
        return sorted(self._waiting, key=lambda entry: entry[:2])

    @property
    def retained(self) -> tuple[int, int]:
        """How many slots retain a prefix, and how many tokens they retain together."""
        return len(self._retained), sum(len(prefix.tokens) for prefix in self._retained.values())

    def resume(self, running: Sequence[R], waiting: Sequence[tuple[int, int, R]], num_arrivals: int) -> None:
        """Take over the requests of another rank's scheduler, in the order of its slots and of its queue."""
        self.running, self._waiting, self._arrivals = list(running), list(waiting), num_arrivals
        for slot, request in enumerate(self.running):
            request.slot = slot

    @property
    def num_arrivals(self) -> int:
        """Requests that were ever added."""
        return self._arrivals

    def add(self, request: R) -> None:
        """Let a request wait for a slot."""
        self._arrivals += 1
        heappush(self._waiting, (self._arrivals + MOST_OVERTAKEN * request.priority, self._arrivals, request))

    def admit(self) -> Admission[R] | None:
        """Give a free slot to the next waiting request; None if there is no slot or no request."""
        if not self._waiting or len(self.running) == self.num_slots:
            return None
        return self._admit(heappop(self._waiting)[2])

    def schedule(self) -> Schedule[R]:
        """What the running requests do in the next step.

        Chains longer than a tree share `prefill_chunk` tokens a step, so that the other requests never wait for a whole
        prompt. The last piece of a chain is evaluated together with the first tree, where rows are not padded.
        """
        together = self.packed or len(self.running) == 1
        room = self.prefill_chunk
        decoding, filling = [], []
        for request in self.running:
            above = request.num_pending - 1
            if above <= self.longest_chain:
                decoding.append(request)
                continue
            count = min(above, room)
            room -= count
            if together and count == above:
                decoding.append(request)
            elif count:
                filling.append((request, count))
        if filling and not together:
            # Padded, all rows would become as long as the chunk: it has a step of its own, every other one.
            self._filled_last = not (self._filled_last and decoding)
            return Schedule([], filling[:1]) if self._filled_last else Schedule(decoding, [])
        self._filled_last = bool(filling)
        return Schedule(decoding, filling)

    def withdraw(self, request: R) -> bool:
        """Forget a request that waits; False if it does not."""
        left = [entry for entry in self._waiting if entry[2] is not request]
        found = len(left) < len(self._waiting)
        heapify(left)
        self._waiting = left
        return found

    def finish(self, request: R, keep: bool = True) -> list[SlotMove]:
        """Take the slot from a running request; the last running one moves into it.

        With `keep`, the request's tokens and K/V are retained behind the running ones.
        """
        last = self.running.pop()
        slot, free = request.slot, len(self.running)
        kept = tuple(min(count, len(request.tokens)) for count in request.num_computed_tokens)
        keep = keep and self.retains and min(kept) > 0
        moves = []
        if last is not request:
            rows = tuple(last.num_computed_tokens)
            moves.append(SlotMove(free, slot, tuple(map(max, rows, kept)) if keep else rows, exchange=keep))
            last.slot = slot
            self.running[slot] = last
        if keep:
            self._retained[free] = Prefix(list(request.tokens), kept, self._tick(), request.tenant)
        return moves

    def regroup(self, kept: Sequence[int | None]) -> None:
        """Go on with other ranks: `kept` says of each which one it was before, None for one without any K/V.

        What is left follows from the requests alone, however often a rank has scheduled a step that was then dropped.
        """
        self.num_ranks = len(kept)
        self._filled_last = False
        for prefix in self._retained.values():
            prefix.num_computed_tokens = tuple(regrouped(prefix.num_computed_tokens, kept))
        # A prefix that some rank lacks is no use to a new request.
        self._retained = {slot: prefix for slot, prefix in self._retained.items() if min(prefix.num_computed_tokens)}

    def forget(self) -> None:
        """Retain nothing any more."""
        self._retained.clear()

    # Prefix reuse.

    def _admit(self, request: R) -> Admission[R]:
        """Find the longest prefix that some slot shares with a request, and bring it to the next free slot."""
        slot = len(self.running)
        source, length = self._longest_prefix(request.tokens[:-1], request.tenant)  # the root is evaluated in any case
        computed = (0,) * self.num_ranks
        if source is not None:
            computed = tuple(min(length, count) for count in self._computed_at(source))
        if source in self._retained and length >= CONTINUED * len(self._retained[source].tokens):
            moves = self._exchange(source, slot)
        else:
            moves = self._copy(source, slot, computed)
        request.slot = slot
        self.running.append(request)
        self.num_queries += len(request.tokens)
        self.num_hits += min(computed)
        return Admission(request, computed, moves)

    def _exchange(self, source: int, slot: int) -> list[SlotMove]:
        """Bring the prefix that slot `source` retains to `slot`, where it will be continued."""
        prefix, other = self._retained.pop(source), self._retained.pop(slot, None)
        if source == slot:
            return []
        rows = prefix.num_computed_tokens
        if other is None:
            return [SlotMove(source, slot, rows)]
        self._retained[source] = other
        return [SlotMove(source, slot, tuple(map(max, rows, other.num_computed_tokens)), exchange=True)]

    def _copy(self, source: int | None, slot: int, computed: tuple[int, ...]) -> list[SlotMove]:
        """Give up the least recently used prefix, so that `slot` is free, and copy the prefix in `source` there."""
        victim = self._least_recently_used(slot, spare=source)
        self._retained.pop(victim, None)
        moves = []
        if slot in self._retained:
            prefix = self._retained[victim] = self._retained.pop(slot)
            moves.append(SlotMove(slot, victim, prefix.num_computed_tokens))
            if source == slot:
                prefix.last_used = self._tick()
        if source is not None and source != slot:  # else its rows are in their place already
            moves.append(SlotMove(source, slot, computed))
            if source in self._retained:
                self._retained[source].last_used = self._tick()
        return moves

    def _longest_prefix(self, tokens: Sequence[int], tenant: str) -> tuple[int | None, int]:
        """The tenant's slot that shares most leading tokens whose K/V all ranks hold, and their number; or None, 0."""
        best, longest = None, 0
        slots = [*self._retained, *range(len(self.running))] if self.retains else []
        for slot in slots:
            holder = self._retained[slot] if slot in self._retained else self.running[slot]
            if holder.tenant != tenant:  # what is reused shows in the time to the first token
                continue
            length = min(num_shared(holder.tokens, tokens), *self._computed_at(slot))
            if length > longest:
                best, longest = slot, length
        return best, longest

    def _computed_at(self, slot: int) -> Sequence[int]:
        """Per rank, the leading tokens of a slot's content whose K/V it holds."""
        if slot in self._retained:
            return self._retained[slot].num_computed_tokens
        return self.running[slot].num_computed_tokens

    def _least_recently_used(self, first: int, spare: int | None) -> int:
        """A free slot from `first` on, an empty one if there is any; `spare` only if there is no other."""
        slots = range(first, self.num_slots)
        empty = next((slot for slot in slots if slot not in self._retained), None)
        if empty is not None:
            return empty
        return min(slots, key=lambda slot: (slot == spare, self._retained[slot].last_used))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def regrouped(counts: Sequence[int], kept: Sequence[int | None]) -> list[int]:
    """Counts per rank after a change of ranks, see `Scheduler.regroup`."""
    return [0 if before is None else counts[before] for before in kept]


def num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    low, high = 0, most - 1  # the prefixes of length low are equal, those of high + 1 are not
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
