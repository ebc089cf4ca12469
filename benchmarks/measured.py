"""Writes the acceptance of lpr/assets/measured.json, which `lpr.plan` predicts from: `python -m benchmarks.measured`.

It comes from benchmarks/results/strong_scaling.json. The host times of that file stay as they are: they were made on
2026-11-21 by a program that is gone (`host` of benchmarks/results/answered/step.json).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, read_json, write_json
from lpr.planner.facts import measured_values, package_file


def measurements_of(results: Path) -> dict[str, Any]:
    """The content of lpr/assets/measured.json; raises InputError."""
    scaling, before = read_json(results / "strong_scaling.json"), measured_values()
    acceptance = []
    for temperature in sorted({run["temperature"] for run in scaling["runs"]}):
        trees: dict[int, tuple[float, float]] = {}
        extra: dict[int, list[float]] = {}
        for run in scaling["runs"]:
            if run["temperature"] == temperature:
                budget, nodes, ranks = (
                    run["budget_per_rank"] * run["num_ranks"],
                    run["nodes_per_step"],
                    run["num_ranks"],
                )
                trees[budget] = run["tokens_per_step"], nodes
                extra.setdefault(ranks, []).append(run["nodes_of_largest_shard"] - nodes / ranks)
        budgets = [[budget, *trees[budget]] for budget in sorted(trees)]
        means = [[ranks, round(sum(each) / len(each), 2)] for ranks, each in sorted(extra.items())]
        acceptance.append({"temperature": temperature, "budget_tokens_nodes": budgets, "ranks_extra": means})
    source = (
        f"acceptance: bundled model, {scaling['num_prompts']} prompts of {scaling['data']}, {scaling['date']}, "
        f"commit {scaling['commit']}; host: {before['source'].partition('; host: ')[2]}"
    )
    return {"source": source, "acceptance": acceptance, "host": before["host"]}


if __name__ == "__main__":
    write_json(package_file("measured.json"), measurements_of(RESULTS))
    sys.exit(0)
