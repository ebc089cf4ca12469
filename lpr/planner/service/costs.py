"""The planner's policy: step times from a table, and tokens per step as measured, for a mesh of lp x tp."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lpr.core.step_times import KNOTS, SHORTEST_KV, StepTimes
from lpr.planner.footprint import Mesh
from lpr.planner.measured import Drafted
from lpr.planner.prediction import Inputs, Setting, forward_seconds, lp_seconds, tp_seconds
from lpr.planner.service.requests import SimRequest
from lpr.planner.service.workload import Speed

SMALL_BUDGETS = (2, 4, 8, 16)
"""Trees below the smallest measured one, which large batches want; their tokens per step are taken to grow with the
logarithm of their nodes."""


@dataclass(frozen=True)
class Point:
    """How the requests of a batch are drafted for."""

    tokens_per_step: float
    nodes: float
    """Per request, on the busiest rank."""
    host_ms: float = 0.0
    """Per request, besides the table."""
    gather_ms: float = 0.0
    """Per step, besides the table."""


class StepCosts:
    """As Policy says: a step takes what the table says of all tokens that it evaluates, and what the host adds."""

    def __init__(
        self, times: StepTimes, points: dict[tuple[float, int], Point], dice: random.Random, prompt_ms: float = 0.0
    ) -> None:
        """`points` are by temperature and batch size; the nearest temperature counts, and the next larger batch.

        `prompt_ms`, if it is not 0, are the milliseconds of a prompt's token, in place of the table's.
        """
        self._times, self._points, self._dice, self._prompt_ms = times, points, dice, prompt_ms
        self._temperatures = sorted({temperature for temperature, _ in points})
        self._batches = sorted({batch for _, batch in points})
        self._nearest: dict[float, float] = {}

    def point(self, temperature: float, batch: int) -> Point:
        """How a request of a batch is drafted for."""
        nearest = self._nearest.get(temperature)
        if nearest is None:
            nearest = min(self._temperatures, key=lambda each: abs(each - temperature))
            self._nearest[temperature] = nearest
        size = next((each for each in self._batches if each >= batch), self._batches[-1])
        return self._points[nearest, size]

    def step(
        self, decoding: Sequence[SimRequest], filling: Sequence[tuple[SimRequest, int]]
    ) -> tuple[float, Sequence[int]]:
        """Seconds of a step and the tokens that it brings, as Policy says."""
        batch = len(decoding)
        prompt = sum(count for _, count in filling)
        nodes = host = gather = 0.0
        longest, emitted = SHORTEST_KV, []
        for request in decoding:
            point = self.point(request.temperature, batch)
            prompt += request.num_pending - 1
            nodes += point.nodes
            host += point.host_ms
            gather = max(gather, point.gather_ms)
            longest = max(longest, len(request.tokens))
            emitted.append(self._draw(mean_tokens(request, point.tokens_per_step)))
        for request, _ in filling:
            longest = max(longest, request.num_computed)
        rows = max(1, batch + len(filling))
        if self._prompt_ms:
            took = self._times.time(max(nodes, 1.0), max(1, batch), longest) + prompt * self._prompt_ms
        else:
            took = self._times.time(nodes + prompt, rows, longest)
        return (took + host + gather) * 1e-3, emitted

    def _draw(self, mean: float) -> int:
        """Tokens of one step: each further one is accepted with the same probability."""
        if mean <= 1.0:
            return 1
        return 1 + int(math.log(1.0 - self._dice.random()) / math.log(1.0 - 1.0 / mean))


def mean_tokens(request: SimRequest, tokens_per_step: float) -> float:
    """Tokens of one step on average, so that a request of its pace takes output / (tokens per step) steps.

    The last step brings fewer than it could, and what was measured counts it like the others.
    """
    steps = request.num_output / max(1.0, tokens_per_step * request.pace) if tokens_per_step > 1.0 else math.inf
    if steps >= request.num_output:
        return 1.0
    return (request.num_output - 1) / (steps - 1) if steps > 1.0 else float(request.num_output)


def batches_up_to(slots: int) -> list[int]:
    """Powers of two below `slots`, and `slots`."""
    return sorted({slots, *(1 << power for power in range(slots.bit_length()) if 1 << power <= slots)})


def predicted_times(setting: Setting, mesh: Mesh, slots: int, context: int) -> StepTimes:
    """The roofline's t(n) of a mesh as a table, collectives inside a replica included."""
    rows = {}
    for batch in sorted({1, slots}):
        for kv in sorted({SHORTEST_KV, max(SHORTEST_KV, context)}):
            rows[batch, kv] = [1e3 * _seconds(setting, mesh, nodes, batch, kv) for nodes in KNOTS]
    return StepTimes(rows)


def _seconds(setting: Setting, mesh: Mesh, nodes: float, batch: int, kv: int) -> float:
    inputs, facts, size = Inputs(), setting.facts, setting.element_size
    nodes = max(nodes, batch)
    forward = forward_seconds(facts, mesh.tp, size, nodes, kv, setting.machine, inputs, batch)
    return forward + tp_seconds(facts, mesh.tp, size, nodes, setting.machine, inputs)


def predicted_points(
    setting: Setting, mesh: Mesh, times: StepTimes, temperatures: Sequence[float], slots: int
) -> dict[tuple[float, int], Point]:
    """For each temperature and batch the tree with the most tokens per second, as the engine's own budget looks for."""
    found = {}
    for temperature in temperatures:
        at = replace(setting, temperature=temperature)
        ways = [None, *at.measured.ways(temperature, mesh.lp)]
        smallest = min((way for way in ways if way is not None), key=lambda way: way.budget)
        ways += [_smaller(smallest, budget) for budget in SMALL_BUDGETS]
        for batch in batches_up_to(slots):
            points = [_point(at, mesh, way, batch) for way in ways]
            found[temperature, batch] = max(points, key=lambda point: _rate(point, times, batch, setting.kv))
    return found


def _smaller(measured: Drafted, budget: int) -> Drafted:
    share = math.log(budget + 1) / math.log(measured.nodes + 1)
    tokens = 1.0 + (measured.tokens_per_step - 1.0) * share
    return Drafted(measured.temperature, budget, tokens, float(budget), True)


def _point(setting: Setting, mesh: Mesh, way: Drafted | None, batch: int) -> Point:
    """One way to draft, with what it costs besides the table."""
    step = setting.step(mesh, way, Inputs())
    gather = lp_seconds(mesh, (way.payload_bytes(mesh.lp) if way is not None else 4) * batch, setting.machine, Inputs())
    nodes = setting.measured.shard_nodes(way, mesh.lp) if way is not None else 1.0
    tokens = way.tokens_per_step if way is not None else 1.0
    return Point(max(1.0, tokens), max(1.0, nodes), 1e3 * step.host / setting.batch, 1e3 * gather)


def _rate(point: Point, times: StepTimes, batch: int, kv: int) -> float:
    """Tokens per millisecond of a batch that is drafted for so."""
    took = times.time(batch * point.nodes, batch, kv) + batch * point.host_ms + point.gather_ms
    return batch * point.tokens_per_step / took


def measured_points(speeds: Sequence[Speed], slots: int) -> dict[tuple[float, int], Point]:
    """Points at every batch, in between those that were measured by the logarithm of the batch."""
    found = {}
    for temperature in sorted({each.temperature for each in speeds}):
        known = sorted((each for each in speeds if each.temperature == temperature), key=lambda each: each.batch)
        for batch in range(1, slots + 1) if slots <= 64 else batches_up_to(slots):
            below = max((each for each in known if each.batch <= batch), key=lambda each: each.batch, default=known[0])
            above = min((each for each in known if each.batch >= batch), key=lambda each: each.batch, default=known[-1])
            part = 0.0
            if below.batch < batch < above.batch:
                part = math.log(batch / below.batch) / math.log(above.batch / below.batch)
            found[temperature, batch] = Point(
                below.tokens_per_step + part * (above.tokens_per_step - below.tokens_per_step),
                below.nodes + part * (above.nodes - below.nodes),
            )
    return found
