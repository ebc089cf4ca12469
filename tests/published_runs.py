"""What the time model is checked against: gpt-fast's published tensor-parallel runs, and real runs of a machine.

gpt-fast's are tokens per second in bf16, batch 1, on A100-80GB (its README, "Benchmarks"; the copy bandwidth of that
machine, limited to 330 W per GPU, is given as about 1700 GB/s). It shards the layers, and leaves embedding and output
head whole. The two fitted constants of lpr.planner.prediction come from two of these runs.

Real runs: of one and two processes on 2 CPU cores, with t(n), acceptance and all-gather that were measured beside them
(results/simulate_runs.json, by a program that is gone: dev/LOG.md has what it found).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

from lpr.config import InputError
from lpr.core.step_times import interpolate
from lpr.planner.facts import ModelFacts
from lpr.planner.footprint import kv_row_bytes, read_bytes
from lpr.planner.hardware import GPUS
from lpr.planner.interconnect import LINKS, Network, all_reduce
from lpr.planner.prediction import Inputs, Machine, forward_seconds, tp_seconds

GPT_FAST: dict[str, dict[int, float]] = {
    "llama-2-7b": {1: 104.9, 2: 168.8, 4: 254.0, 8: 328.4},
    "llama-3.1-8b": {1: 93.8, 2: 149.1, 4: 217.2, 8: 276.0},
    "llama-2-70b": {2: 21.3, 4: 38.0, 8: 62.5},
    "llama-3.1-70b": {2: 16.0, 4: 37.5, 8: 58.8},
}
FITTED = ("llama-2-7b", (1, 8))
"""The model and the numbers of GPUs that the constants were fitted to."""
KV = 128
"""Rows of K/V that a step of such a run reads on average: short prompts and 200 tokens."""
A100 = Machine(GPUS["a100-80gb"], Network(LINKS["nvlink-a100"], LINKS["ib-hdr"]))


@dataclass(frozen=True)
class Check:
    """A published rate and the predicted one."""

    model: str
    num_gpus: int
    published: float
    predicted: float
    is_fitted: bool

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published


def gpt_fast_layout(facts: ModelFacts) -> ModelFacts:
    """The model as gpt-fast splits it: only layers, with two all-reduces in each."""
    weights = tuple(
        each if "*" in each.name else replace(each, style=None) for each in facts.weights
    )  # * stands for a layer's number
    reduces = tuple(
        replace(each, count=2 * facts.num_layers)
        for each in facts.collectives
        if each.kind == "all_reduce" and each.width == facts.hidden_size
    )
    return replace(facts, weights=weights, collectives=reduces)


def predicted_rate(facts: ModelFacts, num_gpus: int, inputs: Inputs) -> float:
    """Tokens per second of gpt-fast on `num_gpus` A100."""
    layout = gpt_fast_layout(facts)
    forward = forward_seconds(layout, num_gpus, 2, 1, KV, A100, inputs)
    return 1 / (forward + tp_seconds(layout, num_gpus, 2, 1, A100, inputs))


def check_published(facts: dict[str, ModelFacts], inputs: Inputs) -> list[Check]:
    """Every published rate against the predicted one; `facts` has the models of GPT_FAST."""
    return [
        Check(name, num, rate, predicted_rate(facts[name], num, inputs), name == FITTED[0] and num in FITTED[1])
        for name, rates in GPT_FAST.items()
        for num, rate in rates.items()
    ]


def fit(facts: ModelFacts) -> tuple[float, float]:
    """`bandwidth_fraction` and `launch` from Llama-2-7B on one and on eight GPUs."""
    layout, rates = gpt_fast_layout(facts), GPT_FAST[FITTED[0]]

    def bytes_read(num_gpus: int) -> float:
        return read_bytes(layout, num_gpus, 2, 1) + KV * kv_row_bytes(layout, num_gpus, 2)

    bandwidth = bytes_read(1) * rates[1]
    left = 1 / rates[8] - bytes_read(8) / bandwidth
    [reduce] = layout.collectives
    nccl = all_reduce(A100.network, 8, reduce.width * 2).seconds
    return bandwidth / A100.gpu.bandwidth, left / reduce.count - nccl


def compare_runs(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured and predicted tokens per second of each kind of run: medians over the repeats, and of their ratios.

    Raises InputError for values that are no such runs.
    """
    try:
        groups: dict[tuple[str, int], list[tuple[dict[str, Any], float, int]]] = {}
        for repeat in found["repeats"]:
            for run in repeat["runs"]:
                rate, steps = _predicted_run(found, repeat, run)
                groups.setdefault((run["name"], run["processes"]), []).append((run, rate, round(steps)))
        loads = [repeat["load_average"] for repeat in found["repeats"]]
        return [_compared(name, processes, runs, loads) for (name, processes), runs in groups.items()]
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as failure:
        raise InputError(f"these are not recorded runs: {failure!r}") from failure


def _predicted_run(found: dict[str, Any], repeat: dict[str, Any], run: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second and steps of a run, by the t(n), the acceptance and the all-gather measured beside it."""
    times = repeat["times"][str(run["processes"])]
    rows = sorted((row["nodes"], row["milliseconds"]) for row in times["rows"])
    counted = {each["num_ranks"]: each for each in found["counted"]}[run["processes"]]
    is_plain = run["name"] == "plain decoding"
    nodes = 1.0 if is_plain else counted["nodes"]
    steps = run["tokens"] / (1.0 if is_plain else counted["tokens_per_step"])
    gather = repeat["all_gather_ms"] if run["processes"] > 1 else 0.0
    later = interpolate([ms for _, ms in rows], nodes, [count for count, _ in rows]) + gather
    firsts = found["num_prompts"]
    ms = firsts * (times["first_step_ms"] + gather) + (steps - firsts) * later
    return run["tokens"] / ms * 1e3, steps


def _compared(name: str, processes: int, runs: list[tuple[dict[str, Any], float, int]], loads: Any) -> dict[str, Any]:
    """One kind of run: what was measured and what was predicted."""
    ratios = [rate * run["seconds"] / run["tokens"] for run, rate, _ in runs]
    return {
        "name": name,
        "processes": processes,
        "measured": round(statistics.median(run["tokens"] / run["seconds"] for run, _, _ in runs), 2),
        "predicted": round(statistics.median(rate for _, rate, _ in runs), 2),
        "ratios": [round(each, 4) for each in ratios],
        "ratio": round(statistics.median(ratios), 4),
        "predicted_steps": runs[0][2],
        "steps": runs[0][0]["steps"],
        "load_average": loads,
    }
