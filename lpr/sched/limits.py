"""The inputs of a scheduler: its view of a request, its limits, and latency targets.

*Goodput* is the number of requests per second that meet the targets for time to first token and time per token
(DistServe, Zhong et al., OSDI 2024). An admitted request slows down the other requests of its ranks, and a chunk of a
prompt makes the step of all ranks longer. So a request waits while its admission would make others miss their time per
token, and chunks are limited so that decoding requests keep theirs. Among waiting requests, those that can still meet
their time to first token come first.

Pure: the clock is the sum of the expected times of the steps taken. All ranks have the same step times and took the
same steps, so all clocks agree. A request's wait is measured from the step after its arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from lpr.config import PAGE_SIZE
from lpr.sched.homes import Seen, rate, speedup, yield_of

if TYPE_CHECKING:
    from lpr.core.step_times import StepTimes

SHORTEST_FILL = 32
"""Least tokens per step that a rank computes of a request that it joins; with fewer it would never catch up."""
LONGEST_STILL_MS = 500.0  # longest step with prompt chunks while other requests decode
SHORTEST_CHUNK = 512  # prompt tokens always allowed per step: smaller chunks cost more per token
DEARER = 0.05  # how much longer per token a smaller prompt chunk may take, for an earlier first token
ANY_NUMBER = 1 << 30  # `home_ranks="auto"`: no limit on the home ranks of a request


class Schedulable(Protocol):
    """A request, as the scheduler sees it."""

    num_prompt: int
    tenant: str  # K/V is shared among requests of one tenant only
    share: str  # requests of different shares get slots by weight (lpr.sched.fair_shares); "" without keys
    weight: float  # weight of its share
    charged: float  # steps that its share was charged when it got a slot; written by the queue
    priority: int
    arrived: float  # its arrival in seconds; orders the queue (lpr.sched.queue)
    arrived_ms: float  # when it came, on the clock of the targets; written by the scheduler
    homes: list[int]  # the ranks that serve it, ascending; written by the scheduler
    slots: list[int]  # per rank: its place in the batch, -1 where it has none; written by the scheduler
    admission: int  # Number of its admission; the last one admitted is preempted first. Written by the scheduler.
    num_preempted_tokens: int
    """Number of its computed tokens when it was preempted; 0 otherwise. Written by the scheduler."""
    num_cached_tokens: int
    """Prompt tokens taken from the prefix cache, at admission or later; written by the scheduler."""
    num_computed_tokens: list[int]
    """Per rank: leading tokens whose K/V is in the request's pages. Valid for running requests; the scheduler writes
    it for ranks that join or leave."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""

    @property
    def num_pending(self) -> int:
        """Most uncomputed tokens of any home rank, the root included; valid for running requests."""

    @property
    def num_left(self) -> int:
        """Most tokens that it may still emit."""

    @property
    def stats(self) -> Seen:
        """Its decode steps so far."""


R = TypeVar("R", bound=Schedulable)


@dataclass
class Targets(Generic[R]):
    """Latency targets and expected step times, in milliseconds."""

    times: Callable[[], StepTimes]  # the replicated step times
    nodes_per_rank: int  # most nodes of a tree on each of its ranks
    first_token_ms: float = math.inf
    per_token_ms: float = math.inf
    now: float = 0.0  # expected milliseconds of all steps taken

    def pass_step(self, loads: Sequence[int], num_rows: int, longest: int) -> None:
        """Advance the clock by a step in which rank r evaluated `loads[r]` tokens, of at most `num_rows` sequences."""
        self.now += self.times().time(max(1, *loads), max(1, num_rows), longest)

    def is_lost(self, request: R, num_lacking: int | None = None) -> bool:
        """True if a waiting request would miss its time to first token even if admitted now.

        `num_lacking` is its number of uncomputed tokens; default: all of its tokens.
        """
        length = len(request.tokens)
        took = self.times().time(length if num_lacking is None else num_lacking, 1, length)
        return self.now + took > request.arrived_ms + self.first_token_ms

    def token_ms(self, request: R, batch: int, width: int) -> float:
        """Expected milliseconds per token of a request on `width` ranks, each of which serves `batch` requests."""
        times, length = self.times(), len(request.tokens)
        gain = yield_of(request.stats)
        return 1.0 / rate(width, lambda count: times.time(count, batch, length), self.nodes_per_rank, gain, batch)

    def is_late(self, request: R, width: int) -> bool:
        """True if a request alone on `width` ranks misses its time per token."""
        return self.token_ms(request, 1, width) > self.per_token_ms

    def allow(self, requests: Sequence[R], batch: int, width: int) -> bool:
        """True if `requests` meet their time per token with `batch` requests on each of `width` ranks."""
        if batch <= 1 or self.per_token_ms == math.inf:
            return True
        return all(self.token_ms(each, batch, width) <= self.per_token_ms for each in requests)

    def chunk(self, decoding: Sequence[R], least: int, most: int, num_cached: int = 0) -> int:
        """Prompt tokens per step, from `least` to `most`, with which `decoding` requests meet their time per token.

        `num_cached` tokens precede the chunk: attention makes tokens far into a long prompt more expensive.
        """
        if not decoding or self.per_token_ms == math.inf:
            return most
        longest = max(len(each.tokens) for each in decoding)
        stats = [each.stats for each in decoding]
        nodes = sum(each.num_nodes / each.num_steps if each.num_steps else 1.0 for each in stats)
        slowest = min(each.num_tokens / each.num_steps if each.num_steps else 1.0 for each in stats)
        times, limit = self.times(), self.per_token_ms * slowest

        def milliseconds(count: int) -> float:
            together = times.time(nodes + count, len(decoding), longest)
            far = times.time(count, 1, num_cached + count) - times.time(count, 1)
            return together + max(0.0, far)

        while most > least and milliseconds(most) > limit:
            most = max(least, most // 2)
        return most


@dataclass
class Limits(Generic[R]):
    """Limits on running requests, their ranks, and the tokens of a step."""

    num_slots: int  # most requests that run at once on each rank
    num_ranks: int
    prefill_chunk: int  # most tokens that a rank spends in a step on pending chains longer than a tree
    longest_chain: int  # most tokens above the root in a pending chain that is evaluated together with a tree
    packed: bool
    """True if sequences of unequal length are evaluated without padding. Else prefill and decode steps alternate."""
    retains: bool = True  # True if the prefix cache is on
    most_homes: int = 0  # most home ranks of a request; 0: always all ranks that evaluate trees
    drafting: Sequence[int] = ()  # draft-only ranks, which are no request's home rank
    join_chunk: int | None = None
    """Most tokens per step that a rank computes of a request that it joins; default: `prefill_chunk`."""
    calm_chunk: Callable[[], int] | None = None
    """Most prompt tokens per rank and step while other requests decode; None: `prefill_chunk`."""
    cheap_chunk: Callable[[], int] | None = None
    """Prompt tokens per step beyond which the cost per token no longer falls, so that prompts are then computed one
    after the other; None: unknown."""
    speedup: Callable[[R, int], float] | None = None
    """Speedup of a request on one more rank than the given number; None: one more rank always pays."""
    targets: Targets[R] | None = None
    num_pages: int = 1 << 16  # pages of each rank's KV cache
    page_size: int = PAGE_SIZE  # tokens of a page
    num_host_pages: int = 0  # pages of each rank in host memory; 0: preempted requests are recomputed
    num_snapshots: int | None = None
    """Snapshots of recurrent states per rank (lpr.sched.state_snapshots); None: the model has no recurrent layers."""
    num_ahead: int = 0  # cache rows after its tokens that a decoding request needs for a step's tree

    @property
    def serving(self) -> list[int]:
        """The ranks that evaluate trees."""
        return [rank for rank in range(self.num_ranks) if rank not in self.drafting]

    @property
    def num_serving(self) -> int:
        return self.num_ranks - len(self.drafting)

    @property
    def is_elastic(self) -> bool:
        """True if a request may have fewer home ranks than there are ranks."""
        return self.num_serving > 1 and self.most_homes > 0

    @property
    def capacity(self) -> int:
        """Most requests that can run at once."""
        return self.num_slots * (self.num_serving if self.is_elastic else 1)

    @property
    def joining(self) -> int:
        """Most tokens per step that a rank computes of a request that it joins."""
        return self.prefill_chunk if self.join_chunk is None else min(self.join_chunk, self.prefill_chunk)

    @property
    def cheap(self) -> int:
        """Most uncomputed tokens that a rank evaluates together with a tree."""
        return min(self.longest_chain, self.joining)

    def decide_by(
        self, times: Callable[[], StepTimes], nodes_per_rank: int, first_token_ms: float, per_token_ms: float
    ) -> None:
        """Use step times to decide the number of home ranks, prompt chunks, and (by the targets) admissions.

        A target of inf is none. `nodes_per_rank` is the most nodes of a tree per rank. The clock of earlier targets is
        kept.
        """

        def factor(request: R, width: int) -> float:
            now, length = times(), len(request.tokens)
            return speedup(width, lambda count: now.time(count, 1, length), nodes_per_rank, request.stats)

        self.speedup = factor
        self.cheap_chunk = lambda: times().cheap_tokens(DEARER)
        self.calm_chunk = lambda: max(SHORTEST_CHUNK, times().most_tokens(LONGEST_STILL_MS))
        if min(first_token_ms, per_token_ms) < math.inf:
            now = self.targets.now if self.targets is not None else 0.0
            self.targets = Targets(times, nodes_per_rank, first_token_ms, per_token_ms, now)
