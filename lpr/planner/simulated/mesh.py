"""One mesh: its scheduler's steps one after the other, on a clock that a policy moves.

`simulate_mesh` brings three things together. *Arrivals*: a Poisson process, or clients that wait for answers. The
*scheduler*: the one that serves. A *policy*: the time of each step and its tokens per request.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import add

from lpr.engine.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class SimRequest:
    """A request without text: what the scheduler reads, and the times of its tokens in seconds."""

    arrived: float
    num_prompt: int
    num_output: int
    """Tokens that it will emit."""
    temperature: float = 0.0
    pace: float = 1.0
    """Its tokens per step relative to the average request."""
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    """Per rank: leading tokens whose K/V it holds."""
    homes: list[int] = field(default_factory=list)
    """The ranks that serve it; written by the scheduler, as are its slots."""
    first: float | None = None
    """Time of its first token."""
    ended: float = 0.0
    num_steps: int = 0
    """Decode steps."""
    num_nodes: int = 0
    """Nodes of their trees."""
    num_fill_steps: int = 0
    """Not counted: all requests have one share."""
    priority: int = 0
    tenant: str = ""
    share: str = ""
    weight: float = 1.0
    charged: float = 0.0
    slots: list[int] = field(default_factory=list)
    admission: int = 0
    num_cached_tokens: int = 0
    num_preempted_tokens: int = 0
    arrived_ms: float = 0.0
    """On the scheduler's own clock."""

    @property
    def num_pending(self) -> int:
        """Uncomputed tokens of the home rank that lacks most, the root included."""
        return len(self.tokens) - min(self.num_computed_tokens[rank] for rank in self.homes)

    @property
    def num_tokens(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def stats(self) -> SimRequest:
        """Its decode steps so far."""
        return self

    @property
    def num_left(self) -> int:
        """Tokens still to be emitted."""
        return self.num_prompt + self.num_output - len(self.tokens)

    def emit(self, count: int, now: float) -> None:
        """Emit `count` tokens, or as many as are left, at time `now`."""
        self.first = now if self.first is None else self.first
        self.ended = now
        self.num_steps += 1
        self.tokens.extend([self.tokens[-1]] * min(count, self.num_left))
        for rank in self.homes:
            self.num_computed_tokens[rank] = len(self.tokens) - 1

    @property
    def first_seconds(self) -> float:
        """Time to the first token."""
        return (self.first or 0.0) - self.arrived

    @property
    def token_seconds(self) -> float:
        """Mean time per token after the first step."""
        return (self.ended - (self.first or 0.0)) / max(1, self.num_output - 1)


class Arrivals:
    """Requests in the order in which they arrive; by itself independent of each other's answers."""

    def __init__(self, requests: Iterable[SimRequest] = ()) -> None:
        """These requests, by ascending `arrived`."""
        self._waiting = deque(requests)

    def due(self, now: float) -> Iterator[SimRequest]:
        """The requests that arrived by `now` and were not returned before."""
        while self._waiting and self._waiting[0].arrived <= now:
            yield self._waiting.popleft()

    def upcoming(self) -> float | None:
        """The time of the next arrival; None if no further one is known."""
        return self._waiting[0].arrived if self._waiting else None

    def ended(self, request: SimRequest) -> None:
        """Take note that a request has been answered."""


class PoissonArrivals(Arrivals):
    """`number` requests at random times, `rate` a second on average; `make` makes the request of a time."""

    def __init__(self, rate: float, number: int, make: Callable[[float], SimRequest], dice: random.Random) -> None:
        super().__init__()
        now = 0.0
        for _ in range(number):
            self._waiting.append(make(now))
            now += dice.expovariate(rate)


class ClosedArrivals(Arrivals):
    """Clients that ask again as soon as they are answered: `number` requests in all, at most `clients` at once."""

    def __init__(self, clients: int, number: int, make: Callable[[float], SimRequest]) -> None:
        super().__init__(make(0.0) for _ in range(min(clients, number)))
        self._make, self._left = make, number - len(self._waiting)

    def ended(self, request: SimRequest) -> None:
        """Let the client of `request` ask again."""
        if self._left:
            self._left -= 1
            self._waiting.append(self._make(request.ended))


Policy = Callable[[Sequence[SimRequest], Sequence[tuple[SimRequest, Sequence[int]]]], tuple[float, Sequence[int]]]
"""Seconds of a step over requests that decode and that fill, and the tokens that it brings to each decoding one.

These are at least one each. A decoding request also evaluates the uncomputed tokens of its home ranks, which the
scheduler chooses; one that fills evaluates so many of its own, per rank.
"""


def simulate_mesh(arrivals: Arrivals, policy: Policy, scheduler: Scheduler[SimRequest]) -> list[SimRequest]:
    """Serve all `arrivals` on one mesh; returns the requests as they end. Deterministic, if arrivals and policy are."""
    now, done = 0.0, list[SimRequest]()
    while True:
        for request in arrivals.due(now):
            scheduler.add(request)
        if scheduler.is_idle:
            if (upcoming := arrivals.upcoming()) is None:
                return done
            now = max(now, upcoming)
            continue
        now += _step(scheduler, policy, now)
        for request in [each for each in scheduler.running if each.num_left == 0]:
            scheduler.finish(request)
            arrivals.ended(request)
            done.append(request)


def _step(scheduler: Scheduler[SimRequest], policy: Policy, now: float) -> float:
    """Seconds of a step that begins at `now`."""
    while (admitted := scheduler.admit()) is not None:
        admitted[0].num_computed_tokens = list(admitted[1])
    schedule = scheduler.schedule()
    scheduler.take_moves()
    if schedule.is_empty:
        return 0.0
    seconds, emitted = policy(schedule.decoding, schedule.filling)
    if scheduler.limits.targets is not None:
        scheduler.limits.targets.now += 1e3 * seconds
    for request, counts in schedule.filling:
        request.num_computed_tokens = list(map(add, request.num_computed_tokens, counts))
    for request, count in zip(schedule.decoding, emitted, strict=True):
        request.emit(count, now + seconds)
    scheduler.end_step()
    return seconds
