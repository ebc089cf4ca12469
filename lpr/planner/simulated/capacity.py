"""How many meshes of a kind keep the SLO: the capacity of one, and so many that each has no more load than that.

A router splits requests over meshes, and then meshes are independent. The split here is random, as by a hash of the
prompt: a share of a Poisson process is a Poisson process, and clients are spread evenly. A router that knows the queues
does better. So one mesh at its share of the load stands for all, and thousands cost no more than a few: up to
`Effort.meshes` are simulated, each with its own seed, and their requests are evaluated together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from lpr.core.step_times import StepTimes
from lpr.engine.limits import Limits
from lpr.engine.scheduler import Scheduler
from lpr.planner.footprint import Mesh
from lpr.planner.simulated.costs import Points, StepCosts
from lpr.planner.simulated.mesh import Arrivals, ClosedArrivals, PoissonArrivals, SimRequest, simulate_mesh
from lpr.planner.simulated.workload import Demand, Workload

WARM_UP = 0.25
"""The first part of the requests, which finds an empty mesh, is not counted."""
HALVINGS = 6
"""The largest load that keeps the SLO is found to a 64th of a mesh's greatest throughput."""
MORE = 0.02
"""Share of further meshes where the number found turns out not to keep the SLO."""
MOST_MORE = 20


@dataclass(frozen=True)
class Effort:
    """How much is simulated."""

    requests: int = 1000
    """Per mesh in the end; a third of them during the search."""
    meshes: int = 4
    """Most meshes that are simulated in the end."""
    seed: int = 0


@dataclass(frozen=True)
class Kind:
    """A kind of mesh and its speed."""

    mesh: Mesh
    limits: Limits[SimRequest]
    times: StepTimes
    points: Points


@dataclass(frozen=True)
class Outcome:
    """Latencies of simulated meshes in milliseconds, [p50, p90, p99], and throughput."""

    kept: float
    """Share of the requests within the SLO."""
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
    """The number of meshes of a kind that keep the SLO."""

    kind: Kind
    num_meshes: int | None
    """None: no number does."""
    capacity: float
    """Requests a second, or clients, that one mesh serves within the SLO."""
    outcome: Outcome
    num_simulated: int

    @property
    def num_gpus(self) -> int | None:
        """GPUs of all meshes."""
        return None if self.num_meshes is None else self.num_meshes * self.kind.mesh.num_gpus


class Search:
    """Searches the fewest meshes of one kind that keep a workload's SLO."""

    def __init__(self, workload: Workload, kind: Kind, effort: Effort) -> None:
        self._workload, self._kind, self._effort = workload, kind, effort
        self._is_open = workload.arrivals.rate > 0
        self._total = workload.arrivals.rate or workload.arrivals.clients
        self._searched = max(100, effort.requests // 3)

    def alone(self) -> Outcome:
        """The outcome of requests that have a mesh to themselves."""
        return self._run(Demand(clients=1), max(20, self._effort.requests // 10), 1)

    def most(self) -> float:
        """Greatest requests per second of a mesh, whatever the waiting time."""
        clients = 4 * self._kind.limits.capacity
        return self._run(Demand(clients=clients), max(self._searched, 2 * clients), 1).requests_per_second

    def capacity(self, most: float) -> float:
        """Requests a second, or clients, that one mesh serves within the SLO; `most` is its greatest throughput."""
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
        """The meshes that `capacity` asks for, or a few more where a longer simulation needs them."""
        count = self._fewest(capacity)
        for _ in range(MOST_MORE):
            number = min(count, self._effort.meshes)
            outcome = self._run(self._demand(self._total / count), self._effort.requests, number)
            if outcome.kept >= self._workload.slo.share:
                return Answer(self._kind, count, capacity, outcome, number)
            count += max(1, math.ceil(MORE * count))
        return Answer(self._kind, None, capacity, outcome, number)

    def hopeless(self, alone: Outcome) -> Answer:
        """The answer where even a request that has a mesh to itself misses the SLO."""
        return Answer(self._kind, None, 0.0, alone, 1)

    def _fewest(self, capacity: float) -> int:
        return max(1, math.ceil(self._total / capacity - 1e-9)) if capacity > 0 else 1

    def least_gpus(self, most: float) -> int:
        """Fewest GPUs that can answer the load at all; those of one mesh where clients wait for answers."""
        return self._fewest(most) * self._kind.mesh.num_gpus if self._is_open else self._kind.mesh.num_gpus

    def _demand(self, load: float) -> Demand:
        return Demand(rate=load) if self._is_open else Demand(clients=math.ceil(load))

    def _keeps(self, load: float) -> bool:
        demand = self._demand(load)
        return self._run(demand, max(self._searched, 4 * demand.clients), 1).kept >= self._workload.slo.share

    def _run(self, demand: Demand, number: int, meshes: int) -> Outcome:
        return simulate(self._workload, self._kind, demand, number, meshes, self._effort.seed)


def simulate(workload: Workload, kind: Kind, demand: Demand, number: int, meshes: int, seed: int) -> Outcome:
    """The outcome of `number` requests on each of `meshes` meshes with `demand` each; the same for the same seed."""
    runs = []
    for mesh in range(meshes):
        make = workload.maker(f"{seed} {mesh} requests")
        arrivals: Arrivals = ClosedArrivals(demand.clients, number, make)
        if demand.rate > 0:
            arrivals = PoissonArrivals(demand.rate, number, make, random.Random(f"{seed} {mesh} arrivals"))
        dice = random.Random(f"{seed} {mesh} steps")
        policy = StepCosts(kind.times, kind.points, dice, workload.prompt_ms_per_token)
        runs.append(simulate_mesh(arrivals, policy, Scheduler(kind.limits)))
    return outcome_of(workload, runs)


def outcome_of(workload: Workload, runs: Sequence[Sequence[SimRequest]]) -> Outcome:
    """The outcome of several meshes together, without the warm-up."""
    counted, seconds = list[SimRequest](), 0.0
    for run in runs:
        kept = sorted(run, key=lambda each: each.arrived)[int(WARM_UP * len(run)) :]
        counted += kept
        seconds += max(each.ended for each in kept) - kept[0].arrived
    extra = workload.request_ms
    tokens, steps = sum(each.num_output for each in counted), sum(each.num_steps for each in counted)
    slo = workload.slo
    first = [extra + 1e3 * each.first_seconds for each in counted]
    per_token = [1e3 * each.token_seconds for each in counted]
    promised = [a <= slo.first_token_ms and b <= slo.per_token_ms for a, b in zip(first, per_token, strict=True)]
    return Outcome(
        kept=sum(promised) / len(counted),
        first_token_ms=quantiles(first),
        per_token_ms=quantiles(per_token),
        end_to_end_ms=quantiles([extra + 1e3 * (each.ended - each.arrived) for each in counted]),
        tokens_per_second=tokens / seconds,
        requests_per_second=len(counted) / seconds,
        tokens_per_step=tokens / steps,
    )


def quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """p50, p90 and p99, the nearest rank."""
    ordered, count = sorted(values), len(values)
    return ordered[int(0.5 * count)], ordered[int(0.9 * count)], ordered[int(0.99 * count)]
