"""The open requests of a service, and which of them the driver has."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from lpr.config import SamplingParams
from lpr.protocol import Chunk
from lpr.serve.suspects import most_suspect


@dataclass(eq=False)
class Job:
    """One prompt on its way to one text. Times are those of time.monotonic."""

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0
    tenant: str = ""
    details: bool = False
    arrived: float = field(default_factory=time.monotonic)
    was_given: bool = False
    """True once a driver got it. The ranks may hold it since then, also after that driver was lost."""
    begun: float | None = None
    """When it got a slot for the first time."""
    first: float | None = None
    """When its first token came."""
    latest: float | None = None
    ended: float | None = None
    token_ids: list[int] = field(default_factory=list)
    """Delivered so far. With the prompt, all that restarted ranks need to continue."""
    num_characters: int = 0
    """Characters of text delivered so far."""
    deaths: int = 0
    """How often in a row all ranks died while they worked on this, without a token in between."""
    lone_deaths: int = 0
    """How often in a row they worked on nothing else then."""
    is_complete: bool = False
    """True once it has all the text that is wanted. Then only the usage is still to come."""
    chunks: asyncio.Queue[Chunk] = field(default_factory=asyncio.Queue)

    @property
    def is_scoring(self) -> bool:
        """True if the output is known and only its log-probabilities are asked for."""
        return bool(self.params.forced_ids)


class Jobs:
    """All open jobs. The driver has all that are ready, except while a suspect is on trial (lpr.serve.suspects)."""

    def __init__(self) -> None:
        """Start without jobs."""
        self._open: dict[int, Job] = {}
        self._held: dict[int, Job] = {}
        """Jobs that are ready and not given, in the order in which they are given."""
        self._given: dict[int, Job] = {}
        """Jobs that the driver has, in the order in which it got them."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Job]:
        """All of them; they may end meanwhile."""
        return iter(list(self._open.values()))

    def __contains__(self, job: Job) -> bool:
        return job.id in self._open

    def get(self, id: int) -> Job | None:
        """The open job with this id."""
        return self._open.get(id)

    def is_given(self, job: Job) -> bool:
        """True if the driver has this one."""
        return job.id in self._given

    @property
    def held(self) -> list[Job]:
        """Jobs that are ready and not given, in the order in which they are given."""
        return list(self._held.values())

    def add(self, job: Job, ready: bool = True) -> None:
        """Open a job. One that is not ready is not given before `release`."""
        self._open[job.id] = job
        if ready:
            self.release(job)

    def release(self, job: Job) -> None:
        """A job that was not ready is ready."""
        self._held[job.id] = job

    def give(self) -> Job | None:
        """The job that the driver gets next, counted as given; None if it has all that it may have.

        While a job is suspected, nothing else begins until it has shown a token: if the ranks die again, it is known
        which job they died on.
        """
        suspect = most_suspect([*self._given.values(), *self._held.values()])
        job = suspect if suspect is not None else next(iter(self._held.values()), None)
        if job is None or job.id not in self._held:
            return None
        self._given[job.id] = self._held.pop(job.id)
        job.was_given = True
        return job

    def take_back(self) -> None:
        """Hold all jobs again, as the driver is lost: first those that have begun."""
        jobs = sorted(
            [*self._given.values(), *self._held.values()], key=lambda job: math.inf if job.begun is None else job.begun
        )
        self._held, self._given = {job.id: job for job in jobs}, {}

    def remove(self, job: Job) -> None:
        """Remove a job that has ended."""
        for jobs in (self._open, self._given, self._held):
            jobs.pop(job.id, None)
