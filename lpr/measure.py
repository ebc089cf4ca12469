"""Measuring t(n) when an engine starts: a few forwards of growing trees, timed on rank 0."""

from __future__ import annotations

import statistics
import time

import torch

from lpr.config import SamplingParams
from lpr.core.cost import KNOTS, SHORTEST_KV, StepCost, interpolate
from lpr.dist.comm import Comm
from lpr.model.cache import TreeCache
from lpr.model.inputs import Row
from lpr.model.runner import TreeModel
from lpr.sampling import Selection

REPEATS = 3
"""Timed forwards per number of nodes, after one that warms up; their median counts."""
LONGEST = 2.0
"""Seconds after which no larger tree is tried."""
STEEPEST = 8.0
"""No larger tree is tried after one that takes this many times as long as a single token."""


def measure_costs(model: TreeModel, like: TreeCache, comm: Comm, max_nodes: int) -> StepCost:
    """The step times of trees up to `max_nodes` on each rank, rank 0's on all ranks; the model's cache is replaced.

    Ranks of a tensor-parallel replica compute a forward together, so all ranks run the same ones: after each size they
    learn from rank 0 how long it took, and so whether to go on.
    """
    model.allocate(1, SHORTEST_KV, max_nodes, like)
    knots: list[int] = []
    times: list[float] = []
    spent = 0.0
    for knot in (count for count in KNOTS if count <= max(2, max_nodes)):
        took = [_time_once(model, knot) for _ in range(1 + REPEATS)]
        microseconds = torch.tensor([int(statistics.median(took[1:]) * 1e6), int(sum(took) * 1e6)], dtype=torch.int32)
        median, total = (int(each) for each in comm.gather(microseconds)[0])
        knots.append(knot)
        times.append(max(median, 1) / 1e3)
        spent += total / 1e6
        if len(knots) > 1 and (spent > LONGEST or times[-1] > STEEPEST * times[0]):
            break
    return StepCost({(1, SHORTEST_KV): [interpolate(times, knot, knots) for knot in KNOTS]})


def _time_once(model: TreeModel, count: int) -> float:
    """Seconds of one evaluation of a chain of `count` tokens, its result on the host included."""
    cached = SHORTEST_KV - 1
    positions = list(range(cached, cached + count))
    selection = Selection.build([(SamplingParams(), positions)], model.device)
    row = Row(0, cached, [0] * count, list(range(-1, count - 1)), positions, count)
    began = time.perf_counter()
    model.evaluate([row], selection, min(8, model.vocab_size)).cpu()
    return time.perf_counter() - began
