"""The front's state: the open requests (lpr.serve.jobs), and what is known of the driver that works on them.

The driver gets every request at once: the engine's queue orders them, so that its targets see all that wait. The front
keeps what limits and restarts need: which requests have a slot, and each one's output so far.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from lpr.config import SamplingParams
from lpr.protocol import Abort, Chunk, ErrorCode, Failure, Submit
from lpr.serve.errors import ApiError
from lpr.serve.jobs import Job, Jobs
from lpr.serve.messages import (
    Facts,
    Finish,
    Hello,
    Load,
    Loading,
    Pulse,
    Refused,
    Resume,
    Stepped,
    ToDriver,
    ToFront,
)
from lpr.serve.suspects import acquit, blame

STALE_PULSE = 5.0
"""Seconds without a pulse (sent every second) after which the driver counts as stopped."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits above which requests are refused, or the ranks count as stopped."""

    max_queue: int = 256
    """Requests that wait for a slot."""
    max_queued_tokens: int = 1_000_000
    """Prompt tokens of requests that wait for a slot."""
    step_seconds: float = 300.0
    """Longest step."""


class Service:
    """The open requests, and the driver that works on them."""

    def __init__(self, limits: Limits, send: Callable[[ToDriver], None]) -> None:
        """Begin without a driver. `send` reaches it once it is there."""
        self.limits = limits
        self.facts: Facts | None = None
        """What is served, also while the ranks are away. None until they were ready once."""
        self.up = False
        """True while a driver takes requests."""
        self.outage = ""
        """Why no driver does, after one did."""
        self.loading: Loading | None = None
        self.refused: str | None = None
        """Why the ranks could not start the last time."""
        self.is_other = False
        """True if the ranks came back with another model than before."""
        self.load = Load()
        self.num_wanted = 0
        """Ranks of the whole mesh; 0 until they were ready once."""
        self.draining = False
        self.tenants: list[str] = []
        """Tenants whose outputs a driver may ask other replicas for before any request comes."""
        self.heard = time.monotonic()
        """When the driver last sent anything."""
        self.welcomed: float | None = None
        """When a driver last began to take requests."""
        self.ready = asyncio.Event()
        self.on_open: list[Callable[[Job], None]] = []
        self.on_chunk: list[Callable[[Job, Chunk], None]] = []
        self.on_end: list[Callable[[Job, Chunk], None]] = []
        self.on_event: list[Callable[[str, int], None]] = []
        """Called with an event of the ranks and its count: "rank_lost", "reform", "takeover", "restart", "poison"."""
        self.on_pause: list[Callable[[float], None]] = []
        """Called with the seconds for which running requests stood still."""
        self._send = send
        self._ids = itertools.count(1)
        self._jobs = Jobs()
        self._interrupted: list[Job] = []
        """Jobs that had a slot when the driver was lost, until it is known whether all ranks died."""
        self._active = time.monotonic()
        """When the driver last got a request or sent a token."""
        self._paused: float | None = None
        """When requests with a slot stopped because the driver was lost."""
        self._num_slots = 0
        """Requests that the present ranks can run at once."""
        self._present = 0
        self._restarted = False
        """True if the next driver is a new start. Otherwise it takes over from the one before."""
        self._durations: deque[float] = deque(maxlen=64)
        self._idle = asyncio.Event()
        self._idle.set()

    # Requests of clients.

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._jobs) - self.num_running

    @property
    def num_running(self) -> int:
        """Requests in slots."""
        return len(self._running)

    @property
    def _running(self) -> list[Job]:
        found = map(self._jobs.get, self.load.running)
        return [job for job in found if job is not None]

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests without a slot, except those that the free slots and one more will take."""
        running = {job.id for job in self._running}
        waiting = [len(job.prompt_ids) for job in self._jobs if job.id not in running]
        return sum(waiting[max(0, self._num_slots + 1 - len(running)) if self.up else 0 :])

    def check_ready(self) -> Facts:
        """The facts; raises ApiError before the model was loaded once, and while the server shuts down."""
        if self.draining:
            raise ApiError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        if self.facts is None:
            raise ApiError(ErrorCode.LOADING, f"the model is not loaded yet: {self.progress}")
        return self.facts

    def check_room(self, num_requests: int, num_tokens: int) -> None:
        """Raise ApiError if `num_requests` more requests, of `num_tokens` prompt tokens together, cannot wait."""
        self.check_ready()
        code = ErrorCode.OVERLOADED if self.up else ErrorCode.NO_MESH
        room = self._num_slots + 1 + self.limits.max_queue
        if num_requests > room:
            message = f"{num_requests} texts at once are never taken: --max-queue leaves room for {room}"
            raise ApiError(ErrorCode.BAD_REQUEST, message)
        if len(self._jobs) + num_requests > room:
            message = f"{len(self._jobs)} requests are open and {num_requests} more would not fit: --max-queue"
            raise ApiError(code, f"{message} is {self.limits.max_queue}", retry_after=self._wait())
        waiting = self.num_queued_tokens
        if waiting and waiting + num_tokens > self.limits.max_queued_tokens:
            message = f"{waiting} prompt tokens wait already and {num_tokens} more would not fit"
            limit = f"--max-queued-tokens is {self.limits.max_queued_tokens}"
            raise ApiError(code, f"{message}: {limit}", retry_after=self._wait())

    def open(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        tenant: str = "",
        details: bool = False,
        chunks: asyncio.Queue[Chunk] | None = None,
        ready: bool = True,
    ) -> Job:
        """Accept a request, after `check_room`. It is then either finished or cancelled.

        Its chunks go to `chunks`, which several jobs may share, or to a queue of its own. One that is not `ready` takes
        room in the queue, and begins after `release`.
        """
        job = Job(next(self._ids), prompt_ids, params, priority, tenant, details)
        job.chunks = chunks if chunks is not None else job.chunks
        self._jobs.add(job, ready)
        self._idle.clear()
        for tell in self.on_open:
            tell(job)
        self._pump()
        return job

    def release(self, job: Job) -> None:
        """A job that was not ready is ready, unless it has ended meanwhile."""
        if job in self._jobs:
            self._jobs.release(job)
            self._pump()

    def cancel(self, job: Job, reason: str = "abort") -> None:
        """Drop a job that is not finished, here and on all ranks."""
        if job not in self._jobs:
            return
        if job.was_given:
            self._send(Abort(job.id))
        self._end(job, Chunk(job.id, [], "", reason))
        self._pump()

    def finish(self, job: Job) -> None:
        """End a job that has all the text that is wanted. If the driver has it, its last chunk carries the usage."""
        if self._jobs.is_given(job):
            job.is_complete = True
            self._send(Finish(job.id))
        elif job in self._jobs:
            self._end_as_stopped(job)

    async def drained(self) -> None:
        """Return once no request is open."""
        await self._idle.wait()

    def hand_back(self) -> int:
        """Fail all open requests, as the time to finish them is over; returns their number."""
        number = len(self._jobs)
        failure = Failure(ErrorCode.DRAINED, "the server shut down before this was finished")
        for job in self._jobs:
            self._send(Abort(job.id))
            self._fail(job, failure)
        return number

    # Messages of the driver.

    def receive(self, message: ToFront) -> None:
        """Take a message of the driver; raises ProtocolError if it does not follow from those before."""
        self.heard = time.monotonic()
        if isinstance(message, Stepped):
            if message.chunks:
                self._measure_pause(message.load)
            self._take_load(message.load)
            for chunk in message.chunks:
                self._deliver(chunk)
            self._pump()
        elif isinstance(message, Pulse):
            self._take_load(message.load)
        elif isinstance(message, Loading):
            self.loading = message
        elif isinstance(message, Facts):
            self._welcome(message)
        elif isinstance(message, Refused):
            self.refused = message.reason
        elif isinstance(message, Hello):
            self.refused = None
            if not message.loaded:
                self.died("were replaced by others")

    def lost(self) -> None:
        """The driver is gone: its jobs wait for the next one."""
        if self.up:
            self._interrupted = self._running
            if self._interrupted and self._paused is None:
                self._paused = self._active
            self.outage = "the driver was lost; another rank takes over, or all begin again"
        self.up = False
        self.load = Load(epoch=self.load.epoch)
        self.loading = None
        self.ready.clear()
        self._jobs.take_back()
        for job in self._jobs.held:
            if job.is_complete:
                self._end_as_stopped(job)

    def died(self, how: str) -> bool:
        """All ranks are gone, as `how` says ("ended with code 1"); returns whether they worked on a request.

        A request on which they have died repeatedly, and now alone, fails (see lpr.serve.suspects).
        """
        if self.up:
            self.lost()
        if self.facts is not None:
            self.outage = "all ranks were lost and are started again"
        self._restarted = True
        self._note_ranks(0)
        running, self._interrupted = [job for job in self._interrupted if job in self._jobs], []
        poison = blame(running, self._jobs)
        if poison is not None:
            self._tell("poison")
            times = f"all ranks died {poison.deaths} times in a row as they worked on this request"
            message = f"{times}, {poison.lone_deaths} times on it alone; in the end they {how}"
            self._fail(poison, Failure(ErrorCode.GENERATION_FAILED, message))
        return bool(running)

    def give_up(self, reason: str) -> None:
        """Fail all open requests: there will be no ranks any more."""
        self.lost()
        for job in self._jobs:
            self._fail(job, Failure(ErrorCode.RANKS_LOST, reason))

    @property
    def awaits_takeover(self) -> bool:
        """True if the driver was lost, and not all ranks."""
        return self.facts is not None and not self.up and not self._restarted

    @property
    def progress(self) -> str:
        """The stage of start-up, in words."""
        if self.loading is None:
            return "the ranks are starting"
        return f"{self.loading.stage} ({self.loading.done} of {self.loading.total})"

    @property
    def num_ranks(self) -> int:
        """Ranks at the last gather; 0 while there is no driver."""
        return self._present if self.up else 0

    def live_reason(self) -> str | None:
        """Why the ranks count as stopped; None if they live, start or are started again."""
        silent = time.monotonic() - self.heard
        if self.up and silent > STALE_PULSE:
            return f"the driver has said nothing for {silent:.0f} s"
        if self.up and self.load.running and self.load.last_step > self.limits.step_seconds:
            return f"no step has ended for {self.load.last_step:.0f} s"
        return None

    @property
    def is_hopeless(self) -> bool:
        """True if the ranks can never serve. A refusal after they did once may pass, as a full disk does."""
        return self.refused is not None and (self.facts is None or self.is_other)

    def ready_reason(self) -> str | None:
        """Why no request is worked on now; None if the service is ready."""
        if self.draining:
            return "shutting down"
        if not self.up:
            return f"{self.outage}: {self.progress}" if self.outage else self.progress
        return self.live_reason()

    # Within.

    def _welcome(self, facts: Facts) -> None:
        """A driver takes requests: first those of the driver before."""
        if self.facts is not None:
            if others := _others(facts, self.facts):
                self.refused = f"the ranks came back with another {' and '.join(others)}, so no output can go on"
                self.is_other = True
                return
            self._tell("restart" if self._restarted else "takeover")
        self.facts = facts
        self.num_wanted = self.num_wanted or facts.lp * facts.tp
        self._interrupted, self._restarted, self.outage, self.up = [], False, "", True
        self.welcomed, self._num_slots = time.monotonic(), facts.max_batch_size
        self._note_ranks(facts.lp * facts.tp)
        self._send(Resume([job.id for job in self._jobs.held], self.tenants))
        self.ready.set()
        self._pump()

    def _take_load(self, load: Load) -> None:
        if load.epoch > self.load.epoch:
            self._tell("reform", load.epoch - self.load.epoch)
        self.load = load
        for job in self._running:
            job.begun = job.begun if job.begun is not None else time.monotonic()
        if self.up:
            self._num_slots = load.num_slots or self._num_slots
            if load.num_ranks:
                self._note_ranks(load.num_ranks)

    def _note_ranks(self, present: int) -> None:
        if present < self._present:
            self._tell("rank_lost", self._present - present)
        self._present = present

    def _measure_pause(self, load: Load) -> None:
        now = time.monotonic()
        since = self._paused
        if since is None and load.epoch > self.load.epoch:
            since = self._active
        if since is not None:
            for tell in self.on_pause:
                tell(now - since)
        self._paused, self._active = None, now

    def _tell(self, event: str, count: int = 1) -> None:
        for tell in self.on_event:
            tell(event, count)

    def _pump(self) -> None:
        while self.up and (job := self._jobs.give()) is not None:
            self._active = time.monotonic()
            self._send(
                Submit(
                    id=job.id,
                    token_ids=[*job.prompt_ids, *job.token_ids],
                    params=job.params,
                    num_prompt=len(job.prompt_ids),
                    priority=job.priority,
                    tenant=job.tenant,
                    details=job.details,
                    arrived=job.arrived if job.begun is None else -math.inf,
                )
            )

    def _deliver(self, chunk: Chunk) -> None:
        job = self._jobs.get(int(chunk.id))
        if job is None:  # cancelled while the chunk was on its way
            return
        chunk = chunk.after(len(job.token_ids), job.num_characters)
        now = time.monotonic()
        if chunk.token_ids:
            acquit(job)
            job.token_ids += chunk.token_ids
            for tell in self.on_chunk:
                tell(job, chunk)
            job.first = job.first if job.first is not None else now
            job.latest = now
        job.num_characters += len(chunk.text)
        if chunk.token_ids or chunk.text or chunk.finish_reason is not None:
            job.chunks.put_nowait(chunk)
        if chunk.finish_reason is not None:
            self._end(job, chunk)

    def _end_as_stopped(self, job: Job) -> None:
        """End a complete job whose usage is lost."""
        job.chunks.put_nowait(Chunk(job.id, [], "", "stop"))
        self.cancel(job, "stop")

    def _fail(self, job: Job, failure: Failure) -> None:
        chunk = Chunk(job.id, [], "", "error", failure)
        job.chunks.put_nowait(chunk)
        self._end(job, chunk)

    def _end(self, job: Job, chunk: Chunk) -> None:
        job.finish_reason = chunk.finish_reason
        job.ended = time.monotonic()
        self._jobs.remove(job)
        if chunk.finish_reason in ("stop", "length"):
            self._durations.append(job.ended - (job.begun or job.arrived))
        for tell in self.on_end:
            tell(job, chunk)
        if not self._jobs:
            self._idle.set()

    def _wait(self) -> int:
        """Seconds after which a place in the queue is likely, from 1 to 60."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
        return max(1, min(60, math.ceil(mean * len(self._jobs) / max(1, self._num_slots) / 4)))


def _others(facts: Facts, before: Facts) -> list[str]:
    """Names of the facts that have changed and must not, or outputs could not go on. The width of the mesh may."""
    may = {"lp", "tp", "device", "max_batch_size"}  # elastic replicas have slots of their own each
    names = [each for each in facts.__struct_fields__ if each not in may]
    return [name.replace("_", " ") for name in names if getattr(facts, name) != getattr(before, name)]
