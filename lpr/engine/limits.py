"""The limits of a scheduler, and what it expects of more ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from lpr.config import DecodeConfig, TreeSizes
from lpr.engine.homes import speedup
from lpr.engine.schedulable import Schedulable
from lpr.engine.targets import Targets

if TYPE_CHECKING:
    from lpr.core.step_times import StepTimes

SHORTEST_FILL = 32
"""Tokens that a rank computes at least in a step of a request that it joins, or it would never catch up."""
ANY_NUMBER = 1 << 30
"""`home_ranks="auto"`: no limit on the home ranks of a request."""

R = TypeVar("R", bound=Schedulable)


@dataclass
class Limits(Generic[R]):
    """How many requests run, on how many ranks, and how many tokens a step computes."""

    num_slots: int
    """Of each rank."""
    num_ranks: int
    prefill_chunk: int
    """Most tokens that a rank spends in a step on pending chains longer than a tree."""
    longest_chain: int
    """A pending chain of up to so many tokens above the root is evaluated together with a tree."""
    packed: bool
    """True if unequal rows are evaluated without padding. Else a chunk is filled by itself, in turn with decoding."""
    retains: bool = True
    """True if slots keep the prefixes of finished requests."""
    most_homes: int = 0
    """Most home ranks of a request; 0: always all ranks."""
    join_chunk: int | None = None
    """Most tokens that a rank spends in a step on a request that others decode; default: `prefill_chunk`."""
    speedup: Callable[[R, int], float] | None = None
    """Factor by which one more rank than so many speeds a request up; None: any rank is worth it."""
    targets: Targets[R] | None = None

    @classmethod
    def of(cls, decode: DecodeConfig, sizes: TreeSizes, num_ranks: int, packed: bool, retains: bool) -> Limits[R]:
        """The limits of a configuration, of trees of these sizes."""
        most_homes = ANY_NUMBER if decode.home_ranks == "auto" else decode.home_ranks
        slots, chunk = decode.max_batch_size, decode.prefill_chunk
        return cls(slots, num_ranks, chunk, sizes.num_nodes, packed, retains, most_homes)

    @property
    def is_elastic(self) -> bool:
        """True if a request may have fewer ranks than there are."""
        return self.num_ranks > 1 and self.most_homes > 0

    @property
    def capacity(self) -> int:
        """Most requests that can run at once."""
        return self.num_slots * (self.num_ranks if self.is_elastic else 1)

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
        """Let step times decide how many ranks a request gets, and admissions by these targets (inf: no target).

        `nodes_per_rank` is the largest tree's on each of its ranks. The clock of earlier targets goes on.
        """
        self.speedup = partial(_speedup, times, nodes_per_rank)
        if min(first_token_ms, per_token_ms) < math.inf:
            now = self.targets.now if self.targets is not None else 0.0
            self.targets = Targets(times, nodes_per_rank, first_token_ms, per_token_ms, now)


def _speedup(times: Callable[[], StepTimes], nodes_per_rank: int, request: Schedulable, width: int) -> float:
    now, length = times(), len(request.tokens)
    return speedup(width, lambda count: now.time(count, 1, length), nodes_per_rank, request.stats)
