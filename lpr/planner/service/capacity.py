"""How many meshes of a kind keep the promise: what one can do, and then so many that each has to do no more.

Meshes are independent once a router has split the requests. The split here is by chance, as by a hash of the prompt: a
share of a Poisson process is a Poisson process, and clients are spread evenly. A router that looks at queues does
better. So one mesh at its share of the load stands for all of them, and thousands cost no more than a few: as many as
`Effort.meshes` are simulated, with seeds of their own, and their requests are taken together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lpr.core.step_times import StepTimes
from lpr.planner.footprint import Mesh
from lpr.planner.service.costs import Points, StepCosts
from lpr.planner.service.mesh import Slots, simulate_mesh
from lpr.planner.service.requests import Arrivals, ClosedArrivals, PoissonArrivals, SimRequest
from lpr.planner.service.workload import Demand, Workload

WARM_UP = 0.25
"""The first part of the requests finds an empty mesh and does not count."""
HALVINGS = 6
"""The largest load that keeps the promise is found to a 64th of what a mesh can do at all."""
MORE = 0.02
"""Further meshes, as a part, where the number found does not keep the promise after all."""
MOST_MORE = 20


@dataclass(frozen=True)
class Effort:
    """How much is simulated."""

    requests: int = 1000
    """Per mesh in the end; a third of them while the number of meshes is looked for."""
    meshes: int = 4
    """Of the meshes found, so many are simulated."""
    seed: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of mesh and all that decides how fast it is."""

    mesh: Mesh
    slots: Slots
    times: StepTimes
    points: Points


@dataclass(frozen=True)
class Outcome:
    """What the requests of simulated meshes got; times in milliseconds, [p50, p90, p99]."""

    kept: float
    """Share of the requests that got what was promised."""
    first_token_ms: tuple[float, float, float]
    per_token_ms: tuple[float, float, float]
    end_to_end_ms: tuple[float, float, float]
    tokens_per_second: float
    """Of one mesh."""
    requests_per_second: float
    """Answered by one mesh."""
    tokens_per_step: float


@dataclass(frozen=True)
class Answer:
    """How many meshes of a kind keep the promise."""

    kind: Kind
    num_meshes: int | None
    """None: no number does."""
    capacity: float
    """Requests a second, or clients, that one mesh serves as promised."""
    outcome: Outcome
    num_simulated: int

    @property
    def num_gpus(self) -> int | None:
        """GPUs of all meshes."""
        return None if self.num_meshes is None else self.num_meshes * self.kind.mesh.num_gpus


class Search:
    """Looks for the fewest meshes of one kind that keep a workload's promise."""

    def __init__(self, workload: Workload, kind: Kind, effort: Effort) -> None:
        """Nothing is simulated yet."""
        self._workload, self._kind, self._effort = workload, kind, effort
        self._is_open = workload.arrivals.rate > 0
        self._total = workload.arrivals.rate or workload.arrivals.clients

    def alone(self) -> Outcome:
        """What requests get that have a mesh to themselves."""
        return self._run(Demand(clients=1), max(20, self._effort.requests // 10), 1)

    def most(self) -> float:
        """Requests a second that a mesh answers at most, if they may wait as long as they like."""
        clients = 4 * self._kind.slots.num_slots * self._kind.slots.num_ranks
        return self._run(Demand(clients=clients), max(self._searched, 2 * clients), 1).requests_per_second

    def capacity(self, most: float) -> float:
        """Requests a second, or clients, that one mesh serves as promised, where it answers `most` a second at most."""
        if self._is_open:
            low, high = 0.0, most
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (middle, high) if self._keeps(middle) else (low, middle)
            return low
        few, many = 1, 2
        while many < self._total and self._keeps(many):
            few, many = many, 2 * many
        if many >= self._total and self._keeps(self._total):
            return float(self._total)
        many = min(many, int(self._total))
        while many - few > max(1, few // 32):
            middle_clients = (few + many) // 2
            few, many = (middle_clients, many) if self._keeps(middle_clients) else (few, middle_clients)
        return float(few)

    def answer(self, capacity: float) -> Answer:
        """So many meshes as `capacity` asks for, or a few more where a closer look says so."""
        count = self._fewest(capacity)
        for _ in range(MOST_MORE):
            number = min(count, self._effort.meshes)
            outcome = self._run(self._share(count), self._effort.requests, number)
            if outcome.kept >= self._workload.slo.share:
                return Answer(self._kind, count, capacity, outcome, number)
            count += max(1, math.ceil(MORE * count))
        return Answer(self._kind, None, capacity, outcome, number)

    def hopeless(self, alone: Outcome) -> Answer:
        """The answer where even a request that has a mesh to itself does not get what was promised."""
        return Answer(self._kind, None, 0.0, alone, 1)

    @property
    def _searched(self) -> int:
        return max(100, self._effort.requests // 3)

    def _fewest(self, capacity: float) -> int:
        return max(1, math.ceil(self._total / capacity - 1e-9)) if capacity > 0 else 1

    def least_gpus(self, most: float) -> int:
        """GPUs below which no number of meshes answers the load at all; 1 mesh's where clients wait for answers."""
        return self._fewest(most) * self._kind.mesh.num_gpus if self._is_open else self._kind.mesh.num_gpus

    def _share(self, count: int) -> Demand:
        if self._is_open:
            return Demand(rate=self._total / count)
        return Demand(clients=math.ceil(self._total / count))

    def _keeps(self, load: float) -> bool:
        demand = Demand(rate=load) if self._is_open else Demand(clients=int(load))
        return self._run(demand, max(self._searched, 4 * demand.clients), 1).kept >= self._workload.slo.share

    def _run(self, demand: Demand, number: int, meshes: int) -> Outcome:
        return simulate(self._workload, self._kind, demand, number, meshes, self._effort.seed)


def simulate(workload: Workload, kind: Kind, demand: Demand, number: int, meshes: int, seed: int) -> Outcome:
    """What `number` requests get on each of `meshes` meshes with `demand` each; the same for the same seed."""
    runs = []
    for mesh in range(meshes):
        arrivals = make_arrivals(demand, number, workload.maker(f"{seed} {mesh} requests"), f"{seed} {mesh} arrivals")
        dice = random.Random(f"{seed} {mesh} steps")
        policy = StepCosts(kind.times, kind.points, dice, workload.prompt_ms_per_token)
        runs.append(simulate_mesh(arrivals, policy, kind.slots))
    return outcome_of(workload, runs)


def make_arrivals(demand: Demand, number: int, make: Callable[[float], SimRequest], seed: str | int) -> Arrivals:
    """`number` requests as one mesh gets them."""
    if demand.rate > 0:
        return PoissonArrivals(demand.rate, number, make, random.Random(seed))
    return ClosedArrivals(min(demand.clients, number), number, make)


def outcome_of(workload: Workload, runs: Sequence[Sequence[SimRequest]]) -> Outcome:
    """The requests of several meshes taken together, without those of the warm-up."""
    counted, seconds = list[SimRequest](), 0.0
    for run in runs:
        by_arrival = sorted(run, key=lambda each: each.arrived)
        kept = by_arrival[int(WARM_UP * len(by_arrival)) :]
        counted += kept
        seconds += max(each.ended for each in kept) - kept[0].arrived
    extra = workload.request_ms
    tokens, steps = sum(each.num_output for each in counted), sum(each.num_steps for each in counted)
    promised = [each for each in counted if kept_promise(workload, each)]
    return Outcome(
        kept=len(promised) / len(counted),
        first_token_ms=quantiles([extra + 1e3 * each.first_seconds for each in counted]),
        per_token_ms=quantiles([1e3 * each.token_seconds for each in counted]),
        end_to_end_ms=quantiles([extra + 1e3 * (each.ended - each.arrived) for each in counted]),
        tokens_per_second=tokens / seconds,
        requests_per_second=len(counted) / seconds,
        tokens_per_step=tokens / steps,
    )


def kept_promise(workload: Workload, request: SimRequest) -> bool:
    """Did a request get what was promised, its time outside the engine included?"""
    first = 1e3 * request.first_seconds + workload.request_ms
    slo = workload.slo
    return first <= slo.first_token_ms and 1e3 * request.token_seconds <= slo.per_token_ms


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p90 and p99, the nearest rank."""
    ordered = sorted(values)
    p50, p90, p99 = (ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in (0.5, 0.9, 0.99))
    return p50, p90, p99
