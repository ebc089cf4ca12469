"""The slots of one rank: which request's K/V lies where, and the prefix cache of requests that are gone.

Requests that the rank serves hold its slots 0, 1, 2, ... without a gap, since a batch of padded rows is one block of
neighbouring slots. The slots behind them are free, or *retain* tokens and K/V (prefix reuse): a new request begins
behind the longest prefix that it shares with any slot, and the least recently used prefix is evicted first.

Pure, and replicated: every rank keeps the tables of all ranks, so all know what each of them holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from lpr.engine.limits import R

CONTINUED = 0.5
"""A retained prefix is continued in its own slot if a new prompt shares at least this part of it; else it is copied."""


@dataclass(frozen=True)
class SlotMove:
    """K/V to copy from one slot of a rank to another before the next step, or to exchange."""

    rank: int
    source: int
    target: int
    num_rows: int
    """Leading rows to copy."""
    exchange: bool = False


@dataclass
class Prefix:
    """Tokens and K/V that a slot retains of a request that is gone."""

    tokens: list[int]
    num_computed_tokens: int
    last_used: int
    tenant: str


@dataclass
class RankSlots(Generic[R]):
    """The slots of one rank."""

    rank: int
    num_slots: int
    retains: bool = True
    """True if slots keep the prefixes of requests that are gone."""
    running: list[R] = field(default_factory=list)
    """By slot."""
    _clock: int = 0
    _retained: dict[int, Prefix] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        """True if some slot holds no request."""
        return len(self.running) < self.num_slots

    @property
    def retained(self) -> tuple[int, int]:
        """Number of slots that retain a prefix, and of the tokens in them."""
        return len(self._retained), sum(len(prefix.tokens) for prefix in self._retained.values())

    def held(self, request: R) -> int:
        """Leading tokens of a request whose K/V is on this rank, in its own slot or in any that it may begin from."""
        if request.slots[self.rank] >= 0:
            return request.num_computed_tokens[self.rank]
        return self.longest_prefix(request.tokens[:-1], request.tenant)[1]

    def enter(self, request: R) -> tuple[int, list[SlotMove]]:
        """Give a request the next slot, with the K/V of the longest prefix that any slot shares with it.

        Returns the length of that prefix in tokens, and the moves that bring it there.
        """
        slot = len(self.running)
        source, length = self.longest_prefix(request.tokens[:-1], request.tenant)  # the root is evaluated in any case
        if source in self._retained and length >= CONTINUED * len(self._retained[source].tokens):
            moves = self._exchange(source, slot)
        else:
            moves = self._copy(source, slot, length)
        request.slots[self.rank] = slot
        self.running.append(request)
        return length, moves

    def leave(self, request: R, keep: bool = True) -> list[SlotMove]:
        """Take the slot from a request; the last one moves into it.

        With `keep`, the request's tokens and K/V are retained behind those that stay.
        """
        last = self.running.pop()
        slot, free = request.slots[self.rank], len(self.running)
        kept = min(request.num_computed_tokens[self.rank], len(request.tokens))
        keep = keep and self.retains and kept > 0
        moves = []
        if last is not request:
            rows = last.num_computed_tokens[self.rank]
            moves.append(SlotMove(self.rank, free, slot, max(rows, kept) if keep else rows, exchange=keep))
            last.slots[self.rank] = slot
            self.running[slot] = last
        request.slots[self.rank] = -1
        if keep:
            self._retained[free] = Prefix(list(request.tokens), kept, self._tick(), request.tenant)
        return moves

    def forget(self) -> None:
        """Retain nothing any more."""
        self._retained.clear()

    def _exchange(self, source: int, slot: int) -> list[SlotMove]:
        """Bring the prefix that slot `source` retains to `slot`."""
        prefix, other = self._retained.pop(source), self._retained.pop(slot, None)
        if source == slot:
            return []
        rows = prefix.num_computed_tokens
        if other is None:
            return [SlotMove(self.rank, source, slot, rows)]
        self._retained[source] = other
        return [SlotMove(self.rank, source, slot, max(rows, other.num_computed_tokens), exchange=True)]

    def _copy(self, source: int | None, slot: int, length: int) -> list[SlotMove]:
        """Evict the least recently used prefix, so that `slot` is free, and copy the prefix in `source` there."""
        victim = self._least_recently_used(slot, spare=source)
        self._retained.pop(victim, None)
        moves = []
        if slot in self._retained:
            prefix = self._retained[victim] = self._retained.pop(slot)
            moves.append(SlotMove(self.rank, slot, victim, prefix.num_computed_tokens))
            if source == slot:
                prefix.last_used = self._tick()
        if source is not None and source != slot:  # else its rows are in their place already
            moves.append(SlotMove(self.rank, source, slot, length))
            if source in self._retained:
                self._retained[source].last_used = self._tick()
        return moves

    def longest_prefix(self, tokens: Sequence[int], tenant: str) -> tuple[int | None, int]:
        """The tenant's slot that shares most leading tokens with K/V, and their number; None and 0 if there is none."""
        best, longest = None, 0
        slots = [*self._retained, *range(len(self.running))] if self.retains else []
        for slot in slots:
            holder: Prefix | R = self._retained.get(slot) or self.running[slot]
            if holder.tenant != tenant:  # reuse shows in the time to the first token
                continue
            length = min(num_shared(holder.tokens, tokens), self.computed_at(slot))
            if length > longest:
                best, longest = slot, length
        return best, longest

    def computed_at(self, slot: int) -> int:
        """The leading tokens of a slot's content whose K/V it holds."""
        if slot in self._retained:
            return self._retained[slot].num_computed_tokens
        return self.running[slot].num_computed_tokens[self.rank]

    def _least_recently_used(self, first: int, spare: int | None) -> int:
        """A free slot from `first` on: an empty one if possible, `spare` only if there is no other."""
        slots = range(first, self.num_slots)
        empty = next((slot for slot in slots if slot not in self._retained), None)
        if empty is not None:
            return empty
        return min(slots, key=lambda slot: (slot == spare, self._retained[slot].last_used))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


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
