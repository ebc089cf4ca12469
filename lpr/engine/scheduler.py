"""The scheduler: which requests run, and what each does in the next step.

Pure: no tensor, no clock, no world. Every rank runs it on the same replicated facts, so all get the same schedule.
There is no prefill and no decode phase: a request has a pending chain, tokens whose K/V some rank lacks. While that is
longer than a tree it is filled piece by piece (chunked prefill); otherwise the request decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from lpr.engine.chains import fill, in_turn, rooms
from lpr.engine.limits import Limits
from lpr.engine.placement import Placement
from lpr.engine.schedulable import Schedulable
from lpr.engine.slots import SlotMove
from lpr.engine.waiting import Entry, Waiting

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
        """True if the schedule contains no work."""
        return not self.decoding and not self.filling


class Scheduler(Generic[R]):
    """Waiting and running requests, and the slots of all ranks."""

    def __init__(self, limits: Limits[R]) -> None:
        self.limits = limits
        self.waiting: Waiting[R] = Waiting()
        """Requests without a slot."""
        self.placement = Placement(limits)
        self.num_queries = 0
        """Prompt tokens of admitted requests."""
        self.num_hits = 0
        """Those of them whose K/V was reused."""
        self._filled_last = False

    @property
    def running(self) -> list[R]:
        """Requests that hold slots."""
        return self.placement.running

    @property
    def capacity(self) -> int:
        """Most requests that can run at once."""
        return self.limits.capacity

    @property
    def is_idle(self) -> bool:
        """True if no request waits or runs."""
        return not self.waiting and not self.running

    @property
    def retained(self) -> tuple[int, int]:
        """Number of slots that retain a prefix, and of the tokens in them; slots as `capacity` counts them."""
        return self.placement.retained

    def take_moves(self) -> list[SlotMove]:
        """What to do to K/V before the next step, in this order, since the last call."""
        return self.placement.take_moves()

    def resume(self, running: Sequence[R], waiting: Sequence[Entry[R]], num_arrivals: int) -> None:
        """Take over the requests of another rank's scheduler, in its order; homes and slots are theirs already."""
        self.placement.resume(running)
        self.waiting.resume(waiting, num_arrivals)

    def add(self, request: R) -> None:
        """Let a request wait for a slot."""
        targets = self.limits.targets
        request.arrived_ms = targets.now if targets is not None else 0.0
        self.waiting.add(request)

    def withdraw(self, request: R) -> bool:
        """Forget a request that waits; False if it does not."""
        return self.waiting.remove(request)

    def admit(self) -> Admission[R] | None:
        """Give slots to the next waiting request, on the ranks that are to serve it; None if no rank has room for it.

        Requests of several ranks make room for it first. With targets it also waits while others would miss theirs.
        """
        targets = self.limits.targets
        request = self.waiting.first(targets.is_lost if targets is not None else None)
        if request is None or len(self.running) >= self.capacity:
            return None
        own, wanted = self.placement.plan(request)
        if not self._is_allowed(request, own, wanted):
            return None
        computed = self.placement.admit(request, own, wanted)
        if computed is None:
            return None
        self.waiting.remove(request)
        self.num_queries += len(request.tokens)
        self.num_hits += min(computed[rank] for rank in request.homes)
        return Admission(request, computed)

    def _is_allowed(self, request: R, own: Sequence[int], wanted: Sequence[Sequence[int]]) -> bool:
        """True if a request and those that share its ranks keep their time per token."""
        if self.limits.targets is None:
            return True
        others = [each for each, ranks in zip(self.running, wanted, strict=True) if not set(ranks).isdisjoint(own)]
        batch = 1 + max(sum(rank in ranks for ranks in wanted) for rank in own)
        return self.limits.targets.allow([request, *others], batch, len(own))

    def schedule(self) -> Schedule[R]:
        """What the running requests do in the next step.

        Chains longer than a tree share `prefill_chunk` tokens of a rank's step, so that the other requests never wait
        for a whole prompt. The last piece of a chain is evaluated together with the first tree, where rows are not
        padded.
        """
        limits = self.limits
        if limits.num_ranks > 1 and self.running:  # idle ranks look for work more or less often
            self.placement.update()
        room = rooms(self.running, limits)
        decoding: list[R] = []
        filling: list[tuple[R, list[int]]] = []
        for request, wanted in zip(self.running, self.placement.wanted, strict=True):
            counts, most = [0] * limits.num_ranks, limits.prefill_chunk
            if request.num_pending - 1 <= limits.longest_chain or self._fill_up(request, counts, room):
                decoding.append(request)
                counts, most = [0] * limits.num_ranks, limits.joining
            if len(request.homes) < len(wanted):
                fill(request, [rank for rank in wanted if rank not in request.homes], counts, room, most)
            if any(counts):
                filling.append((request, counts))
        if filling and not limits.packed:
            schedule, self._filled_last = in_turn(decoding, filling, not self._filled_last)
            return Schedule(*schedule)
        self._filled_last = bool(filling)
        return Schedule(decoding, filling)

    def _fill_up(self, request: R, counts: list[int], room: list[int]) -> bool:
        """Take room for the pending chain on the home ranks; True if it ends with this piece and a tree may follow."""
        together = self.limits.packed or self.placement.is_alone(request)
        return fill(request, request.homes, counts, room, self.limits.prefill_chunk) == 0 and together

    def finish(self, request: R, keep: bool = True) -> None:
        """Take its slots from a running request; with `keep`, its tokens and K/V are retained behind the others."""
        self.placement.remove(request, keep)

    def regroup(self, kept: Sequence[int | None]) -> list[R]:
        """Go on with other ranks: for each, `kept` has its former number, None for a newcomer without any K/V.

        Returns the requests whose home ranks are all lost, which wait again.
        """
        self._filled_last = False
        lost = self.placement.regroup(kept)
        self.waiting.put_back(lost)
        return lost

    def pass_step(self, schedule: Schedule[R], num_entries: Sequence[int]) -> None:
        """Move the clock of the targets by a step in which decoding evaluated `num_entries` tokens on each rank."""
        if self.limits.targets is None:
            return
        loads = list(num_entries)
        for _, counts in schedule.filling:
            loads = [load + count for load, count in zip(loads, counts, strict=True)]
        requests = [*schedule.decoding, *(request for request, _ in schedule.filling)]
        longest = max(len(request.tokens) for request in requests)
        self.limits.targets.pass_step(loads, len(requests) // self.limits.num_ranks, longest)
