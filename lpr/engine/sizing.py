"""Sizing: tree sizes by step times, which are measured at the start and updated by the measured steps.

All ranks use rank 0's step times, so that different clocks have no effect. Rank 0 measures its steps and from time to
time sends new step times to all ranks, itself included, as a command.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from lpr.config import DecodeConfig, SamplingParams, TreeSizes
from lpr.core.budget import total
from lpr.core.concurrent_load import ConcurrentLoad, Work, times_under_load
from lpr.core.constants import KNOTS
from lpr.core.step_times import SHORTEST_KV, SLACK, Key, StepTimes, StepTimesTracker, at_knots, interpolate
from lpr.dist.comm import Comm, is_driver
from lpr.engine.outcomes import Outcome
from lpr.engine.request import Request
from lpr.model.input_builder import Row
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.sampling.selection import Selection
from lpr.native import Budgets, SequenceState, expectations

FIRST_TOKENS, FIRST_STEPS = 2.0, 4
"""Expected tokens of a new request's step, and the number of steps for which that counts."""
SHARE_EVERY = 16  # least number of steps between two updates of the step times by rank 0
SAMPLE_PLAIN = 4  # one in this many plain steps is counted: they are alike, and counting takes 0.05 of about 3 ms
SHARE_PART = 0.05  # least relative change of step times that is sent
LONGEST_STEP = 4.0  # longest step of automatic sizes, relative to a step of one token
FEWEST_NODES = 16  # least nodes per rank of automatic sizes: a draft of high probability pays almost anywhere
ROUNDS = 6  # measurements of each number of nodes
CHEAP = 2.0
"""After the first round, only numbers of nodes up to this many times the time of a single token are measured again."""
ENOUGH = 0.5  # seconds, per batch size, after which no further round begins: later steps correct the result
LONGEST = 0.5  # seconds of the first round, per cached length, after which no larger tree is measured
STEEPEST = 8.0  # no larger tree is measured after one that takes this many times the time of a single token
FEWEST, MOST_ROUNDS, LONGER = 3, 24, 0.15
"""The FEWEST smallest numbers of tokens are measured up to MOST_ROUNDS times, for up to LONGER further seconds per
batch size.

Whether the first node pays is a matter of a few percent. If it is underestimated, every step drafts, and a step without
nodes is never measured again."""
AGREE = 1.25  # two measurements agree if they differ by at most this factor
PATIENCE = 1.5
"""Seconds, per batch size, after which no further round begins even if the times of a cheap tree do not agree."""
BATCHES = (1, 8, 16)
"""Measured batch sizes. Times of larger ones are extrapolated linearly, and steps correct them.

The first node of a step costs more than further ones, because candidates are then ranked; only a measurement per batch
size shows this. On a GPU, where each batch size takes memory and graphs, the last one is left out."""
BATCH_KNOTS = tuple(knot for knot in KNOTS if knot == 17 or knot & (knot - 1) == 0)
"""Numbers of tokens measured for a batch; between them its difference to a single sequence is interpolated."""
LENGTHS = (SHORTEST_KV, 4 * SHORTEST_KV)
"""Measured cached lengths: attention makes nodes more expensive as the text grows, but hardly a single token.

At lengths after the first, only the fewest and the most tokens are measured: the added time is linear between them."""


def resolve_sizes(decode: DecodeConfig, times: StepTimes | None, num_ranks: int) -> TreeSizes:
    """The sizes of `decode` with automatic ones resolved to the largest whose step is at most LONGEST_STEP times one
    token's."""
    if times is None:
        return decode.resolved(num_ranks)
    longest = max(FEWEST_NODES, times.longest(LONGEST_STEP))
    return decode.resolved(num_ranks, min(longest, decode.max_nodes))


class Sizer:
    """The budgets of an engine's steps and, with automatic sizes, the replicated step times."""

    def __init__(self, sizes: TreeSizes, times: StepTimes | None, comm: Comm, follow: bool = True) -> None:
        """Trees of up to these sizes: always full, or with step `times` only the nodes that pay.

        With `follow` False the times are not updated.
        """
        self._longest_tree = sizes.num_nodes
        self._tracker = StepTimesTracker(times) if times is not None and follow and is_driver(comm) else None
        self._since_shared = self._plain = 0
        self._times = times
        self.budgets = Budgets(sizes, comm.num_serving, times.row(1, 1) if times is not None else None)
        self._rank, self._num_ranks = comm.rank, comm.size
        self.load, self._work = ConcurrentLoad(comm.size), Work([], [], [])

    @property
    def times(self) -> StepTimes | None:
        """The replicated step times; None if sizes are fixed."""
        return self._times

    @times.setter
    def times(self, times: StepTimes) -> None:
        if self._times is not None:
            self._times, self.budgets.first_times = times, times.row(1, 1)

    def begin_step(
        self,
        batch: Sequence[SequenceState],
        filling: Sequence[tuple[Request, Sequence[int]]],
        waiting: Sequence[Request] = (),
        spent_ms: float = 0.0,
    ) -> None:
        """Set the price of a step's nodes by its requests, by the requests that wait for it and by other ranks' load.

        `spent_ms` (replicated) was spent on the step's drafts already, which lowers the relative price of nodes. The
        requests of `waiting` were admitted and get no token in this step, so the nodes of others delay their prompts.
        """
        if self._times is None or not batch:
            self.budgets.begin_step({})
            return
        by_homes, pending = expectations(batch, self._num_ranks, FIRST_TOKENS, FIRST_STEPS)
        waits = total([*map(_tokens_per_step, waiting)])
        prices = {
            homes: ([ms + spent_ms for ms in self._times.row(count, longest)], waits)
            for homes, (count, longest, _) in by_homes.items()
            if self._rank in homes
        }
        if self._num_ranks > 1:
            served, fills = [0] * self._num_ranks, [0] * self._num_ranks
            for homes, (count, _, _) in by_homes.items():
                for rank in homes:
                    served[rank] += count
            for _, counts in filling:
                fills = [before + count for before, count in zip(fills, counts, strict=True)]
            self._work = work = Work(served, pending, fills)
            for homes, (times, _) in prices.items():
                own, others = max(work.fills[rank] for rank in homes), self.load.others(work, homes)
                if own or others:
                    times = times_under_load(times, own, others)
                others_tokens = total([expected for each, (_, _, expected) in by_homes.items() if each != homes])
                prices[homes] = times, waits + others_tokens
        self.budgets.begin_step(prices)

    def end_step(self, loads: Sequence[int]) -> None:
        """Count the tokens that each rank evaluated for the batch of `begin_step`."""
        if self._work.served:
            self.load.observe(self._work, loads)
            self._work = Work([], [], [])

    def observe(self, batch: Sequence[Request], outcomes: Sequence[Outcome], milliseconds: float) -> StepTimes | None:
        """Count the time of a step of `batch`; on rank 0, returns new step times to send to all ranks if they are due.

        A step that evaluated a prompt does not count.
        """
        if self._tracker is None or self.times is None:
            return None
        loads, num_rows = outcomes[0].num_entries, len(batch)
        busiest = max(range(len(loads)), key=loads.__getitem__)  # the other ranks waited for it
        count = loads[busiest]
        if len(loads) > 1:
            num_rows = sum([busiest in request.homes for request in batch])
        if count > num_rows * self._longest_tree:
            return None
        if count == num_rows:
            self._plain += 1
            if self._plain % SAMPLE_PLAIN:
                return None
        longest = max(len(request.tokens) for request in batch)
        self._tracker.observe(count, num_rows, longest, milliseconds)
        self._since_shared += 1
        if self._since_shared < SHARE_EVERY:
            return None
        self._since_shared = 0
        table = self._tracker.table()
        return table if table.differs(self.times, SHARE_PART) else None


def _tokens_per_step(request: Request) -> float:
    stats = request.stats
    return (FIRST_TOKENS * FIRST_STEPS + stats.num_tokens) / (FIRST_STEPS + stats.num_steps)


def measured_batches(device: torch.device, max_batch_size: int) -> list[int]:
    """The batches that `measure_step_times` measures, ascending."""
    known = BATCHES if device.type == "cpu" else BATCHES[:-1]
    return sorted({min(max_batch_size, each) for each in known})


def measured_tokens(device: torch.device, max_nodes: int, max_length: int, max_batch_size: int) -> int:
    """Tokens whose K/V `measure_step_times` makes room for."""
    longest = max([kv for kv in LENGTHS if kv <= max_length], default=max_length)
    return measured_batches(device, max_batch_size)[-1] * (longest + max_nodes)


def measure_step_times(
    model: TreeModel,
    like: KVCache,
    comm: Comm,
    max_nodes: int,
    max_length: int,
    max_batch_size: int = 1,
    lengths: Sequence[int] = LENGTHS,
) -> tuple[StepTimes, bool]:
    """Rank 0's step times of trees up to `max_nodes` nodes on each rank; the model's cache is replaced.

    They have a row per measured batch size, at each of `lengths` up to `max_length` and at least one. Also returns True
    if repeated measurements agree; if not, another program disturbs the machine, and the times are unreliable.
    """
    lengths = [kv for kv in lengths if kv <= max_length] or [max_length]
    rows: dict[Key, list[float]] = {}
    agree = True
    for batch in measured_batches(model.device, max_batch_size):
        measured, sure = _measure(model, like, comm, batch, max_nodes, lengths)
        agree = agree and sure
        for kv, times in measured.items():
            if batch == 1:
                rows[1, kv] = at_knots([*times], [*times.values()])
            else:
                rows[batch, kv] = _row_of_batch(times, rows[1, kv], batch)
    return StepTimes(rows), agree


def _row_of_batch(times: dict[int, float], single: list[float], batch: int) -> list[float]:
    """The row of a batch, from some `times` of it and from the row of a `single` sequence.

    Below the batch's least number of tokens (one per sequence) the row is that of a single sequence plus a constant;
    it only serves to interpolate smaller batches.
    """
    alone = {knot: ms for knot, ms in zip(KNOTS, single, strict=True) if batch < knot <= max(times)}
    whole = _with_more({batch: interpolate(single, batch), **alone}, times)
    row = at_knots([*whole], [*whole.values()])
    more = max(0.0, whole[batch] - interpolate(single, batch))
    return [ms if knot >= batch else own + more for knot, ms, own in zip(KNOTS, row, single, strict=True)]


def _measure(
    model: TreeModel, like: KVCache, comm: Comm, batch: int, max_nodes: int, lengths: Sequence[int]
) -> tuple[dict[int, dict[int, float]], bool]:
    """Milliseconds of a batch by cached length and number of tokens; and True if repeated measurements agree.

    The shortest of several times counts, because other programs can only make a forward longer. Cheap trees are timed
    most often: decisions between them depend on about a tenth of their time. The ranks of a tensor-parallel replica
    compute a forward together, so all ranks run the same forwards: rank 0's times decide whether to continue.
    """
    model.allocate(batch, max(lengths), max_nodes, like)

    def milliseconds(count: int, kv: int) -> float:
        mine = torch.tensor([int(time_forward(model, batch, count, kv) * 1e6)], dtype=torch.int32)
        return max(1, int(comm.gather(mine)[0, 0])) / 1e3

    knots = KNOTS if batch == 1 else BATCH_KNOTS
    counts = [batch, *(knot for knot in knots if batch < knot <= max(2 * batch, max_nodes))]
    first, *longer = lengths
    sizes = {first: counts}
    shortest: dict[int, dict[int, list[float]]] = {kv: {} for kv in lengths}
    spent, number, agree = 0.0, 0, False
    time_forward(model, batch, batch, first)  # the first forward initialises libraries
    while number < 2 or (number < ROUNDS and spent < ENOUGH * 1e3) or (not agree and spent < PATIENCE * 1e3):
        for kv in lengths:
            round_began, times = spent, shortest[kv]
            for index, count in enumerate(sizes[kv]):
                if not number and (model.graphs is not None or model.device.type == "cuda"):
                    time_forward(model, batch, count, kv)  # captures a graph, compiles kernels
                took = milliseconds(count, kv)
                if not number and index and took > STEEPEST * times[batch][0]:
                    took = min(took, milliseconds(count, kv))  # another program may have disturbed it
                times[count] = sorted([*times.get(count, []), took])[:2]
                spent += took
                is_late = spent - round_began > LONGEST * 1e3 or took > STEEPEST * times[batch][0]
                if not number and index and is_late:
                    break
            if kv == first and not number:
                sizes |= dict.fromkeys(longer, sorted({batch, max(times)}))
        number += 1
        agree = number > 1 and all(_agree(times[count]) for kv, times in shortest.items() for count in sizes[kv])
        sizes = {kv: _timed_again(times) for kv, times in shortest.items()}
    few = {count: shortest[first][count] for count in counts[:FEWEST] if count in shortest[first]}
    most = spent + LONGER * 1e3
    while number < MOST_ROUNDS and spent + sum(times[0] for times in few.values()) < most:
        for count, least in few.items():
            took = milliseconds(count, first)
            least[:] = sorted([*least, took])[:2]
            spent += took
        number += 1
    found = {kv: {count: least for count, (least, *_) in times.items()} for kv, times in shortest.items()}
    return {kv: _with_more(found[first], times) for kv, times in found.items()}, agree


def _with_more(base: dict[int, float], times: dict[int, float]) -> dict[int, float]:
    """`base` (milliseconds by number of tokens) plus the interpolated difference to `times` at some numbers."""
    more, least = [ms - base[count] for count, ms in times.items()], min(times.values())
    return {count: max(least, ms + interpolate(more, count, [*times])) for count, ms in base.items()}


def _timed_again(shortest: dict[int, list[float]]) -> list[int]:
    """The numbers of tokens to measure again: cheap ones, implausible ones (StepTimes.fault), and the largest.

    Numbers that are not cheap need only two measurements that agree.
    """
    counts, times = [*shortest], {count: least for count, (least, *_) in shortest.items()}
    late = [after for before, after in pairwise(counts) if times[after] > SLACK * -(-after // before) * times[before]]
    cheap = [count for count in counts if times[count] <= CHEAP * times[counts[0]]]
    return sorted({*cheap, *(count for count in (*late, counts[-1]) if not _agree(shortest[count]))})


def _agree(shortest: Sequence[float]) -> bool:
    """True if the two shortest times, ascending, agree within AGREE."""
    return len(shortest) == 2 and shortest[1] <= AGREE * shortest[0]


def time_forward(model: TreeModel, batch: int, count: int, kv: int) -> float:
    """Seconds until the results of a batch of roots and their children, `count` in all, are on the host.

    Each sequence has `kv` - 2 cached tokens.
    """
    rows = []
    for slot in range(batch):
        size = count // batch + (slot < count % batch)
        positions = [kv - 2] + [kv - 1] * (size - 1)  # a flat tree spans few positions
        rows.append(Row(slot, kv - 2, [0] * size, [-1] + [0] * (size - 1), positions, size))
    selection = Selection.build([(SamplingParams(), row.positions.tolist()) for row in rows])
    began = model.adapter.clock()
    num_candidates = min(8, model.vocab_size) if count > batch else 0  # as steps do
    model.evaluate(rows, selection, num_candidates).cpu()
    return model.adapter.clock() - began
