"""Idle replicas under load, predicted: `python -m benchmarks.serve --simulate`.

    python -m benchmarks.serve --simulate --output benchmarks/results/serve_simulated.json

Eight GPUs serve a 7B model in four ways: plain data parallelism, data parallelism with drafts, one replica of tp 8 with
drafts, and elastic lp, the home ranks of one engine. Requests are made up. The engine's own scheduler decides what each
step does, and a table of an H100 how long it takes, which is itself an ESTIMATE. Reading the K/V is added to it; for tp
it is divided by the ranks, with the planner's time for the collectives added. Tokens per step are those of the bundled
model, by the nodes of a tree. The host's part is that of `benchmarks.host`. Replicas of data parallelism have clocks of
their own, and a router that sends each request where fewest are. Those of elastic lp step together, and a step takes as
long as its busiest rank.

Loads are parts of what data parallelism with drafts answers when it is never idle. The claim to test: at the lowest
load elastic lp answers a request 1.3 times as fast as data parallelism with drafts, and at full load it brings no less
than 97 % of its tokens a second.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import STEP_TIMES, OneLineParser, make_parser, whole
from lpr.config import InputError
from lpr.core.step_times import KNOTS, SHORTEST_KV, StepTimes
from lpr.engine.options import load_step_times
from lpr.engine.replicated import SHORTEST_FILL
from lpr.planner.facts import facts_of
from lpr.planner.footprint import Mesh, kv_row_bytes
from lpr.planner.hardware import GPUS
from lpr.planner.interconnect import LINKS, Network
from lpr.planner.measured import Measured, read_measured
from lpr.planner.prediction import Inputs, Machine, Setting, tp_seconds
from lpr.planner.presets import measured_values, resolve
from lpr.planner.simulated.capacity import WARM_UP, make_arrivals, quantiles
from lpr.planner.simulated.costs import Point, Points, StepCosts, predicted_points
from lpr.planner.simulated.mesh import Slots, simulate_mesh
from lpr.planner.simulated.replicas import simulate_replicas
from lpr.planner.simulated.requests import SimRequest
from lpr.planner.simulated.workload import Demand, Lengths, Promise, Workload

HOST_MS = 0.5
"""Of a step, whatever it drafts (benchmarks/results/host.json: one request of 16 nodes takes 0.57 ms)."""
HOST_NODES_MS = ((1.0, 0.006), (64.0, 0.066), (128.0, 0.102), (512.0, 0.4))
"""Nodes of a tree to the milliseconds that a request adds (the same, batches of 1 and 8; beyond 128 nodes in line)."""
SPEEDUP, PART = 1.3, 0.97
"""The claim."""


@dataclass(frozen=True)
class Service:
    """One way to use the GPUs."""

    name: str
    mesh: Mesh
    num_replicas: int
    """Of meshes that know nothing of each other."""
    drafts: bool


def services(num_gpus: int) -> list[Service]:
    """What is compared, the baseline second."""
    return [
        Service("data parallel", Mesh(1, 1), num_gpus, False),
        Service("data parallel, drafts", Mesh(1, 1), num_gpus, True),
        Service(f"tp {num_gpus}, drafts", Mesh(1, num_gpus), 1, True),
        Service("elastic lp", Mesh(num_gpus, 1), 1, True),
    ]


def simulated_parser() -> OneLineParser:
    """The command line of `--simulate`."""
    parser = make_parser("serve --simulate", "Idle replicas under load, predicted.", threads=1)
    parser.add_argument("--model", default="codellama-7b", metavar="M", help="preset, folder or hub id (codellama-7b)")
    parser.add_argument("--gpu", default="h100", metavar="G", help=", ".join(GPUS))
    estimated = str(STEP_TIMES / "h100_7b.json")
    parser.add_argument(
        "--costs", default=estimated, metavar="FILE", help="step times of one GPU (H100, 7B, estimated)"
    )
    parser.add_argument("--gpus", type=whole, default=8, metavar="N", help="in all (default 8)")
    parser.add_argument("--slots", type=whole, default=8, metavar="N", help="requests per GPU in a step (default 8)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], metavar="T")
    loads = [0.02, 0.1, 0.25, 0.5, 0.75, 0.9]
    parser.add_argument("--loads", type=float, nargs="+", default=loads, metavar="X", help="parts of the full load")
    parser.add_argument("--requests", type=whole, default=600, metavar="N", help="per service and load (default 600)")
    parser.add_argument("--ttft-ms", type=float, default=500.0, metavar="MS", help="goodput: first token within (500)")
    parser.add_argument("--token-ms", type=float, default=10.0, metavar="MS", help="goodput: mean time per token (10)")
    parser.add_argument("--seed", type=whole, default=0, metavar="N", help="of arrivals and lengths")
    return parser


class Simulation:
    """All services at one temperature."""

    def __init__(self, options: argparse.Namespace, temperature: float) -> None:
        """Raises InputError for a model or GPU that is unknown."""
        if options.gpu not in GPUS:
            raise InputError(f"--gpu {options.gpu!r} is none of {', '.join(GPUS)}")
        gpu = GPUS[options.gpu]
        self._options, self._temperature = options, temperature
        facts = facts_of(resolve(options.model).config, options.model)
        machine = Machine(gpu, Network(LINKS[gpu.link], LINKS["ib-hdr"]), False)
        self._workload = Workload(
            arrivals=Demand(clients=1),
            prompt=Lengths(median=400, p90=900, most=1600),
            output=Lengths(median=192, p90=400, most=768),
            slo=Promise(first_token_ms=options.ttft_ms, per_token_ms=options.token_ms),
            temperature={str(temperature): 1.0},
        )
        self._setting = Setting(facts, machine, measured(), 600, 2, None)
        self._policy = cache(self._make_policy)

    def _make_policy(self, service: Service) -> tuple[Slots, Any, Points]:
        options, mesh = self._options, service.mesh
        slots = options.slots * mesh.tp
        times = self._times(mesh, slots)
        points = predicted_points(self._setting, mesh, times, [self._temperature], slots)
        if not service.drafts:
            points = {key: Point(1.0, 1.0) for key in points}
        # The part of a step's host time that is alike for all is counted as the gather is: once a step.
        points = {key: replace(each, gather_ms=each.gather_ms + HOST_MS) for key, each in points.items()}
        limits = Slots(
            num_slots=slots,
            num_ranks=mesh.lp,
            longest_chain=64,
            join_chunk=max(SHORTEST_FILL, times.critical_length()),
            times=times if mesh.lp > 1 else None,
            nodes_per_rank=64,
        )
        return limits, times, points

    def _times(self, mesh: Mesh, slots: int) -> StepTimes:
        """The table for a mesh and its batches."""
        setting, inputs = self._setting, Inputs()
        known = load_step_times(Path(self._options.costs)).row(1, SHORTEST_KV)
        byte_ms = 1e3 / (setting.machine.gpu.bandwidth * inputs.bandwidth_fraction)
        rows = {}
        for batch in sorted({1, slots}):
            for kv in (SHORTEST_KV, self._workload.context):
                cache_ms = batch * kv * kv_row_bytes(setting.facts, mesh.tp, setting.element_size) * byte_ms
                rows[batch, kv] = [
                    ms / mesh.tp
                    + cache_ms
                    + 1e3 * tp_seconds(setting.facts, mesh.tp, setting.element_size, nodes, setting.machine, inputs)
                    for nodes, ms in zip(KNOTS, known, strict=True)
                ]
        return StepTimes(rows)

    def run(self, service: Service, demand: Demand, number: int) -> dict[str, Any]:
        """What `number` requests get; the same ones for every service."""
        slots, times, points = self._policy(service)
        seed = self._options.seed
        arrivals = make_arrivals(demand, number, self._workload.maker(f"{seed} requests"), f"{seed} arrivals")
        policies = [StepCosts(times, points, random.Random(f"{seed} {each}")) for each in range(service.num_replicas)]
        if service.num_replicas > 1:
            return self._figures(simulate_replicas(arrivals, policies, slots))
        return self._figures(simulate_mesh(arrivals, policies[0], slots))

    def _figures(self, done: Sequence[SimRequest]) -> dict[str, Any]:
        """Of the requests in the middle: those at both ends find an empty service."""
        ordered = sorted(done, key=lambda each: each.arrived)
        first = int(WARM_UP * len(ordered))
        counted = ordered[first : len(ordered) - first]
        # From here to there the service is as loaded as it is meant to be.
        begin, end = counted[0].arrived, ordered[len(ordered) - first].arrived
        slo = self._workload.slo
        good = [
            each
            for each in counted
            if 1e3 * each.first_seconds <= slo.first_token_ms and 1e3 * each.token_seconds <= slo.per_token_ms
        ]
        tokens = sum(each.num_output for each in counted)
        return {
            "end_to_end_ms": round(1e3 * statistics.mean(each.ended - each.arrived for each in counted), 2),
            "first_token_ms": [round(1e3 * each, 2) for each in quantiles([each.first_seconds for each in counted])],
            "per_token_ms": [round(1e3 * each, 3) for each in quantiles([each.token_seconds for each in counted])],
            "requests_per_second": round(len(counted) / (end - begin), 3),
            "tokens_per_second": round(tokens / (end - begin), 1),
            "goodput": round(len(good) / (end - begin), 3),
            "kept": round(len(good) / len(counted), 4),
            "tokens_per_step": round(tokens / sum(each.num_steps for each in counted), 3),
        }


def measured() -> Measured:
    """What the planner knows, with the host's time of the core as it is now."""
    known = read_measured(measured_values())
    return replace(known, host_ms=dict.fromkeys(known.host_ms, HOST_NODES_MS))


def simulate(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Every service at every load, and what came of the claim."""
    if any(not 0 < load < 1 for load in options.loads):
        raise InputError("--loads are parts of the full load, between 0 and 1")
    console.print(
        "ceiling: at low load the tokens per step of all replicas' nodes at the price of one's; ESTIMATED step times",
        highlight=False,
    )
    runs, claims = [], []
    for temperature in options.temperatures:
        simulation, compared = Simulation(options, temperature), services(options.gpus)
        full = Demand(clients=2 * options.gpus * options.slots)
        number = max(options.requests, 4 * full.clients)
        at_full = {each.name: simulation.run(each, full, number) for each in compared}
        most = at_full[compared[1].name]["requests_per_second"]
        found: dict[tuple[str, float], dict[str, Any]] = {}
        for load in sorted(options.loads):
            for each in compared:
                found[each.name, load] = simulation.run(each, Demand(rate=load * most), options.requests)
        found |= {(name, 1.0): figures for name, figures in at_full.items()}
        runs += [
            {"temperature": temperature, "service": name, "load": load, "rate": round(load * most, 3), **figures}
            for (name, load), figures in found.items()
        ]
        claims.append({"temperature": temperature, **claim(found, compared, min(options.loads))})
    return {
        "benchmark": "serve_simulated",
        "note": "step times are estimated; no GPU was available",
        "model": options.model,
        "machine": options.gpu,
        "times": Path(options.costs).name,
        "gpus": options.gpus,
        "slots": options.slots,
        "num_requests": options.requests,
        "ttft_ms": options.ttft_ms,
        "token_ms": options.token_ms,
        "acceptance_source": measured().source,
        "claims": claims,
        "runs": runs,
    }


def claim(found: dict[tuple[str, float], dict[str, Any]], compared: Sequence[Service], low: float) -> dict[str, Any]:
    """Elastic lp against data parallelism with drafts."""
    base, elastic = compared[1].name, compared[-1].name
    faster = found[base, low]["end_to_end_ms"] / found[elastic, low]["end_to_end_ms"]
    part = found[elastic, 1.0]["tokens_per_second"] / found[base, 1.0]["tokens_per_second"]
    return {
        "faster_at_low_load": round(faster, 3),
        "part_at_full_load": round(part, 3),
        "holds": bool(faster >= SPEEDUP and part >= PART),
    }
