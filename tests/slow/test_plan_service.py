"""The long tests of tests/planner/test_plan_service.py."""

from __future__ import annotations

import json
import random
import statistics

import pytest

from lpr.engine.scheduler import Scheduler
from lpr.planner.footprint import Mesh
from lpr.planner.simulated.capacity import Kind, simulate
from lpr.planner.simulated.costs import Point, StepCosts
from lpr.planner.simulated.mesh import PoissonArrivals, SimRequest, simulate_mesh
from lpr.planner.simulated.workload import Demand, Lengths, Workload, read_workload
from tests.planner.test_plan_service import EXAMPLE, TIMES, given, limits, mean_wait, plan, workload


def test_one_slot_is_the_queue_of_the_books(monkeypatch: pytest.MonkeyPatch) -> None:
    """M/D/1, by Pollaczek and Khinchine: a wait of rho / (2 (1 - rho)) before a service of one second."""
    for load in (0.3, 0.6, 0.8):
        assert mean_wait(1, load) == pytest.approx(1 + load / (2 * (1 - load)), rel=0.07)
    # Arrivals that come one at a time, as if someone had spaced them, wait less: the check can fail.
    monkeypatch.setattr(random.Random, "expovariate", lambda self, rate: 1 / rate)
    assert mean_wait(1, 0.8, 1000) < 0.5 * (1 + 0.8 / (2 * 0.2))


def test_a_sample_of_meshes_stands_for_all() -> None:
    """Requests split by chance over eight meshes, all of them simulated, are served as the plan's sample says."""
    work = Workload(
        arrivals=Demand(rate=80.0),
        prompt=Lengths(median=100, p90=300, most=600),
        output=Lengths(median=32),
        slo=read_workload(EXAMPLE).slo,
    )
    kind = Kind(Mesh(1, 1), limits(), TIMES, {(0.0, 8, 1): Point(3.0, 16.0)})
    make, dice = work.maker("all"), random.Random("router")
    all_requests = PoissonArrivals(80.0, 4800, make, random.Random("all")).due(1e9)
    router: list[list[SimRequest]] = [[] for _ in range(8)]
    for each in all_requests:
        dice.choice(router).append(each)
    served = [each for part in router for each in simulate_mesh(
        given(*part), StepCosts(TIMES, kind.points, random.Random(0)), Scheduler(kind.limits))]  # fmt: skip
    sample = simulate(work, kind, Demand(rate=10.0), 800, 3, seed=0)
    measured = statistics.median(1e3 * each.first_seconds for each in served)
    assert sample.first_token_ms[0] == pytest.approx(measured, rel=0.1)


def test_more_load_needs_more_meshes_and_less_promised_fewer(plan) -> None:
    def meshes(*flags: str) -> int:
        return json.loads(plan(workload(), "--json", *flags)[1])["recommended"]["meshes"]

    usual = meshes()
    assert meshes("--rate", "100") > usual > meshes("--rate", "5") == 1
    assert meshes("--first-token-ms", "3000") <= usual < meshes("--first-token-ms", "60")
    assert meshes("--clients", "64") > meshes("--clients", "8")
