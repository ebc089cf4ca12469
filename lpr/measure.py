"""Measuring t(n) when an engine starts: a few forwards of growing trees, timed on rank 0."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from lpr.config import SamplingParams
from lpr.core.cost import KNOTS, SHORTEST_KV, Key, StepCost, at_knots
from lpr.dist.comm import Comm
from lpr.model.cache import TreeCache
from lpr.model.inputs import Row
from lpr.model.runner import TreeModel
from lpr.sampling import Selection

FEWEST_ROUNDS, MOST_ROUNDS = 3, 6
"""Forwards per number of nodes; the fastest counts, since whatever else the machine does only makes them slower."""
ENOUGH = 0.5
"""Seconds of a row's forwards after which no further round begins."""
LONGEST = 1.0
"""Seconds of the first round after which no larger tree is tried."""
STEEPEST = 8.0
"""No larger tree is tried after one that takes this many times as long as a single token."""
LARGEST_BATCH = 8
"""Larger batches are not measured: the line through one sequence and this many goes on, and steps correct it."""
LENGTHS = (SHORTEST_KV, 4 * SHORTEST_KV)
"""Cached lengths that are measured: attention makes a node dearer, and one token hardly, the longer the text is."""


def measure_costs(
    model: TreeModel,
    like: TreeCache,
    comm: Comm,
    max_nodes: int,
    max_length: int,
    max_batch_size: int = 1,
    lengths: Sequence[int] = LENGTHS,
) -> StepCost:
    """The step times of trees up to `max_nodes` on each rank, rank 0's on all ranks; the model's cache is replaced.

    The table has a row for one sequence and one for a batch, at each of `lengths` up to `max_length` and at least one.
    """
    rows: dict[Key, list[float]] = {}
    for batch in sorted({1, min(max_batch_size, LARGEST_BATCH)}):
        for kv in lengths:
            if kv <= max_length or kv == lengths[0]:
                rows[batch, kv] = _measure_row(model, like, comm, batch, max_nodes, min(kv, max_length))
    return StepCost(rows)


def _measure_row(model: TreeModel, like: TreeCache, comm: Comm, batch: int, max_nodes: int, kv: int) -> list[float]:
    """Milliseconds at KNOTS of a batch with `kv` cached tokens each.

    Ranks of a tensor-parallel replica compute a forward together, so all ranks run the same ones: after each they
    learn from rank 0 how long it took, and so whether to go on. Sizes take turns, as the machine's load may drift.
    """
    model.allocate(batch, kv, max_nodes, like)
    knots = [count for count in KNOTS if batch <= count <= max(2 * batch, max_nodes)]
    times: dict[int, float] = {}
    spent = 0.0
    _time_once(model, batch, batch, kv)  # the first forward of all sets libraries up
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and spent > ENOUGH * 1e3:
            break
        for knot in knots:
            if not number and model.graphs is not None:
                _time_once(model, batch, knot, kv)  # captures a graph
            mine = torch.tensor([int(_time_once(model, batch, knot, kv) * 1e6)], dtype=torch.int32)
            took = max(1, int(comm.gather(mine)[0, 0])) / 1e3
            times[knot] = min(took, times.get(knot, took))
            spent += took
            too_long = sum(times.values()) > LONGEST * 1e3 or took > STEEPEST * times[knots[0]]
            if not number and len(times) > 1 and too_long:
                break
        knots = list(times)
    return at_knots(knots, list(times.values()))


def _time_once(model: TreeModel, batch: int, count: int, kv: int) -> float:
    """Seconds of evaluating a batch of roots and their children, `count` in all, after `kv` - 2 tokens each.

    The result is on the host by then.
    """
    rows = []
    for slot in range(batch):
        size = count // batch + (slot < count % batch)
        positions = [kv - 2] + [kv - 1] * (size - 1)  # a flat tree stays within few positions
        rows.append(Row(slot, kv - 2, [0] * size, [-1] + [0] * (size - 1), positions, size))
    selection = Selection.build([(SamplingParams(), row.positions) for row in rows])
    began = time.perf_counter()
    model.evaluate(rows, selection, min(8, model.vocab_size)).cpu()
    return time.perf_counter() - began
