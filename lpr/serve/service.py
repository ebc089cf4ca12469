"""The front's state: open requests (lpr.serve.jobs), and the driver that processes them (lpr.serve.mesh_state).

Every request is sent to the driver at once: the engine's queue orders all waiting requests. For limits and restarts the
front records which requests have a slot, and each one's output so far.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping

import msgspec

from lpr.protocol import Abort, Chunk, ErrorCode, Failure, Submit
from lpr.serve import limits, messages
from lpr.serve.errors import ApiError
from lpr.serve.inbox import Inbox
from lpr.serve.jobs import Job, Jobs, acquit, blame
from lpr.serve.mesh_state import MeshState
from lpr.serve.options import ServeArgs


class Service:
    def __init__(self, args: ServeArgs, send: Callable[[messages.ToDriver], None]) -> None:
        """Begin without a driver. `send` reaches it once it is there."""
        self._args = args
        self.mesh = MeshState(max(args.timeout, 60.0), lambda event, count: self.on_event(event, count))
        self.draining = False
        self.weights: Mapping[str, float] = {}
        """By name of a key, its weight in the sharing of slots; empty without keys."""
        self.tenants: list[str] = []  # tenants whose shared outputs a driver may load before their first request
        self.on_open: Callable[[Job], None] = lambda job: None
        self.on_chunk: Callable[[Job, Chunk], None] = lambda job, chunk: None
        self.on_end: Callable[[Job, Chunk], None] = lambda job, chunk: None
        self.on_event: Callable[[str, int], None] = lambda event, count: None
        """Called with an event of the ranks and its count: "rank_lost", "reform", "takeover", "restart", "poison"."""
        self.on_pause: Callable[[float], None] = lambda seconds: None
        """Called with the seconds for which running requests were interrupted."""
        self.adapters: dict[str, messages.Adapter] | None = None
        """By name, the loaded adapters; None until a driver has reported them."""
        self._changes: dict[str, asyncio.Future[str | None]] = {}
        """By adapter name, the future of a change by the driver: the failure's reason, or None."""
        self._send = send
        self._ids = itertools.count(1)
        self._jobs = Jobs()
        self._interrupted: list[Job] = []
        """Jobs that had a slot when the driver was lost, until it is known if all ranks died."""
        self._active = time.monotonic()  # when the driver last got a request or sent a token
        self._paused: float | None = None  # when requests with a slot stopped because the driver was lost
        self._durations: deque[float] = deque(maxlen=64)
        self._idle = asyncio.Event()
        self._idle.set()

    # Requests of clients.

    @property
    def num_waiting(self) -> int:
        return len(self._jobs) - self.num_running

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def _running(self) -> list[Job]:
        return [job for id in self.mesh.load.running if (job := self._jobs.get(id)) is not None]

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests without a slot, except for the next ones (free slots and one more)."""
        return sum(job.num_to_fill for job in self._queued)

    @property
    def _queued(self) -> list[Job]:
        running = {job.id for job in self._running}
        waiting = [job for job in self._jobs if job.id not in running]
        return waiting[max(0, self.mesh.num_slots + 1 - len(running)) if self.mesh.up else 0 :]

    def check_ready(self) -> messages.Facts:
        """The facts; raises ApiError before the first load of the model, and during shutdown."""
        if self.draining:
            raise ApiError(ErrorCode.SHUTTING_DOWN, "the server is shutting down")
        if self.mesh.facts is None:
            raise ApiError(ErrorCode.LOADING, f"the model is not loaded yet: {self.mesh.progress}")
        return self.mesh.facts

    def check_room(self, num_requests: int, num_tokens: int, key: str = "") -> None:
        """Raise ApiError if the queue, or a `key`'s part of it, has no room for so many requests and prompt tokens."""
        self.check_ready()
        code, room = self._overloaded, self._room
        if num_requests > room:
            message = f"{num_requests} texts at once are never taken: --max-queue leaves room for {room}"
            raise ApiError(ErrorCode.BAD_REQUEST, message)
        if len(self._jobs) + num_requests > room:
            message = f"{len(self._jobs)} requests are open and {num_requests} more would not fit: --max-queue"
            raise ApiError(code, f"{message} is {self._args.max_queue}", retry_after=self._wait())
        waiting = self.num_queued_tokens
        if waiting and waiting + num_tokens > self._args.max_queued_tokens:
            message = f"{waiting} prompt tokens wait already and {num_tokens} more would not fit"
            limit = f"--max-queued-tokens is {self._args.max_queued_tokens}"
            raise ApiError(code, f"{message}: {limit}", retry_after=self._wait())
        if key:
            self._check_share(num_requests, num_tokens, key)

    def open(self, submit: Submit, inbox: Inbox, ready: bool) -> Job:
        """Accept a request, after `check_room`; it must later be finished or cancelled.

        Its chunks go to `inbox`. One that is not `ready` takes queue room and starts after `release`.
        """
        job = Job(next(self._ids), submit, inbox, token_ids=submit.delivered)
        if job.token_ids:
            job.num_delivered, job.num_characters = len(job.token_ids), None
        self._jobs.add(job, ready)
        self._idle.clear()
        self.on_open(job)
        self._pump()
        return job

    def release(self, job: Job) -> None:
        """Mark a job as ready, unless it has ended."""
        if job in self._jobs:
            self._jobs.release(job)
            self._pump()

    def cancel(self, job: Job, reason: str = "abort") -> None:
        """Drop a job that is not finished, here and on all ranks."""
        if job in self._jobs:
            if job.was_given:
                self._send(Abort(job.id))
            self._end(job, Chunk(job.id, [], "", reason))
            self._pump()

    def finish(self, job: Job) -> None:
        """End a job whose text is complete. If the driver has it, its last chunk brings the usage."""
        if job.id in self._jobs.given:
            job.is_complete = True
            self._send(messages.Finish(job.id))
        elif job in self._jobs:
            self._end_as_stopped(job)

    async def change_adapter(self, message: messages.LoadAdapter | messages.UnloadAdapter) -> None:
        """Let the ranks load or unload an adapter; raises ApiError if they cannot."""
        self.check_ready()
        if not self.mesh.up or message.name in self._changes:
            why = self.ready_reason() or f"the adapter {message.name!r} is being changed already"
            raise ApiError(ErrorCode.NO_MESH, why)
        done = self._changes[message.name] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            failure = await asyncio.wait_for(done, self._args.timeout)
        except TimeoutError:
            failure = "the ranks have not answered in time"
        finally:
            self._changes.pop(message.name, None)
        if failure is not None:
            raise ApiError(ErrorCode.BAD_REQUEST, failure)

    async def drained(self) -> None:
        await self._idle.wait()

    def fail_all(self, code: ErrorCode, reason: str) -> None:
        """Fail all open requests, and drop them on all ranks."""
        for job in self._jobs:
            self._send(Abort(job.id))
            self._fail(job, Failure(code, reason))

    # Messages of the driver.

    def receive(self, message: messages.ToFront) -> None:
        """Handle a message of the driver; raises ProtocolError if it is unexpected."""
        self.mesh.heard = time.monotonic()
        if isinstance(message, messages.Stepped):
            if message.chunks:
                self._measure_pause(message.load)
            self._take_load(message.load)
            for chunk in message.chunks:
                self._deliver(chunk)
            self._pump()
        elif isinstance(message, messages.Pulse):
            self._take_load(message.load)
        elif isinstance(message, messages.Adapters):
            self.adapters = {each.name: each for each in message.adapters}
            if (done := self._changes.get(message.name)) is not None and not done.done():
                done.set_result(message.failure)
        elif isinstance(message, messages.Loading):
            self.mesh.loading = message
        elif isinstance(message, messages.Facts):
            if self.mesh.welcome(message):  # ready for requests: first those of the previous driver
                self._interrupted = []
                known = None if self.adapters is None else list(self.adapters.values())
                self._send(messages.Resume(list(self._jobs.held), known, self.tenants))
                self.adapters = {each.name: each for each in message.adapters} if known is None else self.adapters
                self._pump()
        elif isinstance(message, messages.Refused):
            self.mesh.refused = message.reason
        elif isinstance(message, messages.Hello):
            self.mesh.refused = None
            if not message.loaded:
                self.died("were replaced by others")
            self.mesh.pid = message.pid

    def lost(self) -> None:
        """Handle the loss of the driver: its jobs wait for the next one."""
        if self.mesh.up:
            self._interrupted = self._running
            if self._interrupted and self._paused is None:
                self._paused = self._active
        self.mesh.lost()
        for done in self._changes.values():
            if not done.done():
                done.set_result("the ranks were lost meanwhile: try again")
        self._jobs.take_back()
        for job in list(self._jobs.held.values()):
            if job.is_complete:
                self._end_as_stopped(job)

    def died(self, how: str) -> bool:
        """Handle the death of all ranks; `how` describes it ("ended with code 1"). True if they worked on a request.

        A request that repeatedly killed the ranks while running alone fails (see lpr.serve.jobs).
        """
        if self.mesh.up:
            self.lost()
        self.mesh.died()
        running, self._interrupted = [job for job in self._interrupted if job in self._jobs], []
        poison = blame(running, self._jobs)
        if poison is not None:
            self.on_event("poison", 1)
            times = f"all ranks died {poison.deaths} times in a row as they worked on this request"
            message = f"{times}, {poison.lone_deaths} times on it alone; in the end they {how}"
            self._fail(poison, Failure(ErrorCode.GENERATION_FAILED, message))
        return bool(running)

    def ready_reason(self) -> str | None:
        return "shutting down" if self.draining else self.mesh.ready_reason()

    # Within.

    @property
    def _overloaded(self) -> ErrorCode:
        return ErrorCode.OVERLOADED if self.mesh.up else ErrorCode.NO_MESH

    @property
    def _room(self) -> int:
        return self.mesh.num_slots + 1 + self._args.max_queue

    def _check_share(self, num_requests: int, num_tokens: int, key: str) -> None:
        """Raise ApiError if a key would exceed its limits on the queue."""
        parts = 2 if len(self.weights) > 1 else 1
        most = self._args.max_requests_per_key or max(1, self._room // parts)
        num_open = sum(job.submit.share == key for job in self._jobs)
        limit = f"--max-requests-per-key is {most}"
        if num_requests > most:
            raise ApiError(ErrorCode.BAD_REQUEST, f"{num_requests} texts at once are never taken: {limit}")
        if num_open + num_requests > most:
            message = f"{num_open} requests of this key are open and {num_requests} more would not fit: {limit}"
            raise ApiError(self._overloaded, message, retry_after=self._wait())
        most = self._args.max_tokens_per_key or self._args.max_queued_tokens // parts
        waiting = sum(job.num_to_fill for job in self._queued if job.submit.share == key)
        if waiting and waiting + num_tokens > most:
            message = f"{waiting} prompt tokens of this key wait already and {num_tokens} more would not fit"
            limit = f"--max-tokens-per-key is {most}"
            raise ApiError(self._overloaded, f"{message}: {limit}", retry_after=self._wait())

    def _take_load(self, load: messages.Load) -> None:
        self.mesh.take(load)
        for job in self._running:
            job.begun = job.begun if job.begun is not None else time.monotonic()

    def _measure_pause(self, load: messages.Load) -> None:
        now = time.monotonic()
        since = self._paused
        if since is None and load.epoch > self.mesh.load.epoch:
            since = self._active
        if since is not None:
            self.on_pause(now - since)
        self._paused, self._active = None, now

    def _pump(self) -> None:
        while self.mesh.up and (job := self._jobs.give()) is not None:
            self._active = time.monotonic()
            tokens = [*job.submit.prompt_ids, *job.token_ids]
            arrived = job.arrived if job.begun is None else -math.inf
            now = {"id": job.id, "token_ids": tokens, "arrived": arrived, "predicted": job.predicted}
            self._send(msgspec.structs.replace(job.submit, **now))

    def _deliver(self, chunk: Chunk) -> None:
        job = self._jobs.get(int(chunk.id))
        if job is None:  # cancelled while the chunk was on its way
            return
        if job.num_characters is None:  # the driver begins after the delivered ids
            job.num_characters = chunk.start_character
        chunk = chunk.after(len(job.token_ids), job.num_characters)
        now = time.monotonic()
        job.predicted = max(job.predicted, chunk.predicted)
        if chunk.token_ids:
            acquit(job)
            job.token_ids += chunk.token_ids
            self.on_chunk(job, chunk)
            job.first = job.first if job.first is not None else now
            job.latest = now
        job.num_characters += len(chunk.text)
        if chunk.token_ids or chunk.text or chunk.finish_reason is not None:
            job.inbox.put(chunk)
            if job.inbox.size > limits.UNREAD.most // 256:
                self._bound_unread()
        if chunk.finish_reason is not None and job in self._jobs:
            self._end(job, chunk)

    def _bound_unread(self) -> None:
        """End the streams with the most unread bytes until the total of unread bytes is within the limit."""
        sizes = {job.inbox: job.inbox.size for job in self._jobs}
        while sum(sizes.values()) > limits.UNREAD.most:
            longest = max(sizes, key=lambda each: sizes[each])
            del sizes[longest]
            longest.clear()
            for job in self._jobs:
                if job.inbox is longest:
                    self._send(Abort(job.id))
                    self._fail(job, Failure(ErrorCode.TIMEOUT, "the client does not read the answer"))

    def _end_as_stopped(self, job: Job) -> None:
        """End a complete job whose usage is lost."""
        job.inbox.put(Chunk(job.id, [], "", "stop"))
        self.cancel(job, "stop")

    def _fail(self, job: Job, failure: Failure) -> None:
        chunk = Chunk(job.id, [], "", "error", failure)
        job.inbox.put(chunk)
        self._end(job, chunk)

    def _end(self, job: Job, chunk: Chunk) -> None:
        job.ended = time.monotonic()
        self._jobs.remove(job)
        if chunk.finish_reason in ("stop", "length"):
            self._durations.append(job.ended - (job.begun or job.arrived))
        self.on_end(job, chunk)
        if not self._jobs:
            self._idle.set()

    def _wait(self) -> int:
        """Retry-After: seconds until a place in the queue is likely, from 1 to 60."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
        return max(1, min(60, math.ceil(mean * len(self._jobs) / max(1, self.mesh.num_slots) / 4)))
