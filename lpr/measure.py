"""Measuring t(n) when an engine starts: a few forwards of growing trees, timed on rank 0."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from lpr.config import SamplingParams
from lpr.core.cost import KNOTS, SHORTEST_KV, Key, StepCost, at_knots, key_of
from lpr.dist.comm import Comm
from lpr.model.cache import TreeCache
from lpr.model.inputs import Row
from lpr.model.runner import TreeModel
from lpr.sampling import Selection

ROUNDS = 4
"""Forwards per number of nodes; the fastest counts, since whatever else the machine does only makes them slower."""
LONGEST = 1.0
"""Seconds of the first round after which no larger tree is tried."""
STEEPEST = 8.0
"""No larger tree is tried after one that takes this many times as long as a single token."""


LENGTHS = (SHORTEST_KV, 4 * SHORTEST_KV)
"""Cached lengths that are measured: attention makes a node dearer, and one token hardly, the longer the text is."""


def measure_costs(
    model: TreeModel, like: TreeCache, comm: Comm, max_nodes: int, max_length: int, lengths: Sequence[int] = LENGTHS
) -> StepCost:
    """The step times of trees up to `max_nodes` on each rank, rank 0's on all ranks; the model's cache is replaced.

    The table has a row for each of `lengths` up to `max_length`, and at least one.
    """
    rows: dict[Key, list[float]] = {}
    for kv in lengths:
        if kv <= max_length or not rows:
            rows[key_of(1, kv)] = _measure_row(model, like, comm, max_nodes, min(kv, max_length))
    return StepCost(rows)


def _measure_row(model: TreeModel, like: TreeCache, comm: Comm, max_nodes: int, kv: int) -> list[float]:
    """Milliseconds at KNOTS with `kv` cached tokens.

    Ranks of a tensor-parallel replica compute a forward together, so all ranks run the same ones: after each they
    learn from rank 0 how long it took, and so whether to go on. Sizes take turns, as the machine's load may drift.
    """
    model.allocate(1, kv, max_nodes, like)
    knots = [count for count in KNOTS if count <= max(2, max_nodes)]
    times: dict[int, float] = {}
    _time_once(model, 1, kv)  # the first forward of all sets libraries up
    for number in range(ROUNDS):
        for knot in knots:
            if not number and model.graphs is not None:
                _time_once(model, knot, kv)  # captures a graph
            mine = torch.tensor([int(_time_once(model, knot, kv) * 1e6)], dtype=torch.int32)
            took = max(1, int(comm.gather(mine)[0, 0])) / 1e3
            times[knot] = min(took, times.get(knot, took))
            if not number and len(times) > 1 and (sum(times.values()) > LONGEST * 1e3 or took > STEEPEST * times[1]):
                break
        knots = list(times)
    return at_knots(knots, list(times.values()))


def _time_once(model: TreeModel, count: int, kv: int) -> float:
    """Seconds of evaluating a root and its children, `count` in all, after `kv` - 2 tokens; the result on the host."""
    positions = [kv - 2] + [kv - 1] * (count - 1)  # a flat tree stays within few positions
    selection = Selection.build([(SamplingParams(), positions)])
    row = Row(0, kv - 2, [0] * count, [-1] + [0] * (count - 1), positions, count)
    began = time.perf_counter()
    model.evaluate([row], selection, min(8, model.vocab_size)).cpu()
    return time.perf_counter() - began
