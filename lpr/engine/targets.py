"""Targets: the time to the first token and the time per token that a service wants kept, and what they decide.

*Goodput* is the number of requests a second that keep both (DistServe, Zhong et al., OSDI 2024). An admitted request
slows down the others of its ranks, and filling a prompt makes a step of all ranks longer. So a request waits while it
would make others miss their time per token, and prompts are filled in pieces that leave the others theirs. Of the
waiting requests, those that can still have their first token in time come first.

Pure: the clock is the sum of the expected times of the steps taken. All ranks have the same step times and took the
same steps, so all clocks agree. A request's wait counts from the step after which it came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from lpr.engine.homes import rate, yield_of
from lpr.engine.schedulable import Schedulable

if TYPE_CHECKING:
    from lpr.core.step_times import StepTimes

R = TypeVar("R", bound=Schedulable)


@dataclass
class Targets(Generic[R]):
    """The promised times, and the times that steps are expected to take, in milliseconds."""

    times: Callable[[], StepTimes]
    """The step times that all ranks decide by."""
    nodes_per_rank: int
    """Most nodes of a tree on each of its ranks."""
    first_token_ms: float = math.inf
    per_token_ms: float = math.inf
    now: float = 0.0
    """Expected milliseconds of all steps taken."""

    def pass_step(self, loads: Sequence[int], num_rows: int, longest: int) -> None:
        """Advance the clock by a step in which ranks evaluated `loads` tokens, of `num_rows` sequences at most."""
        self.now += self.times().time(max(1, *loads), max(1, num_rows), longest)

    def is_lost(self, request: R) -> bool:
        """True if a waiting request misses its first token's target even if it begins now."""
        took = self.times().time(len(request.tokens), 1, len(request.tokens))
        return self.now + took > request.arrived_ms + self.first_token_ms

    def token_ms(self, request: R, batch: int, width: int) -> float:
        """Expected time per token of a request that `width` ranks serve, each of which serves `batch` requests."""
        times, length = self.times(), len(request.tokens)
        gain = yield_of(request.stats)
        return 1.0 / rate(width, lambda count: times.time(count, batch, length), self.nodes_per_rank, gain, batch)

    def is_late(self, request: R, width: int) -> bool:
        """True if a request is slower than promised on `width` ranks of its own."""
        return self.token_ms(request, 1, width) > self.per_token_ms

    def allow(self, requests: Sequence[R], batch: int, width: int) -> bool:
        """True if `requests` keep their time per token where `batch` requests run on each of `width` ranks."""
        if batch <= 1 or self.per_token_ms == math.inf:
            return True
        return all(self.token_ms(each, batch, width) <= self.per_token_ms for each in requests)

    def chunk(self, decoding: Sequence[R], least: int, most: int) -> int:
        """Tokens of prompts per step, from `least` to `most`, that leave `decoding` requests their time per token."""
        if not decoding or self.per_token_ms == math.inf:
            return most
        longest = max(len(each.tokens) for each in decoding)
        stats = [each.stats for each in decoding]
        nodes = sum(each.num_nodes / each.num_steps if each.num_steps else 1.0 for each in stats)
        slowest = min(each.num_tokens / each.num_steps if each.num_steps else 1.0 for each in stats)
        times = self.times()
        while most > least and times.time(nodes + most, len(decoding), longest) > self.per_token_ms * slowest:
            most = max(least, most // 2)
        return most
