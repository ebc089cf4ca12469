"""The open requests of a service: which of them the driver has, and in what order it gets the others."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from lpr.config import SamplingParams
from lpr.serve.messages import Chunk
from lpr.serve.suspects import most_suspect

SECONDS_PER_PRIORITY = 10.0
"""A request of priority p waits as one that came 10 p seconds later: an order that no request starves in."""


@dataclass(eq=False)
class Job:
    """One prompt on its way to one text."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    details: bool = False
    arrived: float = field(default_factory=time.monotonic)
    given: float | None = None
    """When the driver got it."""
    first: float | None = None
    """When its first token came."""
    latest: float | None = None
    ended: float | None = None
    token_ids: list[int] = field(default_factory=list)
    """Delivered so far; with the prompt, all that a restarted engine needs to go on."""
    num_characters: int = 0
    """Of text delivered so far."""
    deaths: int = 0
    """How often in a row all ranks died while they worked on this, without a token in between."""
    lone_deaths: int = 0
    """How often in a row they worked on nothing else then."""
    is_complete: bool = False
    """Has it all the text that is wanted? Then only what it took is still to come."""
    finish_reason: str | None = None
    chunks: asyncio.Queue[Chunk] = field(default_factory=asyncio.Queue)

    @property
    def is_scoring(self) -> bool:
        """Is its output known, and only what the model says of it asked for?"""
        return bool(self.params.forced_ids)

    @property
    def order(self) -> float:
        """Waiting jobs are taken from the lowest to the highest."""
        return self.arrived + SECONDS_PER_PRIORITY * max(-1e9, min(1e9, self.priority))


class Jobs:
    """All open jobs, each of them given to the driver, taken back from one that was lost, or waiting."""

    def __init__(self) -> None:
        """None is open."""
        self._open: dict[int, Job] = {}
        self._waiting: list[tuple[float, int, Job]] = []
        """A heap, in which those that are not open any more stay until their turn."""
        self._given: dict[int, Job] = {}
        """In the order in which the driver got them."""
        self._again: list[Job] = []
        """What a lost driver had, in the same order."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Job]:
        """All of them; they may end meanwhile."""
        return iter(list(self._open.values()))

    def __contains__(self, job: Job) -> bool:
        return job.id in self._open

    def get(self, id: int) -> Job | None:
        """The open job of this number."""
        return self._open.get(id)

    @property
    def num_given(self) -> int:
        """Jobs that the driver has."""
        return len(self._given)

    def is_given(self, job: Job) -> bool:
        """Does the driver have this one?"""
        return job.id in self._given

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of those that it has not got."""
        return sum(len(job.prompt_ids) for job in self._open.values() if job.id not in self._given)

    @property
    def taken_back(self) -> list[Job]:
        """Those that a lost driver had, in the order in which it got them."""
        return list(self._again)

    def in_slots(self, num_slots: int) -> list[Job]:
        """What the driver works on: it takes requests in the order in which it gets them."""
        return list(itertools.islice(self._given.values(), num_slots))

    def add(self, job: Job, ready: bool = True) -> None:
        """Let a new job wait; one that is not ready is not given before `release`."""
        self._open[job.id] = job
        if ready:
            self.release(job)

    def release(self, job: Job) -> None:
        """A job that was not ready is."""
        heapq.heappush(self._waiting, (job.order, job.id, job))

    def give(self, num_slots: int) -> Job | None:
        """The job that a driver of so many slots gets next, counted as given; None if it has enough."""
        job = self._next(num_slots)
        if job is not None:
            self._given[job.id] = job
        return job

    def take_back(self) -> None:
        """The driver is lost."""
        self._again = [*self._given.values(), *self._again]
        self._given.clear()

    def remove(self, job: Job) -> None:
        """Forget a job that has ended."""
        self._open.pop(job.id, None)
        self._given.pop(job.id, None)
        if job in self._again:
            self._again.remove(job)

    def _next(self, num_slots: int) -> Job | None:
        suspect = most_suspect([*self._given.values(), *self._again])
        if suspect is not None:
            # Nothing else is begun until it has shown a token: if the ranks die again, it is known which one did it.
            if suspect not in self._again:
                return None
            self._again.remove(suspect)
            return suspect
        if len(self._given) > num_slots:
            return None
        if self._again:
            return self._again.pop(0)
        while self._waiting:
            job = heapq.heappop(self._waiting)[2]
            if job in self:
                return job
        return None
