"""The planner's policy: step times and measured tokens per step of an lp x tp mesh."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from lpr.core.step_times import KNOTS, SHORTEST_KV, StepTimes
from lpr.planner.footprint import Mesh
from lpr.planner.prediction import Drafted, Inputs, Setting, forward_seconds, lp_seconds, tp_seconds
from lpr.planner.simulated.mesh import SimRequest
from lpr.planner.simulated.workload import Speed

SMALL_BUDGETS = (2, 4, 8, 16)
"""Trees below the smallest measured one, for large batches. Assumed: their tokens per step grow with the logarithm of
their nodes."""


@dataclass(frozen=True)
class Point:
    """Drafting of a batch's requests: yield and cost."""

    tokens_per_step: float
    nodes: float
    """Per request, on the busiest rank."""
    host_ms: float = 0.0
    """Per request, besides the step time."""
    gather_ms: float = 0.0
    """Per step, besides the step time."""


@dataclass
class _Work:
    """The work of one rank in a step; `host` in milliseconds."""

    nodes: float = 0.0
    host: float = 0.0
    prompt: int = 0
    num_rows: int = 0
    num_drafted: int = 0
    longest: int = SHORTEST_KV

    def add(self, nodes: float, prompt: int, length: int, host: float = 0.0) -> None:
        """Add a request: nodes of its tree, tokens of its prompt, tokens in the cache, and the host's time."""
        self.nodes += nodes
        self.prompt += prompt
        self.host += host
        self.num_rows += 1
        self.num_drafted += nodes > 0
        self.longest = max(self.longest, length)


Points = Mapping[tuple[float, int, int], Point]
"""By temperature, requests on a rank, and home ranks of a request."""


class StepCosts:
    """A Policy: a step takes as long as its busiest rank, and a rank the step time of the nodes that it evaluates."""

    def __init__(self, times: StepTimes, points: Points, dice: random.Random, prompt_ms: float = 0.0) -> None:
        """Use the point of the nearest temperature, of the next larger batch and the next smaller width.

        `prompt_ms`, if it is not 0, replaces the step time of a prompt's token, in milliseconds.
        """
        self._times, self._points, self._dice, self._prompt_ms = times, points, dice, prompt_ms
        self._temperatures, self._batches, self._widths = (sorted(set(each)) for each in zip(*points, strict=True))
        self._point = cache(self.point)

    def point(self, temperature: float, batch: int, width: int) -> Point:
        """Drafting of a request on `width` ranks, the busiest of which serves `batch` requests."""
        nearest = min(self._temperatures, key=lambda each: abs(each - temperature))
        size = next((each for each in self._batches if each >= batch), self._batches[-1])
        fewer = max((each for each in self._widths if each <= width), default=self._widths[0])
        return self._points[nearest, size, fewer]

    def __call__(
        self, decoding: Sequence[SimRequest], filling: Sequence[tuple[SimRequest, Sequence[int]]]
    ) -> tuple[float, Sequence[int]]:
        """Seconds of a step and the tokens of each decoding request (see Policy)."""
        ranks = Counter(rank for request in decoding for rank in request.homes)
        work = defaultdict[int, _Work](_Work)
        gather = 0.0
        emitted = []
        for request in decoding:
            point = self._point(request.temperature, max(ranks[rank] for rank in request.homes), len(request.homes))
            for rank in request.homes:
                lacking = len(request.tokens) - 1 - request.num_computed_tokens[rank]
                work[rank].add(point.nodes, lacking, len(request.tokens), point.host_ms)  # others do not draft for it
            request.num_nodes += round(point.nodes) * len(request.homes)
            gather = max(gather, point.gather_ms)
            most = most_tokens(point, len(request.homes))
            emitted.append(self._draw(mean_tokens(request, point.tokens_per_step), most))
        for request, counts in filling:
            for rank, count in enumerate(counts):
                if count:
                    work[rank].add(0.0, count, request.num_computed_tokens[rank])
        return (max(map(self._milliseconds, work.values())) + gather) * 1e-3, emitted

    def _milliseconds(self, work: _Work) -> float:
        if self._prompt_ms:
            drafted = self._times.time(max(work.nodes, 1.0), max(1, work.num_drafted), work.longest)
            return drafted + work.prompt * self._prompt_ms + work.host
        return self._times.time(work.nodes + work.prompt, work.num_rows, work.longest) + work.host

    def _draw(self, mean: float, most: int) -> int:
        """Tokens of one step: each further one is accepted with the same probability, up to the `most` of a tree."""
        if mean <= 1.0 or mean >= most:
            return 1 if mean <= 1.0 else most
        return min(most, 1 + int(math.log(1.0 - self._dice.random()) / math.log(acceptance(mean, most))))


def most_tokens(point: Point, width: int) -> int:
    """Most tokens that a step brings a request on `width` ranks: a path of all nodes that they evaluate."""
    return math.ceil(point.nodes * width)


def most_tokens_ahead(points: Points, num_ranks: int) -> int:
    """The `most_tokens` of any request on up to so many ranks."""
    bounds = [*sorted({width for _, _, width in points})[1:], num_ranks + 1]
    return max(most_tokens(point, next(each for each in bounds if each > width) - 1)
               for (_, _, width), point in points.items())  # fmt: skip


@lru_cache(maxsize=4096)
def acceptance(mean: float, most: int) -> float:
    """The probability `a` of each further token with which `most` tokens at most have this mean.

    That is, 1 + a + ... + a^(most - 1) is `mean`, which must be below `most`.
    """
    low, high = 0.0, 1.0
    for _ in range(50):
        a = (low + high) / 2
        low, high = (low, a) if (1.0 - a**most) / (1.0 - a) > mean else (a, high)
    return low


def mean_tokens(request: SimRequest, tokens_per_step: float) -> float:
    """Mean tokens of one step, such that a request of its pace takes output / (tokens per step) steps.

    The last step brings fewer tokens than it could, and the measurement counts it like the others.
    """
    steps = request.num_output / max(1.0, tokens_per_step * request.pace) if tokens_per_step > 1.0 else math.inf
    if steps >= request.num_output:
        return 1.0
    return (request.num_output - 1) / (steps - 1) if steps > 1.0 else float(request.num_output)


def batches_up_to(slots: int) -> list[int]:
    """Powers of two below `slots`, and `slots`."""
    return sorted({slots, *(1 << power for power in range(slots.bit_length()))})


def predicted_times(setting: Setting, mesh: Mesh, slots: int, context: int) -> StepTimes:
    """Step times of a mesh by the roofline, with the collectives inside a replica."""
    facts, size, machine = setting.facts, setting.element_size, setting.machine

    def milliseconds(nodes: float, batch: int, kv: int) -> float:
        nodes = max(nodes, batch)
        forward = forward_seconds(facts, mesh.tp, size, nodes, kv, machine, Inputs(), batch)
        return 1e3 * (forward + tp_seconds(facts, mesh.tp, size, nodes, machine, Inputs()))

    shapes = [(batch, kv) for batch in sorted({1, slots}) for kv in sorted({SHORTEST_KV, max(SHORTEST_KV, context)})]
    return StepTimes({shape: [milliseconds(nodes, *shape) for nodes in KNOTS] for shape in shapes})


def predicted_points(
    setting: Setting, mesh: Mesh, times: StepTimes, temperatures: Sequence[float], slots: int
) -> Points:
    """The tree with the most tokens per second for each temperature, batch and width, as the engine's budget chooses.

    The gather is that of the whole mesh, however many ranks serve a request.
    """
    found = {}
    for temperature in temperatures:
        at = replace(setting, temperature=temperature)
        for width in batches_up_to(mesh.lp):
            narrow = Mesh(width, mesh.tp)
            measured = at.measured.ways(temperature, width)  # by ascending budget
            ways, smallest = [None, *measured], measured[0]
            for budget in SMALL_BUDGETS:
                share = math.log(budget + 1) / math.log(smallest.nodes + 1)
                tokens = 1.0 + (smallest.tokens_per_step - 1.0) * share
                ways.append(Drafted(smallest.temperature, budget, tokens, float(budget), True))
            for batch in batches_up_to(slots):
                points = [_point(at, narrow, mesh, way, batch) for way in ways]
                rates = [_rate(point, times, batch, setting.kv) for point in points]
                found[temperature, batch, width] = points[rates.index(max(rates))]
    return found


def _point(setting: Setting, narrow: Mesh, mesh: Mesh, way: Drafted | None, batch: int) -> Point:
    """Drafting with one tree for requests on `narrow`, a part of `mesh`."""
    host_ms = 1e3 * setting.step(narrow, way, Inputs()).host / setting.batch
    payload = batch * (way.payload_bytes(narrow.lp) if way is not None else 4)
    gather_ms = 1e3 * lp_seconds(mesh, payload, setting.machine, Inputs())
    if way is None:
        return Point(1.0, 1.0, host_ms, gather_ms)
    nodes = setting.measured.shard_nodes(way, narrow.lp)
    return Point(max(1.0, way.tokens_per_step), max(1.0, nodes), host_ms, gather_ms)


def _rate(point: Point, times: StepTimes, batch: int, kv: int) -> float:
    """Tokens per millisecond of a batch."""
    took = times.time(batch * point.nodes, batch, kv) + batch * point.host_ms + point.gather_ms
    return batch * point.tokens_per_step / took


def measured_points(speeds: Sequence[Speed], slots: int) -> Points:
    """Points of every batch, interpolated by the logarithm of the batch; the same for all widths."""
    found = {}
    for temperature in sorted({each.temperature for each in speeds}):
        known = sorted((each for each in speeds if each.temperature == temperature), key=lambda each: each.batch)
        for batch in range(1, slots + 1) if slots <= 64 else batches_up_to(slots):
            below = max((each for each in known if each.batch <= batch), key=lambda each: each.batch, default=known[0])
            above = min((each for each in known if each.batch >= batch), key=lambda each: each.batch, default=known[-1])
            part = 0.0
            if below.batch < batch < above.batch:
                part = math.log(batch / below.batch) / math.log(above.batch / below.batch)
            found[temperature, batch, 1] = Point(
                below.tokens_per_step + part * (above.tokens_per_step - below.tokens_per_step),
                below.nodes + part * (above.nodes - below.nodes),
            )
    return found
