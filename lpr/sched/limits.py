"""What a scheduler is told: how a request looks to it, its limits, and the times that a service wants kept.

*Goodput* is the number of requests a second that keep the time to the first token and the time per token (DistServe,
Zhong et al., OSDI 2024). An admitted request slows down the others of its ranks, and filling a prompt makes a step of
all ranks longer. So a request waits while it would make others miss their time per token, and prompts are filled in
pieces that leave the others theirs. Of the waiting requests, those that can still have their first token in time come
first.

Pure: the clock is the sum of the expected times of the steps taken. All ranks have the same step times and took the
same steps, so all clocks agree. A request's wait counts from the step after which it came.
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
"""Tokens that a rank computes at least in a step of a request that it joins, or it would never catch up."""
LONGEST_STILL_MS = 500.0  # longest step with prompts while other requests decode: their texts stand still meanwhile
SHORTEST_CHUNK = 512  # tokens of prompts that a step may have although it takes longer: fewer cost more each
DEARER = 0.05  # part by which a token of a prompt may take longer in a step of fewer, for a sooner first token
ANY_NUMBER = 1 << 30  # `home_ranks="auto"`: no limit on the home ranks of a request


class Schedulable(Protocol):
    """A request as it is scheduled."""

    tokens: list[int]  # prompt and output so far
    num_prompt: int
    tenant: str  # K/V is shared among requests of one tenant only
    share: str  # requests of different shares get slots by weight (lpr.sched.fair_shares); "" without keys
    weight: float  # of its share
    charged: float  # steps that its share was charged when it got a slot; written by the queue
    priority: int
    arrived: float  # its arrival in seconds; orders the queue (lpr.sched.queue)
    arrived_ms: float  # when it came, on the clock of the targets; written by the scheduler
    homes: list[int]  # the ranks that serve it, ascending; written by the scheduler
    slots: list[int]  # per rank: its place in the batch, -1 where it has none; written by the scheduler
    admission: int  # Number of its admission; the last one admitted is preempted first. Written by the scheduler.
    num_preempted_tokens: int
    """Tokens whose K/V it had when it was preempted, until it runs again; written by the scheduler."""
    num_cached_tokens: int
    """Tokens whose K/V it found computed when it was admitted, or later by others; written by the scheduler."""
    num_computed_tokens: list[int]
    """Per rank: leading tokens whose K/V it holds in the request's pages. Read of running requests only; the scheduler
    writes it for ranks that join or leave."""

    @property
    def num_pending(self) -> int:
        """Uncomputed tokens of the home rank that lacks most, the root included; read of running requests only."""

    @property
    def num_left(self) -> int:
        """Most tokens that it may still emit."""

    @property
    def stats(self) -> Seen:
        """Its decode steps so far."""


R = TypeVar("R", bound=Schedulable)


@dataclass
class Targets(Generic[R]):
    """The promised times, and the times that steps are expected to take, in milliseconds."""

    times: Callable[[], StepTimes]  # the step times that all ranks decide by
    nodes_per_rank: int  # most nodes of a tree on each of its ranks
    first_token_ms: float = math.inf
    per_token_ms: float = math.inf
    now: float = 0.0  # expected milliseconds of all steps taken

    def pass_step(self, loads: Sequence[int], num_rows: int, longest: int) -> None:
        """Advance the clock by a step in which ranks evaluated `loads` tokens, of `num_rows` sequences at most."""
        self.now += self.times().time(max(1, *loads), max(1, num_rows), longest)

    def is_lost(self, request: R, num_lacking: int | None = None) -> bool:
        """True if a waiting request misses its first token's target even if it begins now.

        It has to compute `num_lacking` tokens; default: all of its own.
        """
        length = len(request.tokens)
        took = self.times().time(length if num_lacking is None else num_lacking, 1, length)
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

    def chunk(self, decoding: Sequence[R], least: int, most: int, num_cached: int = 0) -> int:
        """Tokens of prompts per step, from `least` to `most`, that leave `decoding` requests their time per token.

        `num_cached` tokens are in front of them: far into a long prompt, attention makes each token dearer.
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
    """How many requests run, on how many ranks, and how many tokens a step computes."""

    num_slots: int  # most requests that run at once on each rank
    num_ranks: int
    prefill_chunk: int  # most tokens that a rank spends in a step on pending chains longer than a tree
    longest_chain: int  # a pending chain of up to so many tokens above the root is evaluated together with a tree
    packed: bool
    """True if unequal rows are evaluated without padding. Else a chunk is filled by itself, in turn with decoding."""
    retains: bool = True  # True if requests share the pages of equal prefixes, also of finished ones
    most_homes: int = 0  # most home ranks of a request; 0: always all ranks that evaluate trees
    drafting: Sequence[int] = ()  # ranks that only draft, and are no request's home
    join_chunk: int | None = None
    """Most tokens that a rank spends in a step on a request that others decode; default: `prefill_chunk`."""
    calm_chunk: Callable[[], int] | None = None
    """Most tokens that a rank spends on long chains in a step in which other requests decode; None: `prefill_chunk`."""
    cheap_chunk: Callable[[], int] | None = None
    """Prompt tokens of a step beyond which further ones cost as much each, so prompts are filled one after the other;
    None: unknown."""
    speedup: Callable[[R, int], float] | None = None
    """Factor by which one more rank than so many speeds a request up; None: any rank is worth it."""
    targets: Targets[R] | None = None
    num_pages: int = 1 << 16  # pages of each rank's KV cache
    page_size: int = PAGE_SIZE  # tokens of a page
    num_host_pages: int = 0  # pages of each rank in host memory; 0 if what is preempted is computed again
    num_snapshots: int | None = None
    """Snapshots of recurrent states on each rank (lpr.sched.state_snapshots); None: the model has no such states."""
    num_ahead: int = 0  # rows behind its tokens that a decoding request needs for a step's tree

    @property
    def serving(self) -> list[int]:
        """The ranks that evaluate trees."""
        return [rank for rank in range(self.num_ranks) if rank not in self.drafting]

    @property
    def num_serving(self) -> int:
        return self.num_ranks - len(self.drafting)

    @property
    def is_elastic(self) -> bool:
        """True if a request may have fewer ranks than there are."""
        return self.num_serving > 1 and self.most_homes > 0

    @property
    def capacity(self) -> int:
        """Most requests that can run at once."""
        return self.num_slots * (self.num_serving if self.is_elastic else 1)

    @property
    def joining(self) -> int:
        """Most tokens that a rank spends in a step on a request that it joins."""
        return self.prefill_chunk if self.join_chunk is None else min(self.join_chunk, self.prefill_chunk)

    @property
    def cheap(self) -> int:
        """A rank that lacks no more tokens than this evaluates them together with a tree."""
        return min(self.longest_chain, self.joining)

    def decide_by(
        self, times: Callable[[], StepTimes], nodes_per_rank: int, first_token_ms: float, per_token_ms: float
    ) -> None:
        """Let step times decide how many ranks a request gets, how much of prompts a step computes, and admissions.

        Admissions go by these targets (inf: no target).

        `nodes_per_rank` is the largest tree's on each of its ranks. The clock of earlier targets goes on.
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
