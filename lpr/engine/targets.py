"""Targets: the time to the first token and the time per token that a service wants kept, and what they decide.

*Goodput* is the number of requests a second that keep both (DistServe, Zhong et al., OSDI 2024). A request that is
admitted slows down those that run on its ranks, and a prompt that is filled makes a step of all ranks longer. So a
request waits while it would make others miss their time per token, and prompts are filled in pieces that leave them
theirs. Of those that wait, requests that can still have their first token in time come before those that cannot.

Pure: its clock is the sum of the times that the table of step times says of the steps taken. All ranks have the same
table and took the same steps, so all clocks agree. A request's wait counts from the step after which it came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from lpr.engine.homes import rate, yield_of

if TYPE_CHECKING:
    from lpr.core.step_times import StepTimes


class Timed(Protocol):
    """What targets must know of a request."""

    tokens: list[int]
    arrived_ms: float
    """On the clock of the targets; written by the scheduler."""


R = TypeVar("R", bound=Timed)


@dataclass(frozen=True)
class Seen:
    """What a request's steps have told of it."""

    num_steps: int
    num_tokens: int
    num_nodes: int


@dataclass
class Targets(Generic[R]):
    """What is promised, and what steps are expected to take."""

    times: Callable[[], StepTimes]
    """The table that all ranks decide by."""
    seen: Callable[[R], Seen]
    nodes_per_rank: int
    """Most nodes of a tree on each of its ranks."""
    first_token_ms: float = math.inf
    per_token_ms: float = math.inf
    now: float = 0.0
    """Milliseconds of all steps taken, by the table."""

    def pass_step(self, loads: Sequence[int], num_rows: int, longest: int) -> None:
        """Move the clock by a step in which ranks evaluated so many tokens, of `num_rows` sequences at most."""
        self.now += self.times().time(max(1, *loads), max(1, num_rows), longest)

    def is_lost(self, request: R) -> bool:
        """Can a waiting request not have its first token in time any more, even if it begins now?"""
        took = self.times().time(len(request.tokens), 1, len(request.tokens))
        return self.now + took > request.arrived_ms + self.first_token_ms

    def token_ms(self, request: R, batch: int, width: int) -> float:
        """Expected time per token of a request that `width` ranks serve, where `batch` requests are."""
        seen = self.seen(request)
        times, length = self.times(), len(request.tokens)
        grown = yield_of(seen.num_steps, seen.num_tokens, seen.num_nodes)
        return 1.0 / rate(width, lambda count: times.time(count, batch, length), self.nodes_per_rank, grown, batch)

    def allow(self, requests: Sequence[R], batch: int, width: int) -> bool:
        """May `batch` requests run on each of `width` ranks, these among them?"""
        if batch <= 1 or self.per_token_ms == math.inf:
            return True
        return all(self.token_ms(each, batch, width) <= self.per_token_ms for each in requests)

    def chunk(self, decoding: Sequence[R], least: int, most: int) -> int:
        """Tokens of prompts, from `least` to `most`, beside which these requests keep their time per token."""
        if not decoding or self.per_token_ms == math.inf:
            return most
        longest = max(len(each.tokens) for each in decoding)
        seen = [self.seen(each) for each in decoding]
        nodes = sum(each.num_nodes / each.num_steps if each.num_steps else 1.0 for each in seen)
        slowest = min(each.num_tokens / each.num_steps if each.num_steps else 1.0 for each in seen)
        times = self.times()
        while most > least and times.time(nodes + most, len(decoding), longest) > self.per_token_ms * slowest:
            most = max(least, most // 2)
        return most
