"""Writes lpr/assets/measured.json, the acceptance and host times of `lpr.plan`: `python -m benchmarks.measured`.

The figures come from benchmarks/results/strong_scaling.json and benchmarks/results/step.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import RESULTS, Options, read_json, run_main, write_json
from lpr.planner.facts import package_file


class MeasuredOptions(Options):
    """Copy measurements of benchmarks/results to lpr/assets/measured.json."""


def measurements_of(results: Path) -> dict[str, Any]:
    """Acceptance and host times in the form of lpr/assets/measured.json; raises InputError."""
    scaling, step = read_json(results / "strong_scaling.json"), read_json(results / "step.json")
    acceptance, host = [], []
    for temperature in sorted({run["temperature"] for run in scaling["runs"]}):
        runs = [run for run in scaling["runs"] if run["temperature"] == temperature]
        trees = {
            run["budget_per_rank"] * run["num_ranks"]: (run["tokens_per_step"], run["nodes_per_step"]) for run in runs
        }
        extra: dict[int, list[float]] = {}
        for run in runs:
            more = run["nodes_of_largest_shard"] - run["nodes_per_step"] / run["num_ranks"]
            extra.setdefault(run["num_ranks"], []).append(more)
        acceptance.append(
            {
                "temperature": temperature,
                "budget_tokens_nodes": [[budget, *trees[budget]] for budget in sorted(trees)],
                "ranks_extra": [[ranks, round(sum(each) / len(each), 2)] for ranks, each in sorted(extra.items())],
            }
        )
    for temperature in sorted({run["temperature"] for run in step["runs"]}):
        runs = [run for run in step["runs"] if run["temperature"] == temperature]
        nodes_ms = sorted([run["budget"], run["median_ms"]["host alone"]] for run in runs)
        host.append({"temperature": temperature, "nodes_ms": nodes_ms})
    source = (
        f"acceptance: bundled model, {scaling['num_prompts']} prompts of {scaling['data']}, {scaling['date']}, "
        f"commit {scaling['commit']}; host: {step['cpu']}, {step['date']} ({step['commit']})"
    )
    return {"source": source, "acceptance": acceptance, "host": host}


def measure(options: MeasuredOptions, console: Console) -> dict[str, Any]:
    """Write the file."""
    found = measurements_of(RESULTS)
    write_json(package_file("measured.json"), found)
    return {"source": found["source"]}


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("measured", MeasuredOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
