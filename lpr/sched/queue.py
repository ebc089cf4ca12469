"""The queue of requests without a slot, in the order of admission.

Among several waiting shares (API keys), the one with the least clock comes first (lpr.sched.fair_shares). Within a
share, requests are ordered by arrival time, shifted by priority.
"""

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Generic

from lpr.sched.fair_shares import Shares
from lpr.sched.limits import R

SECONDS_PER_PRIORITY = 10.0  # a request of priority p is ordered as if it had arrived 10 p seconds later
MOST_PRIORITY = 10
"""Priorities are clamped to +-MOST_PRIORITY, so that no request is overtaken after 200 s of waiting."""
MOST_OVERTAKEN = 64  # most later arrivals that may overtake a request that misses its time to first token anyway


Entry = tuple[float, int, R]  # place in the queue, number of the arrival, request


class Waiting(Generic[R]):
    """The queue. Replicated: its order depends only on the requests."""

    def __init__(self) -> None:
        self._entries: list[Entry[R]] = []
        self.shares: Shares[R] = Shares()
        self.num_arrivals = 0  # requests that were ever added

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry[R]]:
        return iter(list(self._entries))

    def resume(self, entries: Sequence[Entry[R]], num_arrivals: int) -> None:
        self._entries, self.num_arrivals = list(entries), num_arrivals

    def add(self, request: R) -> None:
        self.num_arrivals += 1
        if all(other.share != request.share for _, _, other in self._entries):
            self.shares.enter(request)
        priority = max(-MOST_PRIORITY, min(MOST_PRIORITY, request.priority))
        place = request.arrived + SECONDS_PER_PRIORITY * priority
        insort(self._entries, (place, self.num_arrivals, request), key=lambda entry: entry[:2])

    def put_back(self, requests: Sequence[R]) -> None:
        """Put requests, in their order, at the front of the queue."""
        first = min([0, *(arrival for _, arrival, _ in self._entries)]) - len(requests)
        self._entries[:0] = [(-math.inf, number, request) for number, request in enumerate(requests, first)]

    def remove(self, request: R) -> bool:
        """Remove a request; False if it is not queued."""
        before = len(self._entries)
        self._entries = [entry for entry in self._entries if entry[2] is not request]
        return len(self._entries) < before

    def first(self, is_lost: Callable[[R], bool] | None = None) -> R | None:
        """The request to admit next, None if there is none: the first that is not `is_lost`.

        At most MOST_OVERTAKEN later arrivals overtake a lost request. If all are lost, the first one.
        """
        if not self._entries:
            return None
        entries = self._in_order()
        if is_lost is None:
            return entries[0][2]
        passed = math.inf
        for _, arrival, request in entries:
            if arrival > passed + MOST_OVERTAKEN:
                break
            if not is_lost(request):
                return request
            passed = min(passed, arrival)
        return entries[0][2]

    def _in_order(self) -> list[Entry[R]]:
        """The queue in the order of admission. Preempted requests come before all shares."""
        if len({request.share for _, _, request in self._entries}) < 2:
            return self._entries
        seen: Counter[str] = Counter()
        due: list[tuple[float, Entry[R]]] = []
        for entry in self._entries:
            place, _, request = entry
            due.append((-math.inf if place == -math.inf else self.shares.due(request, seen[request.share]), entry))
            seen[request.share] += place > -math.inf
        return [entry for _, entry in sorted(due, key=lambda each: each[0])]
