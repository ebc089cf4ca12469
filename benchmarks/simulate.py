"""Predicted tokens per second on GPUs that we do not have: `python -m benchmarks.strong_scaling --simulate`.

    python -m benchmarks.strong_scaling --simulate --output benchmarks/results/simulate.json
    python -m benchmarks.strong_scaling --simulate --check-runs runs.json
    python -m benchmarks.strong_scaling --simulate --measure-runs runs.json --data classeval.jsonl --threads 1

First the check: gpt-fast's published tensor-parallel runs against the model that two of them were fitted to, and, with
`--check-runs`, real runs of one and two processes on this machine. Then the predictions, each with its uncertainty.
Acceptance and host time are those of benchmarks/results; `--refresh` copies them into the package for lpr.plan.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.check_runs import compare, measure_runs
from benchmarks.common import RESULTS, OneLineParser, table
from benchmarks.published import GPT_FAST, Check, check_published
from lpr.config import DecodeConfig, InputError
from lpr.planner.facts import ModelFacts, facts_of
from lpr.planner.footprint import Mesh, footprint, meshes, split_problem
from lpr.planner.hardware import GPUS
from lpr.planner.interconnect import LINKS, Network
from lpr.planner.measured import Measured, TimeTable, read_measured, read_table
from lpr.planner.prediction import (
    Estimate,
    Inputs,
    Machine,
    Prediction,
    Setting,
    advantage,
    predict,
)
from lpr.planner.presets import measured_values, package_file, resolve

MODELS = ("codellama-7b", "codellama-13b", "codellama-34b", "codellama-70b")
MACHINES = {"a100-80gb": "nvlink-a100", "h100": "nvlink-h100"}
TOLERANCE = 0.25
"""A row of the check that is further off is called wrong."""


def simulate_parser() -> OneLineParser:
    """The command line of `--simulate`."""
    parser = OneLineParser(prog="benchmarks.strong_scaling --simulate", description="Predicted tokens per second.")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="M", help="presets, folders, hub ids")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], metavar="N")
    parser.add_argument("--gpu", nargs="+", default=list(MACHINES), metavar="G", help=", ".join(GPUS))
    parser.add_argument("--link", metavar="L", help=f"inside a host (default: the GPU's own): {', '.join(LINKS)}")
    parser.add_argument("--network", default="ib-hdr", metavar="L", help="between hosts of 8 GPUs (default ib-hdr)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], metavar="T")
    parser.add_argument("--kv", type=int, default=1024, metavar="N", help="cached tokens (default 1024)")
    parser.add_argument("--eager", action="store_true", help="launch kernels one by one, without captured graphs")
    parser.add_argument("--times", metavar="FILE", help="measured t(n) in JSON, in place of the roofline (tp 1 only)")
    parser.add_argument("--check-runs", metavar="FILE", help="compare with the runs that --measure-runs wrote")
    parser.add_argument("--measure-runs", metavar="FILE", help="measure runs of 1 and 2 processes here, and stop")
    parser.add_argument("--data", metavar="FILE", help="prompts for --measure-runs")
    parser.add_argument("--prompts", type=int, default=6, metavar="N", help="prompts for --measure-runs (default 6)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="for --measure-runs (default 128)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="for --measure-runs (default 3)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads (default 1)")
    parser.add_argument(
        "--refresh", action="store_true", help="copy measurements of benchmarks/results into lpr/assets"
    )
    parser.add_argument("--output", metavar="FILE", help="write the result (benchmarks/results/simulate.json)")
    return parser


def run(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Check, predict, compare."""
    if options.measure_runs:
        return measure_runs(options, console)
    if options.refresh:
        values = measurements_of(RESULTS)
        package_file("measured.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    measured, inputs = read_measured(measured_values()), Inputs()
    machines = machines_of(options)
    times = read_table(read_json(options.times), options.times) if options.times else None
    compared = compare(read_json(options.check_runs)) if options.check_runs else None
    models = [load_facts(name) for name in options.models]
    console.print(
        "ceiling: bytes over the data sheet's bandwidth (the floor of lpr.plan). Everything below is a PREDICTION: no "
        "GPU was available; acceptance is that of the bundled 5.5M model, not of the models named",
        highlight=False,
    )
    checks = check_published({name: load_facts(name) for name in GPT_FAST}, inputs)
    show_checks(checks, console)
    if compared is not None:
        show_runs(compared, console)
    found = [
        predict_model(facts, machine, measured, inputs, options, times, console)
        for facts in models
        for machine in machines
    ]
    return {
        "benchmark": "simulate",
        "note": "predictions; no GPU was available",
        "inputs": asdict(inputs),
        "acceptance_source": measured.source,
        "times_source": times.source if times is not None else "roofline",
        "gpt_fast": [{**asdict(check), "ratio": round(check.ratio, 4)} for check in checks],
        "runs": compared,
        "models": found,
    }


@cache
def load_facts(name: str) -> ModelFacts:
    """The facts of what `--model` of lpr.plan could name."""
    return facts_of(resolve(name).config, name)


def read_json(path: str) -> Any:
    """The value in a JSON file; raises InputError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as failure:
        raise InputError(f"cannot read {path}: {failure}") from failure


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


def show_checks(checks: list[Check], console: Console) -> None:
    """Predicted over published, row by row."""
    rows = [
        [
            f"{check.model}, {check.num_gpus} GPUs",
            f"{check.published:.1f}",
            f"{check.predicted:.1f}",
            f"{check.ratio:.2f}",
            "fitted" if check.is_fitted else "" if abs(check.ratio - 1) <= TOLERANCE else "OUTSIDE 25 %",
        ]
        for check in checks
    ]
    columns = ["tokens/s", "published", "predicted", "ratio", ""]
    console.print(table("gpt-fast on A100-80GB, bf16, tensor parallel", columns, rows))


def show_runs(compared: list[dict[str, Any]], console: Console) -> None:
    """Real runs of this machine against what t(n), acceptance and the all-gather say."""
    columns = ["this machine, tokens/s", "processes", "measured", "predicted", "ratio"]
    rows = [
        [run["name"], str(run["processes"]), f"{run['measured']:.1f}", f"{run['predicted']:.1f}", f"{run['ratio']:.2f}"]
        for run in compared
    ]
    console.print(table("real processes (gloo)", columns, rows))


def predict_model(
    facts: ModelFacts,
    machine: Machine,
    measured: Measured,
    inputs: Inputs,
    options: argparse.Namespace,
    times: TimeTable | None,
    console: Console,
) -> dict[str, Any]:
    """Every mesh of one model on one machine, plain and drafted."""
    record: dict[str, Any] = {
        "model": facts.name,
        "gpu": machine.gpu.name,
        "link": machine.network.inside.name,
        "network": machine.network.between.name,
        "launch": "eager" if machine.is_eager else "graphs",
        "kv": options.kv,
        "settings": [],
    }
    for temperature in [None, *options.temperatures]:
        setting = Setting(facts, machine, measured, options.kv, 2, temperature, times)
        found = worth_showing([predict(setting, mesh, inputs) for mesh in possible(facts, machine, options, times)])
        answer = answer_of(setting, [each for each in found if each.mesh.num_gpus == 8], inputs)
        record["settings"].append(
            {"temperature": temperature, "predictions": [as_values(each) for each in found], "on_8_gpus": answer}
        )
        show_predictions(record, temperature, found, answer, console)
    return record


def possible(facts: ModelFacts, machine: Machine, options: argparse.Namespace, times: TimeTable | None) -> list[Mesh]:
    """Meshes that the model can be split for, that fit, and whose replicas stay inside a host."""
    found = []
    for mesh in [mesh for num in options.gpus for mesh in meshes(num)]:
        if split_problem(facts, mesh.tp) is not None or mesh.tp > machine.network.gpus_per_host:
            continue
        decode = DecodeConfig(max_batch_size=1, max_length=options.kv)
        fits = footprint(facts, decode, mesh, options.kv, 2).fits(machine.gpu.memory)
        if fits and (times is None or mesh.tp == 1):
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


def show_predictions(
    record: dict[str, Any],
    temperature: float | None,
    found: list[Prediction],
    answer: dict[str, Any] | None,
    console: Console,
) -> None:
    """A row per mesh; the best of each number of GPUs is marked."""
    best = largest(found)
    rows = []
    for each in found:
        estimate, step = each.tokens_per_second, each.step
        rows.append(
            [
                f"{each.mesh}{' <' if each is best[each.mesh.num_gpus] else ''}",
                f"{estimate.mid:.0f}",
                f"{estimate.low:.0f}-{estimate.high:.0f}",
                f"{each.drafted.budget if each.drafted else 0}",
                f"{each.tokens_per_step:.2f}{'?' if each.drafted and each.drafted.is_extrapolated else ''}",
                *(f"{1e3 * part:.2f}" for part in (step.forward, step.tp, step.lp, step.host)),
            ]
        )
    how = "plain decoding" if temperature is None else "greedy" if temperature == 0 else f"temperature {temperature}"
    columns = ["lp x tp", "tokens/s", "range", "drafted", "tokens/step", "forward ms", "tp ms", "lp ms", "host ms"]
    title = f"PREDICTED: {record['model']}, {record['gpu']}, {record['link']}, {record['launch']}, {how}"
    console.print(table(title, columns, rows))
    if answer is not None:
        times = ", ".join(
            f"{v['mid']:.2f} ({v['low']:.2f}-{v['high']:.2f}) times {mesh}" for mesh, v in answer["times"].items()
        )
        console.print(f"on 8 GPUs: {answer['best']}: {times}", highlight=False)
