"""Does `lpr.plan --service` say what a service does? Simulated latencies against measured ones, on this machine.

    python -m benchmarks.plan_service --data classeval.jsonl --output benchmarks/results/plan_service.json

A service is started with the bundled model and asked in rounds, each of which has all loads in turn:

    calibration   one client, and as many as there are slots. From them come tokens per step and nodes at both batch
                  sizes, the time of a prompt's token and of a request outside the engine (from one client's times to
                  the first token, against the prompt's length), and from the service itself, when it ends, its table
                  of step times. What both calibrations of a round took over what that table says is the machine's
                  pace in that round, at the two batch sizes and in between; prompts have a pace of their own.
    check         other numbers of clients and Poisson arrivals, with the same prompts, as tokens per step differ much
                  between them: each is simulated by lpr.planner.service with the same arrivals and lengths, and
                  compared.

Compared are the medians of the time to the first token and end to end, and tokens per second. An entry is outside where
simulated and measured differ by more than 25 %, and the exit code is 1 then. Loads alternate so that what else the
machine does meets calibration and check alike; `load_average` says how busy it was.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from benchmarks.common import model_parser, progress, run_main, whole
from benchmarks.data import prompts_of
from benchmarks.processes.services import running
from benchmarks.serve import Answer, Round, one_round, parse_load
from lpr.config import InputError
from lpr.core.step_times import KNOTS, StepTimes
from lpr.planner.service.capacity import make_arrivals
from lpr.planner.service.costs import StepCosts, measured_points
from lpr.planner.service.mesh import Slots, simulate_mesh
from lpr.planner.service.requests import SimRequest
from lpr.planner.service.workload import Demand, Speed

TOLERANCE = 0.25
FAR_APART = 20
"""Tokens by which two prompts must differ for their times to say what a token takes."""
SEEDS = 8
"""Runs of the simulation, whose requests are taken together: which tokens are accepted is chance."""
NO_TIMES = StepTimes({(1, 0): [1.0] * len(KNOTS)})
"""Until the service has written its own."""
COUNTERS = {"drafted": "vllm:spec_decode_num_draft_tokens_total", "steps": "lpr:steps_total"}


@dataclass
class Calibration:
    """What one temperature's calibration has seen."""

    rounds: dict[int, list[Round]] = field(default_factory=dict)
    """By the number of clients."""
    counts: dict[int, dict[str, float]] = field(default_factory=dict)

    def speeds(self, temperature: float) -> list[Speed]:
        """Tokens per step and nodes at each number of clients."""
        found = []
        for clients, rounds in sorted(self.rounds.items()):
            answers = told(rounds)
            tokens, steps = sum(each.num_tokens for each in answers), sum(each.num_steps for each in answers)
            nodes = 1 + self.counts[clients]["drafted"] / self.counts[clients]["steps"]
            found.append(
                Speed(temperature=temperature, batch=clients, tokens_per_step=max(1.0, tokens / steps), nodes=nodes)
            )
        return found

    @property
    def pace_spread(self) -> float:
        """Standard deviation of the logarithm of tokens per step, between requests."""
        return statistics.stdev([math.log(each.num_tokens / each.num_steps) for each in told(self.rounds[1])])


def fit_prompts(rounds: Sequence[Round]) -> tuple[float, float]:
    """Milliseconds to the first token as (that of an empty prompt, of each token), by one client's answers.

    The line is Theil's and Sen's, the median of the slopes between all pairs: some requests meet another program.
    """
    points = sorted((answer.num_prompt, 1e3 * (answer.ttft or 0.0)) for answer in told(rounds))
    slopes = [(high[1] - low[1]) / (high[0] - low[0])
              for low, high in itertools.combinations(points, 2) if high[0] - low[0] >= FAR_APART]  # fmt: skip
    slope = max(0.0, statistics.median(slopes)) if slopes else 0.0
    return max(0.0, statistics.median([ms - slope * length for length, ms in points])), slope


def told(rounds: Sequence[Round]) -> list[Answer]:
    """The answers; raises InputError if a request failed, as nothing can be compared then."""
    answers = [answer for each in rounds for answer in each.answers]
    failed = next((each.failed for each in answers if each.failed is not None or not each.num_steps), None)
    if failed is not None or not answers:
        raise InputError(f"a request failed: {failed}")
    return answers


def counters(url: str) -> dict[str, float]:
    """What the service has counted so far."""
    lines = httpx.get(url + "/metrics", timeout=30).text.splitlines()
    return {
        name: sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric + "{"))
        for name, metric in COUNTERS.items()
    }


@dataclass
class Asked:
    """All that a service was asked, and what it has left."""

    calibrations: dict[float, Calibration]
    times: StepTimes
    checked: dict[tuple[float, str, float], list[Round]] = field(default_factory=dict)
    """By temperature and load."""
    load_average: list[float] = field(default_factory=lambda: [os.getloadavg()[0]])


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Ask, calibrate, simulate, compare."""
    prompts = prompts_of(options)
    loads = [parse_load(each) for each in options.loads]
    if any(kind not in ("closed", "poisson") for kind, _ in loads):
        raise InputError("--loads: closed:C and poisson:R can be simulated, bursts and typing cannot")
    asked = ask_all(options, prompts, loads, console)
    # The time of a prompt is that of greedy and of sampled requests alike.
    prompt_times = fit_prompts([found for each in asked.calibrations.values() for found in each.rounds[1]])
    runs = []
    for (temperature, kind, size), rounds in asked.checked.items():
        simulator = Simulator(asked.calibrations[temperature], temperature, asked.times, prompt_times, options)
        runs.append(simulator.compare(kind, size, rounds))
    ratios = [ratio for run in runs for ratio in run["simulated_over_measured"].values()]
    outside = sum(abs(ratio - 1) > TOLERANCE for ratio in ratios)
    names = ("batch", "requests", "rounds", "max_new_tokens", "temperatures")
    return {
        "benchmark": "plan_service",
        "data": Path(options.data).name,
        "num_prompts": len(prompts),
        **{name: getattr(options, name) for name in names},
        "load_average": [round(each, 1) for each in asked.load_average],
        "calibration": [calibrated(each, temperature) for temperature, each in asked.calibrations.items()],
        "first_token_ms": round(prompt_times[0], 2),
        "prompt_ms_per_token": round(prompt_times[1], 4),
        "step_times": asked.times.to_json(),
        "runs": runs,
        "within": f"{len(ratios) - outside} of {len(ratios)} within {TOLERANCE:.0%}",
        "num_failed": outside,
    }


def ask_all(
    options: argparse.Namespace, prompts: Sequence[str], loads: Sequence[tuple[str, float]], console: Console
) -> Asked:
    """Start a service, ask it everything in rounds, and end it."""
    flags = ["--no-access-log", "--dtype", options.dtype, "--max-batch-size", str(options.batch)]
    flags += ["--share-drafts", "none", "--no-prefix-reuse", *(["--exact"] if options.exact else [])]
    for name in ("model", "device"):
        flags += [f"--{name}", getattr(options, name)] if getattr(options, name) else []
    asked = Asked({each: Calibration() for each in options.temperatures}, NO_TIMES)
    sizes = (1, options.batch)
    total = options.rounds * len(options.temperatures) * (len(loads) + len(sizes))
    with tempfile.TemporaryDirectory() as cache:
        more = {"XDG_CACHE_HOME": cache}
        with running(flags, options.threads, more=more) as service, progress(console, total, "asking") as advance:
            for number in range(-1, options.rounds):  # the first requests of a process are slower
                for temperature in options.temperatures:
                    ask = Asking(service.url, options, temperature, number)
                    for clients in sizes:
                        ask.calibrate(clients, prompts, asked.calibrations[temperature])
                        advance(number >= 0, f"{clients} clients")
                    for kind, size in loads if number >= 0 else ():
                        found = ask.load(kind, size, prompts)
                        asked.checked.setdefault((temperature, kind, size), []).append(found)
                        advance(1, f"{kind}:{size:g}")
                    asked.load_average.append(os.getloadavg()[0])
        asked.times = kept_times(Path(cache))
    return asked


@dataclass(frozen=True)
class Asking:
    """One round's requests at one temperature."""

    url: str
    options: argparse.Namespace
    temperature: float
    number: int

    def calibrate(self, clients: int, prompts: Sequence[str], calibration: Calibration) -> None:
        """As many clients, whose answers and counts go to `calibration`, unless this is the round before the first."""
        before = counters(self.url)
        found = self.load("closed", clients, prompts)
        if self.number < 0:
            return
        calibration.rounds.setdefault(clients, []).append(found)
        counts = calibration.counts.setdefault(clients, dict.fromkeys(COUNTERS, 0.0))
        for name, value in counters(self.url).items():
            counts[name] += value - before[name]

    def load(self, kind: str, size: float, prompts: Sequence[str]) -> Round:
        """One load; every round takes up the prompts where the round before ended, and repeats its arrivals."""
        asked = {**vars(self.options), "temperature": self.temperature, "seed": 0}
        asked |= {"first": max(0, self.number) * self.options.requests, "requests": self.options.requests}
        if self.number < 0:
            asked["requests"] = max(2, int(size))
        return asyncio.run(one_round(kind, size, self.url, prompts, argparse.Namespace(**asked)))


@dataclass(frozen=True)
class Pace:
    """How long things took in a round."""

    batch: int
    alone: float
    """How much longer than the table says steps took with one request."""
    full: float
    """With `batch`; in between by the logarithm."""
    request_ms: float = 0.0
    """A request outside the engine."""
    prompt_ms: float = 0.0
    """Each token of a prompt."""

    def factor(self, count: int) -> float:
        """How much longer than the table says a step of `count` requests takes."""
        part = math.log(max(1, count)) / math.log(self.batch) if self.batch > 1 else 0.0
        return float(self.alone ** (1 - part) * self.full**part)


class Simulator:
    """The mesh as calibrated, and what it makes of a load."""

    def __init__(
        self,
        calibration: Calibration,
        temperature: float,
        times: StepTimes,
        prompt_times: tuple[float, float],
        options: argparse.Namespace,
    ) -> None:
        """Set up from what was measured at the same temperature, and `prompt_times` as `fit_prompts` finds them."""
        self._options, self._temperature, self._times = options, temperature, times
        self._points = measured_points(calibration.speeds(temperature), options.batch)
        self._spread = calibration.pace_spread
        self._prompt_times = prompt_times
        self._paces = [self._pace(number, calibration) for number in range(options.rounds)]

    def compare(self, kind: str, size: float, rounds: Sequence[Round]) -> dict[str, Any]:
        """A load's measured rounds beside the simulation of the same arrivals and lengths."""
        answers = told(rounds)
        measured = {
            "ttft_ms_p50": 1e3 * statistics.median([each.ttft or 0.0 for each in answers]),
            "end_to_end_ms_p50": 1e3 * statistics.median([each.seconds for each in answers]),
            "tokens_per_second": sum(each.num_tokens for each in answers) / sum(each.seconds for each in rounds),
        }
        runs = [(self._run(kind, size, each, f"{number} {seed}", self._paces[number]), self._paces[number].request_ms)
                for seed in range(SEEDS) for number, each in enumerate(rounds)]  # fmt: skip
        requests = [(request, outside) for run, outside in runs for request in run]
        seconds = sum(max(each.ended for each in run) for run, _ in runs)
        simulated = {
            "ttft_ms_p50": statistics.median([ms + 1e3 * each.first_seconds for each, ms in requests]),
            "end_to_end_ms_p50": statistics.median([ms + 1e3 * (each.ended - each.arrived) for each, ms in requests]),
            "tokens_per_second": sum(each.num_output for each, _ in requests) / seconds,
        }
        steps = sum(each.num_steps for each in answers), sum(each.num_steps for each, _ in requests)
        return {
            "name": "greedy" if self._temperature == 0 else f"T {self._temperature:g}",
            "case": f"{kind}:{size:g}",
            "requests": len(answers),
            "measured": {name: round(value, 2) for name, value in measured.items()},
            "simulated": {name: round(value, 2) for name, value in simulated.items()},
            "measured_tokens_per_step": round(sum(each.num_tokens for each in answers) / steps[0], 3),
            "simulated_tokens_per_step": round(sum(each.num_output for each, _ in requests) / steps[1], 3),
            "simulated_over_measured": {name: round(simulated[name] / measured[name], 3) for name in measured},
        }

    def _pace(self, number: int, calibration: Calibration) -> Pace:
        """How fast the machine was in one round, by what its two calibrations took.

        The answers of one client say how much longer than usual prompts took; what is left of their time are steps,
        and of the time to an empty prompt's first token, what a request takes outside the engine.
        """
        few, many = (calibration.rounds[clients][number] for clients in (1, self._options.batch))
        base, slope = self._prompt_times
        usual = [1e-3 * (base + slope * each.num_prompt) for each in few.answers]
        slower = statistics.median([(each.ttft or 0.0) / ms for each, ms in zip(few.answers, usual, strict=True)])
        base, slope = base * slower, slope * slower
        first_ms = self._times.time(self._points[self._temperature, 1, 1].nodes)

        def alone(factor: float) -> Pace:
            return Pace(self._options.batch, factor, factor, max(0.0, base - factor * first_ms), slope)

        def alone_seconds(factor: float) -> float:
            outside = 1e-3 * alone(factor).request_ms * len(few.answers)
            return outside + self._seconds("closed", 1, few, alone(factor))

        pace = alone(solve(alone_seconds, few.seconds))
        size = self._options.batch
        return replace(
            pace, full=solve(lambda full: self._seconds("closed", size, many, replace(pace, full=full)), many.seconds)
        )

    def _seconds(self, kind: str, size: float, measured: Round, pace: Pace) -> float:
        """What a load takes, on average."""
        runs = [self._run(kind, size, measured, f"pace {seed}", pace) for seed in range(SEEDS)]
        return statistics.mean(max(each.ended for each in run) for run in runs)

    def _run(self, kind: str, size: float, measured: Round, seed: str, pace: Pace) -> list[SimRequest]:
        """The requests of one round, simulated once."""
        dice, asked = random.Random(f"{seed} paces"), iter(measured.answers)
        spread = self._spread

        def make(now: float) -> SimRequest:
            answer = next(asked)
            slowness = math.exp(spread * dice.gauss(0.0, 1.0) - spread * spread / 2)
            return SimRequest(
                now, answer.num_prompt, answer.num_tokens, self._temperature, 1 / slowness, [0] * answer.num_prompt
            )

        demand = Demand(rate=size) if kind == "poisson" else Demand(clients=int(size))
        arrivals = make_arrivals(demand, len(measured.answers), make, 0)  # one_round's own seed
        costs = StepCosts(self._times, self._points, random.Random(f"{seed} steps"), pace.prompt_ms, pace.factor)
        return simulate_mesh(arrivals, costs, Slots(num_slots=self._options.batch, retains=False))


def solve(seconds: Callable[[float], float], wanted: float) -> float:
    """The factor at which `seconds`, which is nearly linear in it, is as `wanted`, by secants; 0.1 to 10."""
    low, high = 1.0, 2.0
    found = seconds(low), seconds(high)
    for _ in range(3):
        if found[0] == found[1]:
            break
        better = min(10.0, max(0.1, low + (high - low) * (wanted - found[0]) / (found[1] - found[0])))
        if better in (low, high):
            break
        low, high, found = high, better, (found[1], seconds(better))
    return high if abs(found[1] - wanted) <= abs(found[0] - wanted) else low


def kept_times(cache: Path) -> StepTimes:
    """The table that the service has written at its end: measured at its start, and corrected by its steps."""
    files = list(cache.rglob("step_times/*.json"))
    if len(files) != 1:
        raise InputError(f"the service has left {len(files)} tables of step times")
    return StepTimes.from_json(json.loads(files[0].read_text(encoding="utf-8")))


def calibrated(calibration: Calibration, temperature: float) -> dict[str, Any]:
    """What the calibration came to, for the result."""
    return {
        "temperature": temperature,
        "speeds": [
            {"batch": each.batch, "tokens_per_step": round(each.tokens_per_step, 3), "nodes": round(each.nodes, 2)}
            for each in calibration.speeds(temperature)
        ],
        "pace_spread": round(calibration.pace_spread, 3),
    }


def main() -> int:
    """Run the benchmark from the command line."""
    parser = model_parser("plan_service", "The planner's simulation of a service against the service.", threads=1)
    parser.set_defaults(prompts=100, max_new_tokens=64)
    loads = ["closed:2", "closed:4", "closed:16", "poisson:0.5", "poisson:1"]
    parser.add_argument("--loads", nargs="+", default=loads, metavar="L", help="closed:CLIENTS or poisson:RATE")
    parser.add_argument("--requests", type=whole, default=24, metavar="N", help="requests per load and round (24)")
    parser.add_argument("--rounds", type=whole, default=3, metavar="N", help="repetitions, interleaved (3)")
    parser.add_argument("--batch", type=whole, default=8, metavar="N", help="slots of the service (8)")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.8], metavar="T")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
