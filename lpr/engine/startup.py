"""What a configuration makes of a loaded model: its sizes, a scheduler, and a K/V cache that fits."""

from __future__ import annotations

import math
from collections.abc import Callable

from lpr.config import DecodeConfig, InputError, TreeSizes
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, is_driver
from lpr.engine.limits import Limits
from lpr.engine.request import Request
from lpr.engine.scheduler import Scheduler
from lpr.model.cache import TreeCache
from lpr.model.runner import TreeModel

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


def allocate(
    model: TreeModel,
    like: TreeCache,
    decode: DecodeConfig,
    sizes: TreeSizes,
    max_length: int,
    comm: Comm,
    check: Callable[[str | None], None],
) -> None:
    """Allocate the model's K/V cache; `check` raises InputError for a reason why there is no room."""
    # A mesh that can shrink may leave whole trees to one rank, and must not move its K/V then.
    fewest = comm.size if comm.membership is None else 1
    cache = decode.max_batch_size, max_length, sizes.evaluated_capacity(fewest), like
    check(model.shortage(*cache, comm.num_sharing))
    model.allocate(*cache)


def capture_graphs(model: TreeModel, sizes: TreeSizes, comm: Comm) -> None:
    """Capture CUDA graphs of the steps, where the model replays them."""
    if model.graphs is not None:
        model.graphs.prepare(sizes.num_recycled, show=is_driver(comm))


def refuse(reason: str | None) -> None:
    """Raise InputError if there is a reason."""
    if reason:
        raise InputError(reason)
