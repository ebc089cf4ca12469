"""Predicted tokens per second on GPUs that we do not have: `python -m benchmarks.strong_scaling --simulate`.

    python -m benchmarks.strong_scaling --simulate --output benchmarks/results/simulate.json
    python -m benchmarks.strong_scaling --simulate --times tn_h100.json --check-runs results/simulate_runs.json

First the check: gpt-fast's published tensor-parallel runs against the model that two of them were fitted to, and, with
`--check-runs`, recorded runs of one and two processes. Then the predictions, each with its uncertainty. Acceptance and
host time are those of benchmarks/results; `--refresh` copies them into the package for lpr.plan.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import RESULTS, OneLineParser, make_parser, read_json, write_json
from benchmarks.simulated.published import GPT_FAST, check_published, compare_runs
from lpr.config import DecodeConfig, InputError
from lpr.core.step_times import StepTimes, read_step_times
from lpr.planner.facts import ModelFacts, facts_of
from lpr.planner.footprint import Mesh, footprint, meshes, split_problem
from lpr.planner.hardware import GPUS
from lpr.planner.interconnect import LINKS, Network
from lpr.planner.measured import Measured, read_measured
from lpr.planner.prediction import Estimate, Inputs, Machine, Prediction, Setting, advantage, predict
from lpr.planner.presets import measured_values, package_file, resolve

MODELS = ("codellama-7b", "codellama-13b", "codellama-34b", "codellama-70b")
MACHINES = {"a100-80gb": "nvlink-a100", "h100": "nvlink-h100"}
TOLERANCE = 0.25
"""A row of the check that is further off is called wrong."""


@dataclass(frozen=True)
class Assumed:
    """What all predictions of a run share."""

    measured: Measured
    inputs: Inputs
    times: StepTimes | None
    """Measured t(n) in place of the roofline, for tp 1 only."""
    kv: int
    gpus: list[int]
    temperatures: list[float]


def simulate_parser() -> OneLineParser:
    """The command line of `--simulate`."""
    parser = make_parser("strong_scaling --simulate", "Predicted tokens per second.", threads=1)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="M", help="presets, folders, hub ids")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    parser.add_argument("--gpu", nargs="+", default=list(MACHINES), metavar="G", help=", ".join(GPUS))
    parser.add_argument("--link", metavar="L", help=f"inside a host (default: the GPU's own): {', '.join(LINKS)}")
    parser.add_argument("--network", default="ib-hdr", metavar="L", help="between hosts of 8 GPUs (default ib-hdr)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], metavar="T")
    parser.add_argument("--kv", type=int, default=1024, metavar="N", help="cached tokens (default 1024)")
    parser.add_argument("--eager", action="store_true", help="launch kernels one by one, without captured graphs")
    parser.add_argument("--times", metavar="FILE", help="step times as of --costs, not the roofline (tp 1 only)")
    parser.add_argument("--check-runs", metavar="FILE", help="compare with recorded runs, too")
    parser.add_argument("--refresh", action="store_true", help="copy measurements of benchmarks/results to lpr/assets")
    return parser


def table_of(values: Any, options: argparse.Namespace) -> Any:
    """The table of step times in a file: itself, or in a result of benchmarks.gpu_check that of one of the models."""
    if not isinstance(values, dict) or values.get("benchmark") != "gpu_check":
        return values
    tables = [section["table"] for section in values["sections"].values() if "table" in section]
    chosen = [table for table in tables if table["name"] in options.models] or tables
    if not chosen:
        raise InputError(f"--times {options.times}: it measured no step times")
    return chosen[0]


def simulate(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Check, predict, compare."""
    if options.refresh:
        write_json(package_file("measured.json"), measurements_of(RESULTS))
    machines = machines_of(options)
    values = read_json(options.times) if options.times else None
    if values is not None:
        values = table_of(values, options)
    times = read_step_times(values, f"--times {options.times}") if options.times else None
    compared = compare_runs(read_json(options.check_runs)) if options.check_runs else None
    assumed = Assumed(read_measured(measured_values()), Inputs(), times, options.kv, options.gpus, options.temperatures)
    models = [load_facts(name) for name in options.models]
    console.print(
        "ceiling: bytes over the data sheet's bandwidth (the floor of lpr.plan). Everything below is PREDICTED: no GPU "
        "was available; acceptance is that of the bundled 5.5M model, not of the models named",
        highlight=False,
    )
    checks = check_published({name: load_facts(name) for name in GPT_FAST}, assumed.inputs)
    return {
        "benchmark": "simulate",
        "note": "predictions; no GPU was available",
        "inputs": asdict(assumed.inputs),
        "acceptance_source": assumed.measured.source,
        "times_source": (values or {}).get("source", options.times) or "roofline",
        "gpt_fast": [{**asdict(check), "ratio": round(check.ratio, 4)} for check in checks],
        "runs": compared,
        "models": [predict_model(facts, machine, assumed) for facts in models for machine in machines],
    }


@cache
def load_facts(name: str) -> ModelFacts:
    """The facts of what `--model` of lpr.plan could name."""
    return facts_of(resolve(name).config, name)


def machines_of(options: argparse.Namespace) -> list[Machine]:
    """The machines that the command line asks for; raises InputError."""
    machines = []
    for name in options.gpu:
        if name not in GPUS:
            raise InputError(f"--gpu {name!r} is none of {', '.join(GPUS)}")
        gpu = GPUS[name]
        for link in (options.link or gpu.link, options.network):
            if link not in LINKS:
                raise InputError(f"link {link!r} is none of {', '.join(LINKS)}")
        machines.append(Machine(gpu, Network(LINKS[options.link or gpu.link], LINKS[options.network]), options.eager))
    return machines


def measurements_of(results: Path) -> dict[str, Any]:
    """Acceptance and host times from strong_scaling.json and step.json, in the form of lpr/assets/measured.json."""
    scaling, step = read_json(str(results / "strong_scaling.json")), read_json(str(results / "step.json"))
    acceptance = []
    for temperature in sorted({run["temperature"] for run in scaling["runs"]}):
        runs = [run for run in scaling["runs"] if run["temperature"] == temperature]
        trees = {
            run["budget_per_rank"] * run["num_ranks"]: (run["tokens_per_step"], run["nodes_per_step"]) for run in runs
        }
        extra = {}
        for ranks in sorted({run["num_ranks"] for run in runs}):
            busiest = [
                run["nodes_of_largest_shard"] - run["nodes_per_step"] / ranks
                for run in runs
                if run["num_ranks"] == ranks
            ]
            extra[ranks] = round(sum(busiest) / len(busiest), 2)
        acceptance.append(
            {
                "temperature": temperature,
                "budget_tokens_nodes": [[budget, *trees[budget]] for budget in sorted(trees)],
                "ranks_extra": [[ranks, nodes] for ranks, nodes in extra.items()],
            }
        )
    host = []
    for temperature in sorted({run["temperature"] for run in step["runs"]}):
        runs = [run for run in step["runs"] if run["temperature"] == temperature]
        nodes_ms = sorted([run["budget"], run["median_ms"]["host alone"]] for run in runs)
        host.append({"temperature": temperature, "nodes_ms": nodes_ms})
    source = (
        f"acceptance: bundled model, {scaling['num_prompts']} prompts of {scaling['data']}, {scaling['date']}, "
        f"commit {scaling['commit']}; host: {step['cpu']}, {step['date']} ({step['commit']})"
    )
    return {"source": source, "acceptance": acceptance, "host": host}


def predict_model(facts: ModelFacts, machine: Machine, assumed: Assumed) -> dict[str, Any]:
    """Every mesh of one model on one machine, plain and drafted."""
    settings: list[dict[str, Any]] = []
    for temperature in [None, *assumed.temperatures]:
        setting = Setting(facts, machine, assumed.measured, assumed.kv, 2, temperature, assumed.times)
        found = worth_showing([predict(setting, mesh, assumed.inputs) for mesh in possible(facts, machine, assumed)])
        answer = answer_of(setting, [each for each in found if each.mesh.num_gpus == 8], assumed.inputs)
        predictions = [as_values(each) for each in found]
        settings.append({"temperature": temperature, "predictions": predictions, "on_8_gpus": answer})
    return {
        "model": facts.name,
        "gpu": machine.gpu.name,
        "link": machine.network.inside.name,
        "network": machine.network.between.name,
        "launch": "eager" if machine.is_eager else "graphs",
        "kv": assumed.kv,
        "settings": settings,
    }


def possible(facts: ModelFacts, machine: Machine, assumed: Assumed) -> list[Mesh]:
    """Meshes that the model can be split for, that fit, and whose replicas stay inside a host."""
    found = []
    for mesh in [mesh for num in assumed.gpus for mesh in meshes(num)]:
        if split_problem(facts, mesh.tp) is not None or mesh.tp > machine.network.gpus_per_host:
            continue
        decode = DecodeConfig(max_batch_size=1, max_length=assumed.kv)
        fits = footprint(facts, decode, mesh, assumed.kv, 2).fits(machine.gpu.memory)
        if fits and (assumed.times is None or mesh.tp == 1):
            found.append(mesh)
    return found


def worth_showing(found: list[Prediction]) -> list[Prediction]:
    """All meshes of a host, and the best one of each larger number of GPUs."""
    best = largest(found)
    return [each for each in found if each.mesh.num_gpus <= 8 or each is best[each.mesh.num_gpus]]


def largest(found: list[Prediction]) -> dict[int, Prediction]:
    """Number of GPUs to the prediction with the most tokens per second."""
    return {
        num: max((each for each in found if each.mesh.num_gpus == num), key=lambda each: each.tokens_per_second.mid)
        for num in {each.mesh.num_gpus for each in found}
    }


def answer_of(setting: Setting, found: list[Prediction], inputs: Inputs) -> dict[str, Any] | None:
    """The best mesh of 8 GPUs, and by how much it beats all-lp, all-tp and the second."""
    if not found:
        return None
    ranked = sorted(found, key=lambda each: -each.tokens_per_second.mid)
    best = ranked[0]
    against = {}
    for other in ranked[1:]:
        against[str(other.mesh)] = rounded(advantage(setting, best, other, inputs))
    return {"best": str(best.mesh), "tokens_per_second": rounded(best.tokens_per_second), "times": against}


def rounded(estimate: Estimate) -> dict[str, float]:
    """The estimate with four digits."""
    return {name: float(f"{value:.4g}") for name, value in asdict(estimate).items()}


def as_values(prediction: Prediction) -> dict[str, Any]:
    """A prediction as plain values."""
    step = prediction.step
    return {
        "lp": prediction.mesh.lp,
        "tp": prediction.mesh.tp,
        "tokens_per_second": rounded(prediction.tokens_per_second),
        "tokens_per_step": round(prediction.tokens_per_step, 3),
        "drafted_nodes": prediction.drafted.budget if prediction.drafted else 0,
        "step_ms": {
            "forward": round(step.forward * 1e3, 3),
            "tp": round(step.tp * 1e3, 3),
            "lp": round(step.lp * 1e3, 3),
            "host": round(step.host * 1e3, 3),
        },
        "extrapolated": prediction.drafted is not None and prediction.drafted.is_extrapolated,
    }
