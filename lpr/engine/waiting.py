"""Requests without a slot, in the order in which they are admitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappush
from typing import Generic, Protocol, TypeVar

MOST_OVERTAKEN = 64
"""A request is admitted before at most this many earlier ones for each step of priority; so none waits for ever."""


class Queued(Protocol):
    """What the queue must know of a request."""

    priority: int


R = TypeVar("R", bound=Queued)
Entry = tuple[int, int, R]
"""Place in the queue, number of the arrival, request."""


class Waiting(Generic[R]):
    """The queue. Requests of a higher priority number come later, but nobody waits for ever."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._entries: list[Entry[R]] = []
        self.num_arrivals = 0
        """Requests that were ever added."""

    def __len__(self) -> int:
        """Number of requests that wait."""
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[R]]:
        """The entries in their order."""
        return iter(sorted(self._entries, key=lambda entry: entry[:2]))

    def resume(self, entries: Sequence[Entry[R]], num_arrivals: int) -> None:
        """Take over another rank's queue."""
        self._entries, self.num_arrivals = list(entries), num_arrivals

    def add(self, request: R) -> None:
        """Let a request wait."""
        self.num_arrivals += 1
        heappush(self._entries, (self.num_arrivals + MOST_OVERTAKEN * request.priority, self.num_arrivals, request))

    def put_back(self, requests: Sequence[R]) -> None:
        """Let requests wait before all that wait already."""
        first = min([0, *(place for place, _, _ in self._entries)]) - len(requests)
        for place, request in enumerate(requests, first):
            heappush(self._entries, (place, 0, request))

    def remove(self, request: R) -> bool:
        """Forget a request; False if it does not wait."""
        left = [entry for entry in self._entries if entry[2] is not request]
        found = len(left) < len(self._entries)
        heapify(left)
        self._entries = left
        return found

    def first(self, is_lost: Callable[[R], bool] | None = None) -> R | None:
        """The request to admit next: the first that is not `is_lost`, which passes few that are; None: nobody waits."""
        if not self._entries:
            return None
        if is_lost is None:
            return self._entries[0][2]
        passed = None
        for _, arrival, request in self:
            if passed is not None and arrival > passed + MOST_OVERTAKEN:
                break
            if not is_lost(request):
                return request
            passed = arrival if passed is None else min(passed, arrival)
        return next(iter(self))[2]
