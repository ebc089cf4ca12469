"""Requests as the simulation sees them, and when they come."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(eq=False, slots=True)
class SimRequest:
    """A request without text: what the scheduler must know of it, and when its tokens came. Times in seconds."""

    arrived: float
    num_prompt: int
    num_output: int
    """Tokens that it will emit."""
    temperature: float = 0.0
    pace: float = 1.0
    """Its tokens per step over those of the average request."""
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    """Per rank: leading tokens whose K/V it holds."""
    homes: list[int] = field(default_factory=list)
    """The ranks that serve it; written by the scheduler, as are its slots."""
    first: float | None = None
    """When its first token came."""
    ended: float = 0.0
    num_steps: int = 0
    """Decoding steps."""
    num_nodes: int = 0
    """Nodes of their trees."""
    priority: int = 0
    tenant: str = ""
    slots: list[int] = field(default_factory=list)
    arrived_ms: float = 0.0
    """On the scheduler's own clock."""

    @property
    def num_pending(self) -> int:
        """Tokens that some home rank lacks the K/V of, the root included."""
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
        """Tokens that it has still to emit."""
        return self.num_prompt + self.num_output - len(self.tokens)

    @property
    def first_seconds(self) -> float:
        """Time to the first token."""
        return (self.first or 0.0) - self.arrived

    @property
    def token_seconds(self) -> float:
        """Mean time per token after the first step."""
        return (self.ended - (self.first or 0.0)) / max(1, self.num_output - 1)


class Arrivals(Protocol):
    """When requests come; `begin` is told when one is asked for anew."""

    def due(self, now: float) -> list[SimRequest]:
        """The requests that have come by `now` and were not returned before."""
        ...

    def upcoming(self) -> float | None:
        """When the next one comes; None: no further one is known of."""
        ...

    def ended(self, request: SimRequest) -> None:
        """Take note that a request has been answered."""
        ...


class PoissonArrivals:
    """Requests that come at random times, whatever the others do."""

    def __init__(self, rate: float, number: int, make: Callable[[float], SimRequest], dice: random.Random) -> None:
        """`number` requests, `rate` a second on average; `make` makes the one that comes at a time."""
        now, self._waiting = 0.0, deque[SimRequest]()
        for _ in range(number):
            self._waiting.append(make(now))
            now += dice.expovariate(rate)

    def due(self, now: float) -> list[SimRequest]:
        """As Arrivals says."""
        found = []
        while self._waiting and self._waiting[0].arrived <= now:
            found.append(self._waiting.popleft())
        return found

    def upcoming(self) -> float | None:
        """As Arrivals says."""
        return self._waiting[0].arrived if self._waiting else None

    def ended(self, request: SimRequest) -> None:
        """Nobody waits for an answer."""


class ClosedArrivals:
    """Clients that ask again as soon as they are answered."""

    def __init__(self, clients: int, number: int, make: Callable[[float], SimRequest]) -> None:
        """`number` requests in all, at most `clients` of them open."""
        self._make, self._left = make, number
        self._waiting: deque[SimRequest] = deque()
        for _ in range(clients):
            self._ask(0.0)

    def due(self, now: float) -> list[SimRequest]:
        """As Arrivals says."""
        found, self._waiting = list(self._waiting), deque()
        return found

    def upcoming(self) -> float | None:
        """As Arrivals says."""
        return self._waiting[0].arrived if self._waiting else None

    def ended(self, request: SimRequest) -> None:
        """Its client asks again."""
        self._ask(request.ended)

    def _ask(self, now: float) -> None:
        if self._left:
            self._left -= 1
            self._waiting.append(self._make(now))
