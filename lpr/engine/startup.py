"""The scheduler of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable

from lpr.config import DecodeConfig, TreeSizes
from lpr.core.step_times import StepTimes
from lpr.engine.limits import Limits
from lpr.engine.request import Request
from lpr.engine.scheduler import Scheduler

SHORTEST_FILL = 32
"""Tokens that a rank computes at least in a step of a request that it joins, or it would never catch up."""
ANY_NUMBER = 1 << 30
"""`home_ranks="auto"`: no limit on the home ranks of a request."""


def make_scheduler(
    decode: DecodeConfig, sizes: TreeSizes, num_ranks: int, packed: bool, prefix_reuse: bool
) -> Scheduler[Request]:
    """An idle scheduler for trees of these sizes; `packed` as of Limits."""
    most_homes = ANY_NUMBER if decode.home_ranks == "auto" else decode.home_ranks
    return Scheduler(
        Limits(
            num_slots=decode.max_batch_size,
            num_ranks=num_ranks,
            prefill_chunk=decode.prefill_chunk,
            longest_chain=sizes.num_nodes,
            packed=packed,
            retains=prefix_reuse,
            most_homes=most_homes,
        )
    )


def decide_by(
    limits: Limits[Request], decode: DecodeConfig, sizes: TreeSizes, times: Callable[[], StepTimes | None]
) -> None:
    """Let the step times that all ranks know decide how wide requests are and when they are admitted."""

    def current() -> StepTimes:
        found = times()
        assert found is not None, "sizes are not fixed"
        return found

    limits.join_chunk = max(SHORTEST_FILL, current().critical_length())
    targets = decode.first_token_ms or math.inf, decode.per_token_ms or math.inf
    limits.decide_by(current, sizes.num_nodes // limits.num_ranks, *targets)
