"""The texts of one HTTP request: its jobs, their chunks, and early ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.types import Receive

from lpr.protocol import Chunk, ErrorCode, RequestId, Submit, TokenLogprobs, Usage
from lpr.serve.errors import ApiError
from lpr.serve.inbox import Inbox
from lpr.serve.jobs import Job
from lpr.serve.service import Service


class DisconnectedError(Exception):
    """The client has closed the connection."""


TextLimit = Callable[[str, bool], tuple[str, bool]]
"""Ends a text by rules that the engine does not have.

Called with new text, and True for the last one, which releases held-back text. Returns the part to show, and True if
the text ends there.
"""


@dataclass
class Choice:
    """One text of a request, with its output so far."""

    index: int
    job: Job
    limit: TextLimit | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    num_steps: int = 0
    finish_reason: str | None = None
    is_complete: bool = False  # True after a limit has ended the text; only the usage is then missing
    stop_reason: int | str | None = None  # the stop string, or the id of `stop_token_ids`, that ended it
    error: ApiError | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Event:
    """The result of one step for one choice; `text` is the part to show."""

    choice: Choice
    text: str
    chunk: Chunk

    def joined(self, later: Event) -> Event:
        """This event joined with the same choice's next one."""
        first, second = self.chunk, later.chunk
        logprobs, sources = [*(first.logprobs or ()), *(second.logprobs or ())], first.sources or []
        chunk = msgspec.structs.replace(
            second,
            token_ids=first.token_ids + second.token_ids,
            logprobs=logprobs or None,
            sources=sources + (second.sources or []),
            start=first.start,
            start_character=first.start_character,
        )
        return Event(self.choice, self.text + later.text, chunk)


class Generation:
    """Runs the texts of one request. A context manager that cancels unfinished ones at its end."""

    def __init__(
        self,
        service: Service,
        wanted: Sequence[Submit],
        receive: Receive,
        timeout: float,
        key: str = "",
        limits: Callable[[], TextLimit] | None = None,
        scored: Sequence[Submit] = (),
    ) -> None:
        """Accept the requests of a client's `key`, or raise ApiError.

        `receive` reports the client's disconnect, `timeout` is in seconds.

        `scored` are known texts whose log-probabilities are computed before any of `wanted` begins. All reserve queue
        room now, so that accepted requests are always finished.
        """
        num_tokens = sum(len(each.token_ids) for each in (*scored, *wanted))
        service.check_room(len(scored) + len(wanted), num_tokens, key)
        self._service = service
        self._receive = receive
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._inbox = Inbox()
        self.scored = [Choice(index, service.open(each, self._inbox, True)) for index, each in enumerate(scored)]
        self.choices = [
            Choice(index, service.open(each, self._inbox, not scored), limits() if limits is not None else None)
            for index, each in enumerate(wanted)
        ]
        self._all = [*self.scored, *self.choices]
        self._by_id: dict[RequestId, Choice] = {choice.job.id: choice for choice in self._all}
        self._gone: asyncio.Task[None] | None = None
        self.keeps_logprobs = True  # False for a stream, which shows each step's and needs them no more

    async def __aenter__(self) -> Generation:
        self._gone = asyncio.create_task(disconnected(self._receive))
        self._gone.add_done_callback(lambda _: self._inbox.wake())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()
        self._inbox.close()
        if self._gone is not None:
            self._gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._gone

    def cancel(self) -> None:
        for choice in self._all:
            self._service.cancel(choice.job)

    def stop(self) -> None:
        for choice in self._all:
            if choice.finish_reason is None:
                self._service.cancel(choice.job)
                self._inbox.put(Chunk(choice.job.id, [], "", "abort"))

    async def events(self, keep_alive: float | None = None) -> AsyncIterator[Event | None]:
        """Every step of every choice until all are finished; None after each `keep_alive` seconds without one.

        Raises DisconnectedError, and ApiError if the time is up or scoring fails.
        """
        while any(choice.finish_reason is None for choice in self._all):
            chunk = await self._next(keep_alive)
            event = self._take(chunk) if chunk is not None else None
            if event is not None or chunk is None:
                yield event

    async def collected(self, interval: float) -> AsyncIterator[Event | None]:
        """As `events`, with the steps that a choice has in `interval` seconds as one event; None if there are none."""
        assert self._gone is not None
        due = time.monotonic()
        while any(choice.finish_reason is None for choice in self._all):
            due = max(due + interval, time.monotonic())
            wait = min(due, self._deadline) - time.monotonic()
            await asyncio.wait({self._gone}, timeout=max(0.0, wait))
            if self._gone.done():
                raise DisconnectedError
            if not self._inbox:
                self._check_time()
            joined: dict[tuple[int, bool], Event] = {}  # a failure is not joined: it ends the stream
            for each in [self._take(self._inbox.take()) for _ in range(len(self._inbox))]:
                if each is not None:
                    place = each.choice.index, each.chunk.failure is not None
                    joined[place] = joined[place].joined(each) if place in joined else each
            for event in joined.values() or (None,):
                yield event

    async def finish(self) -> None:
        """Wait for all choices; raises DisconnectedError or ApiError."""
        async for _ in self.events():
            pass
        for choice in self.choices:
            if choice.error is not None:
                raise choice.error

    async def _next(self, keep_alive: float | None) -> Chunk | None:
        assert self._gone is not None
        if not self._inbox and not self._gone.done():
            left = self._deadline - time.monotonic()
            await self._inbox.wait(max(0.0, left if keep_alive is None else min(left, keep_alive)))
        if self._gone.done():
            raise DisconnectedError
        if self._inbox:
            return self._inbox.take()
        self._check_time()
        return None

    def _check_time(self) -> None:
        if time.monotonic() >= self._deadline:
            raise ApiError(ErrorCode.TIMEOUT, f"not finished within --request-timeout {self._timeout:g} s")

    def _take(self, chunk: Chunk) -> Event | None:
        choice = self._by_id[chunk.id]
        if choice.finish_reason is not None:
            return None
        if choice.is_complete:
            if chunk.finish_reason is None:  # from a step that began before the ranks were told
                return None
            chunk = Chunk(chunk.id, [], "", "stop", usage=chunk.usage)
        choice.num_steps += bool(chunk.token_ids)
        text, finish = chunk.text, chunk.finish_reason
        if choice.limit is not None and not choice.is_complete:
            text, ended = choice.limit(text, finish is not None)
            if ended and finish is None:
                choice.is_complete = True
                self._service.finish(choice.job)
            elif ended:
                finish = "stop"
        choice.text += text
        choice.token_ids += chunk.token_ids
        if self.keeps_logprobs or choice.job.is_scoring:
            choice.logprobs += chunk.logprobs or []
        choice.sources += chunk.sources or []
        choice.finish_reason = finish
        if chunk.failure is not None:
            choice.error = ApiError(chunk.failure.code, chunk.failure.message)
        choice.stop_reason = chunk.stop_reason
        choice.usage = chunk.usage or choice.usage
        if not choice.job.is_scoring:
            return Event(choice, text, chunk)
        if choice.error is not None:
            raise choice.error
        if all(each.finish_reason is not None for each in self.scored):
            for each in self.choices:  # they begin after the last scored one
                self._service.release(each.job)
        return None


async def disconnected(receive: Receive) -> None:
    """Return once the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
