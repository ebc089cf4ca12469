"""Streams and events of the pretend GPU: which work is known to have ended before which.

Work runs when it is launched, in the order of the launches, so results never depend on luck. What a GPU leaves open is
found by clocks, as torch/cuda/_sanitizer.py does it: each stream, and the host, know of every stream how much of its
work has ended. An access that does not come after the last write of its memory, or a write that does not come after its
reads, is a RaceError.

A collective that waits for other ranks holds up the streams that wait for it: a copy to pinned memory is launched
behind it, and any other work waits on the host, which stands still until the collective has ended.

Order is made by what the CUDA C++ Programming Guide names ("Asynchronous Concurrent Execution": streams, events,
explicit synchronization): work of one stream is in order; a launch comes after all that the host has waited for; a
stream or the host waits for an event or a stream. Streams of torch are non-blocking (c10/cuda/CUDAStream.cpp), so that
the default stream orders nothing. Not imitated: work that overlaps, priorities, and how long anything takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

_numbers = itertools.count()


class RaceError(RuntimeError):
    """Two pieces of work use the same memory, and nothing orders them."""


class Clock(dict[int, int]):
    """By stream, how many pieces of its work are known to have ended."""

    def learn(self, other: Clock) -> None:
        for stream, count in other.items():
            if count > self.get(stream, 0):
                self[stream] = count


class Streams:
    """The streams of one GPU as one thread uses them."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        """`on_wait` is called when the host has waited for something."""
        self.host = Clock()
        self.default = self.current = Stream(self)
        self._on_wait = on_wait

    def host_waits(self, clock: Clock) -> None:
        """The host has waited for what a clock knows."""
        self.host.learn(clock)
        self._on_wait()

    def knows(self, stream: int, count: int) -> bool:
        """True if the host knows that so many pieces of work of a stream have ended."""
        return self.host.get(stream, 0) >= count


class Stream:
    """As torch.cuda.Stream."""

    def __init__(self, streams: Streams) -> None:
        self.number, self.clock, self._streams = next(_numbers), Clock(), streams
        self.held_up: list[Any] = []
        """Collectives that it waits for."""

    def launch(self) -> int:
        """Begin a piece of work; returns its number in this stream."""
        self.clock.learn(self._streams.host)
        self.clock[self.number] = self.clock.get(self.number, 0) + 1
        return self.clock[self.number]

    def wait_event(self, event: Event) -> None:
        self.clock.learn(event.clock)
        self.held_up += event.held_up

    def wait_stream(self, other: Stream) -> None:
        self.clock.learn(other.clock)
        self.held_up += other.held_up

    def settle(self) -> None:
        """The host waits for what holds the stream up; raises the error of a collective."""
        while self.held_up:
            self.held_up.pop().finish()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._streams)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.settle()
        self._streams.host_waits(self.clock)


class Event:
    """As torch.cuda.Event; one that was never recorded is complete."""

    def __init__(self, streams: Streams) -> None:
        self.clock, self._streams = Clock(), streams
        self.held_up: list[Any] = []

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._streams.current
        self.clock, self.held_up = Clock(stream.clock), list(stream.held_up)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def query(self) -> bool:
        if not all(each.is_completed() for each in self.held_up):
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        for each in self.held_up:
            each.finish()
        self._streams.host_waits(self.clock)


class Uses:
    """The last write of some memory and the reads since."""

    def __init__(self) -> None:
        self.write, self.reads = (-1, 0), Clock()

    def read(self, stream: Stream, what: Any) -> None:
        """A piece of work of `stream`, launched just now, reads the memory."""
        self._check(stream, [self.write], f"{what} reads")
        self.reads[stream.number] = stream.clock[stream.number]

    def written(self, stream: Stream, what: Any) -> None:
        """It writes the memory."""
        self._check(stream, [self.write, *self.reads.items()], f"{what} writes")
        self.write, self.reads = (stream.number, stream.clock[stream.number]), Clock()

    def unknown_to(self, stream: Stream) -> set[int]:
        """Streams that may still use the memory, as far as a stream knows."""
        return {other for other, count in [self.write, *self.reads.items()] if stream.clock.get(other, 0) < count}

    def _check(self, stream: Stream, before: list[tuple[int, int]], what: str) -> None:
        for other, count in before:
            if stream.clock.get(other, 0) < count:
                raise RaceError(f"{what} what stream {other} uses, and stream {stream.number} has not waited for it")
