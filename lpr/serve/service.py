"""The front's state: which requests are open, which of them the driver has, and in what order the others wait.

The driver is given as many requests as it has slots, and one more, so that a freed slot never waits for its next
request; the others wait here, where their priority counts and where a restart of the ranks cannot lose them.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from lpr.config import SamplingParams
from lpr.serve.errors import ApiError
from lpr.serve.messages import Abort, Chunk, Facts, Load, Loading, Pulse, Refused, Stepped, Submit, ToDriver, ToFront

SECONDS_PER_PRIORITY = 10.0
"""A request of priority p waits as one that came 10 p seconds later: an order that no request starves in."""
STALE_PULSE = 5.0
"""Seconds without a pulse (sent every second) after which the driver counts as stopped."""


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
    finish_reason: str | None = None
    chunks: asyncio.Queue[Chunk] = field(default_factory=asyncio.Queue)

    @property
    def order(self) -> float:
        """Waiting jobs are taken from the lowest to the highest."""
        return self.arrived + SECONDS_PER_PRIORITY * max(-1e9, min(1e9, self.priority))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to say no."""

    max_queue: int = 256
    """Requests that wait for a slot."""
    max_queued_tokens: int = 1_000_000
    """Prompt tokens of requests that wait for a slot."""


class Service:
    """Open requests, and the driver that works on them."""

    def __init__(self, limits: Limits, send: Callable[[ToDriver], None]) -> None:
        """Begin without a driver; `send` reaches it once it is there."""
        self.limits = limits
        self.facts: Facts | None = None
        self.loading: Loading | None = None
        self.refused: str | None = None
        self.load = Load()
        self.draining = False
        self.heard = time.monotonic()
        """When the driver last said anything."""
        self.ready = asyncio.Event()
        self.on_open: list[Callable[[Job], None]] = []
        self.on_chunk: list[Callable[[Job, Chunk], None]] = []
        self.on_end: list[Callable[[Job, Chunk], None]] = []
        self._send = send
        self._ids = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._waiting: list[tuple[float, int, Job]] = []
        self._given: set[int] = set()
        self._durations: deque[float] = deque(maxlen=64)
        self._idle = asyncio.Event()
        self._idle.set()

    # What clients want.

    @property
    def num_waiting(self) -> int:
        """Requests that the driver has not got yet, and those that it has no slot for yet."""
        return len(self._jobs) - self.num_running

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        slots = self.facts.max_batch_size if self.facts is not None else 0
        return min(len(self._given), slots)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that the driver has not got yet."""
        return sum(len(job.prompt_ids) for job in self._jobs.values() if job.id not in self._given)

    def check_ready(self) -> Facts:
        """What is served; raises ApiError (503) while nothing is."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)
        if self.facts is None:
            raise ApiError(503, f"the model is not loaded yet: {self.progress}", code="loading", retry_after=5)
        return self.facts

    def check_room(self, num_requests: int, num_tokens: int) -> None:
        """Raise ApiError (429) if that many further requests with prompts of so many tokens cannot wait."""
        facts = self.check_ready()
        room = facts.max_batch_size + 1 + self.limits.max_queue
        if len(self._jobs) + num_requests > room:
            message = f"{len(self._jobs)} requests are open and {num_requests} more would not fit: --max-queue"
            raise ApiError(429, f"{message} is {self.limits.max_queue}", code="queue_full", retry_after=self._wait())
        waiting = self.num_queued_tokens
        if waiting and waiting + num_tokens > self.limits.max_queued_tokens:
            message = f"{waiting} prompt tokens wait already and {num_tokens} more would not fit"
            limit = f"--max-queued-tokens is {self.limits.max_queued_tokens}"
            raise ApiError(429, f"{message}: {limit}", code="queue_full", retry_after=self._wait())

    def open(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        tenant: str = "",
        details: bool = False,
        chunks: asyncio.Queue[Chunk] | None = None,
    ) -> Job:
        """Accept a request, which is then either finished or cancelled; `check_room` comes first.

        Its chunks go to `chunks`, which several jobs may share, or to a queue of its own.
        """
        job = Job(next(self._ids), prompt_ids, params, priority, tenant, details)
        job.chunks = chunks if chunks is not None else job.chunks
        self._jobs[job.id] = job
        self._idle.clear()
        heapq.heappush(self._waiting, (job.order, job.id, job))
        for tell in self.on_open:
            tell(job)
        self._pump()
        return job

    def cancel(self, job: Job, reason: str = "abort") -> None:
        """Forget a job that is not finished, here and on all ranks."""
        if job.id not in self._jobs:
            return
        if job.id in self._given:
            self._send(Abort(job.id))
        self._end(job, Chunk(job.id, [], "", reason))
        self._pump()

    async def drained(self) -> None:
        """Return once no request is open."""
        await self._idle.wait()

    def hand_back(self) -> int:
        """End all open requests, as the time to finish them is over; returns how many there were."""
        jobs = list(self._jobs.values())
        for job in jobs:
            job.chunks.put_nowait(Chunk(job.id, [], "", "error", "the server shut down before this was finished"))
            self.cancel(job, "error")
        return len(jobs)

    # What the driver says.

    def receive(self, message: ToFront) -> None:
        """Take a message of the driver."""
        self.heard = time.monotonic()
        if isinstance(message, Stepped):
            self.load = message.load
            for chunk in message.chunks:
                self._deliver(chunk)
            self._pump()
        elif isinstance(message, Pulse):
            self.load = message.load
        elif isinstance(message, Loading):
            self.loading = message
        elif isinstance(message, Facts):
            self.facts = message
            self.ready.set()
            self._pump()
        elif isinstance(message, Refused):
            self.refused = message.reason

    def lost(self) -> None:
        """The driver is gone: what it had cannot be finished."""
        self.facts = None
        self.ready.clear()
        for job in list(self._jobs.values()):
            job.chunks.put_nowait(Chunk(job.id, [], "", "error", "the ranks were lost"))
            self._end(job, Chunk(job.id, [], "", "error"))

    @property
    def progress(self) -> str:
        """What start-up is doing, in words."""
        if self.loading is None:
            return "the ranks are starting"
        return f"{self.loading.stage} ({self.loading.done} of {self.loading.total})"

    def live_reason(self) -> str | None:
        """Why the ranks count as stopped, or None if they live."""
        silent = time.monotonic() - self.heard
        if self.facts is not None and silent > STALE_PULSE:
            return f"the driver has said nothing for {silent:.0f} s"
        return None

    def ready_reason(self) -> str | None:
        """Why no request is taken now, or None if they are."""
        if self.draining:
            return "shutting down"
        if self.facts is None:
            return self.progress
        return self.live_reason()

    # Within.

    def _pump(self) -> None:
        if self.facts is None:
            return
        while self._waiting and len(self._given) <= self.facts.max_batch_size:
            _, _, job = heapq.heappop(self._waiting)
            if job.id not in self._jobs:
                continue
            self._given.add(job.id)
            job.given = time.monotonic()
            self._send(
                Submit(
                    id=job.id,
                    prompt_ids=job.prompt_ids,
                    params=job.params,
                    tenant=job.tenant,
                    details=job.details,
                )
            )

    def _deliver(self, chunk: Chunk) -> None:
        job = self._jobs.get(chunk.id)
        if job is None:  # cancelled while the chunk was on its way
            return
        now = time.monotonic()
        if chunk.token_ids:
            job.token_ids += chunk.token_ids
            for tell in self.on_chunk:
                tell(job, chunk)
            job.first = job.first if job.first is not None else now
            job.latest = now
        job.chunks.put_nowait(chunk)
        if chunk.finish_reason is not None:
            self._end(job, chunk)

    def _end(self, job: Job, chunk: Chunk) -> None:
        job.finish_reason = chunk.finish_reason
        job.ended = time.monotonic()
        self._jobs.pop(job.id, None)
        self._given.discard(job.id)
        if chunk.finish_reason in ("stop", "length"):
            self._durations.append(job.ended - (job.given or job.arrived))
        for tell in self.on_end:
            tell(job, chunk)
        if not self._jobs:
            self._idle.set()

    def _wait(self) -> int:
        """Seconds after which a place in the queue is likely, from 1 to 60."""
        slots = self.facts.max_batch_size if self.facts is not None else 1
        mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
        return max(1, min(60, math.ceil(mean * len(self._jobs) / max(1, slots) / 4)))
