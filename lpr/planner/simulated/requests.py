"""Simulated requests, and when they arrive."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field


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
    priority: int = 0
    tenant: str = ""
    slots: list[int] = field(default_factory=list)
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

    def due(self, now: float) -> list[SimRequest]:
        """The requests that arrived by `now` and were not returned before."""
        found = []
        while self._waiting and self._waiting[0].arrived <= now:
            found.append(self._waiting.popleft())
        return found

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
