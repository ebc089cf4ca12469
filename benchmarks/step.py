"""Where the time of a step goes: t(n), the host's parts of it, and its collective.

    python -m benchmarks.step --data classeval.jsonl --threads 1 --output benchmarks/results/step.json

Each part is timed by the processor time of its thread, so that other programs do not show; with one CPU thread that is
all the work there is. "outside the forward" is the whole step without the model's forward and without choosing
tokens from its logits, both of which an accelerator does. On a CPU the forward also empties the caches that the host's
work then runs in; "host alone" repeats the same steps with the recorded results of the model in the forward's place, as
a host does whose accelerator computes.

t(n) is the wall-clock time of evaluating n tokens after so many cached ones, as the engine measures it when it starts
(lpr.engine.measure), up to the n that takes STEEPEST times as long as one token. "collective" is the wall-clock time of
the all-gather between two real ranks (benchmarks.collective), of the payload that two ranks of such a budget exchange.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import lpr.engine.step
import lpr.model.runner
from benchmarks.collective import payload_bytes
from benchmarks.common import load_prompts, model_parser, run_main, table
from benchmarks.fleet import LAUNCHER, RunFailedError, execute
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.config import InputError
from lpr.core.step_times import KNOTS
from lpr.engine.measure import STEEPEST, measure_step_times

PARTS = {
    "draft": (lpr.engine.step.SequenceState, "build"),
    "partition": (lpr.engine.step, "split"),
    "rows": (lpr.engine.step, "shard_row"),
    "selection": (lpr.engine.step, "selection"),
    "inputs": (lpr.model.runner, "build_inputs"),
    "forward": (lpr.model.runner.TreeModel, "logits"),
    "choose": (lpr.model.runner, "choose"),
    "candidates": (lpr.model.runner, "candidates"),
    "exchange": (lpr.engine.step.Exchange, "gather"),
    "accept": (lpr.engine.step, "accept"),
    "commit": (lpr.engine.step, "commit"),
    "advance": (lpr.engine.step.SequenceState, "advance"),
    "text": (Engine, "_emit"),
}
CACHED = (256, 1024)
"""Cached lengths that t(n) is measured at, where the model has so many positions."""
ON_DEVICE = ("forward", "choose", "candidates")


def timed(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """`function`, adding its processor time in milliseconds to `spent[-1]`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[-1] += (time.thread_time() - start) * 1e3

    return wrapper


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Time the parts of every step of a few requests, per node budget."""
    prompts = load_prompts(options.data, options.prompts)
    engine = Engine.from_pretrained(options.model or bundled_model(), dtype=options.dtype, device=options.device)
    console.print("ceiling: a step that is all forward; target: 0.3 ms outside it at 64 nodes")
    most = max(options.budgets)
    cached = options.kv or [kv for kv in CACHED if kv + most <= engine.max_length]
    costs = step_times(engine, cached, most)
    decodes = {budget: tree_of(budget, options.both) for budget in options.budgets}
    sizes = {budget: payload_bytes(decode, 2) for budget, decode in decodes.items()}
    collective = time_collective(sorted(set(sizes.values())), options)
    runs = []
    for budget, decode in decodes.items():
        for temperature in options.temperatures:
            run = time_steps(engine, decode, prompts, temperature, options.max_new_tokens, budget)
            runs.append({**run, "payload_bytes_of_2_ranks": sizes[budget]})
    report(runs, costs, collective, console)
    return {"benchmark": "step", "runs": runs, "step_times": costs, "collective": collective}


def tree_of(budget: int, both: bool) -> DecodeConfig:
    """A configuration of about `budget` nodes: all for the trie, or half of them for the window and its pool."""
    if both:
        return DecodeConfig(window_size=budget // 16, guess_set_size=budget // 16, trie_nodes=budget // 2)
    return DecodeConfig(window_size=0, trie_nodes=budget - 1, max_batch_size=1)


def step_times(engine: Engine, cached: Sequence[int], most: int) -> list[dict[str, Any]]:
    """t(n) for every cached length; raises InputError for one that the engine has no room for."""
    rows = []
    for kv in cached:
        if kv < 1:
            raise InputError(f"--kv {kv} must be at least 1")
        if kv + most > engine.max_length:
            raise InputError(
                f"--kv {kv} and {most} nodes need {kv + most} positions; the engine has {engine.max_length}"
            )
        costs = measure_step_times(engine.model, engine._like, engine.comm, most, kv, lengths=[kv])
        row = costs.row(1, kv)
        # Knots beyond the one that took too long were not measured.
        measured = [(n, ms) for n, ms in zip(KNOTS, row, strict=True) if n <= max(2, most) and ms <= STEEPEST * row[0]]
        times = {str(n): round(ms, 4) for n, ms in measured}
        rows.append({"kv": kv, "critical_length": costs.critical_length(1, kv), "ms": times})
    return rows


def time_collective(sizes: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """What benchmarks.collective says of two ranks and these payloads, or why it says nothing."""
    command = [*LAUNCHER, "--nproc_per_node=2", "-m", "benchmarks.collective", "--bytes", *map(str, sizes)]
    if options.device:
        command += ["--device", options.device.partition(":")[0]]
    with tempfile.TemporaryDirectory(prefix="lpr-step-") as folder:
        try:
            said = json.loads(execute(command, 180.0, options.threads, Path(folder)).splitlines()[-1])
        except RunFailedError as failure:
            return {"num_ranks": 2, "error": str(failure)}
    return {name: said[name] for name in ("num_ranks", "backend", "device", "runs")}


def report(
    runs: Sequence[dict[str, Any]], costs: Sequence[dict[str, Any]], collective: dict[str, Any], console: Console
) -> None:
    """Three tables: t(n), the collective, the parts."""
    counts = [n for n in map(str, KNOTS) if any(n in row["ms"] for row in costs)]
    rows = [[n, *(f"{row['ms'][n]:.2f}" if n in row["ms"] else "" for row in costs)] for n in counts]
    rows.append(["critical decoding length", *(str(row["critical_length"]) for row in costs)])
    console.print(table("t(n), ms", ["n", *(f"{row['kv']} cached" for row in costs)], rows))
    if "error" in collective:
        console.print(f"collective: failed: {collective['error']}", markup=False, highlight=False, soft_wrap=True)
    else:
        rows = [[str(r["bytes"]), f"{r['median_ms']:.3f}", f"{r['p99_ms']:.3f}"] for r in collective["runs"]]
        title = f"collective of {collective['num_ranks']} ranks, {collective['backend']}"
        console.print(table(title, ["bytes per rank", "median ms", "p99 ms"], rows))
    columns = ["median ms", *(f"{run['budget']} nodes, T={run['temperature']}" for run in runs)]
    names = [*PARTS, "step", "outside the forward", "host alone"]
    rows = [[name, *(f"{run['median_ms'][name]:.3f}" for run in runs)] for name in names]
    console.print(table("processor time of a step", columns, rows))


def time_steps(
    engine: Engine, decode: DecodeConfig, prompts: list[str], temperature: float, max_new_tokens: int, budget: int
) -> dict[str, Any]:
    """Medians over all decode steps but each request's first, which computes its prompt."""
    engine.configure(decode)
    gc.freeze()  # as the command does
    per_step: dict[str, list[float]] = defaultdict(list)
    spent = {name: [0.0] for name in PARTS}
    originals = {name: getattr(home, attribute) for name, (home, attribute) in PARTS.items()}
    try:
        for name, (home, attribute) in PARTS.items():
            setattr(home, attribute, timed(originals[name], spent[name]))
        for seed, prompt in enumerate(prompts):
            request = engine.submit(
                prompt, SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
            )
            while request.finish_reason is None:
                for part in spent.values():
                    part[-1] = 0.0
                start, before = time.thread_time(), request.stats.num_steps
                engine.step()
                total = (time.thread_time() - start) * 1e3
                if before == 0:
                    continue
                for name, part in spent.items():
                    per_step[name].append(part[-1])
                per_step["step"].append(total)
                per_step["outside the forward"].append(total - sum(spent[name][-1] for name in ON_DEVICE))
    finally:
        for name, (home, attribute) in PARTS.items():
            setattr(home, attribute, originals[name])
    per_step["host alone"] = host_alone(engine, decode, prompts, temperature, max_new_tokens)
    return {
        "budget": budget,
        "temperature": temperature,
        "num_steps": len(per_step["step"]),
        "device": str(engine.model.device),
        "threads": torch.get_num_threads(),
        "median_ms": {name: round(statistics.median(values), 4) for name, values in per_step.items()},
        "p99_ms": {name: round(sorted(values)[int(0.99 * (len(values) - 1))], 4) for name, values in per_step.items()},
    }


def host_alone(
    engine: Engine, decode: DecodeConfig, prompts: list[str], temperature: float, max_new_tokens: int
) -> list[float]:
    """Milliseconds of every decode step when the model's results are read from a recording."""
    model, recorded = engine.model, []
    evaluate, fill = model.evaluate, model.fill

    def record(*args: Any) -> torch.Tensor:
        recorded.append(evaluate(*args).clone())
        return recorded[-1]

    def read(rows: Any, *args: Any) -> torch.Tensor:
        model._inputs(rows)
        return recorded.pop(0)

    times: list[float] = []
    try:
        for stand_in in (record, read):
            engine.configure(decode)
            model.evaluate = stand_in  # type: ignore[method-assign,assignment]
            if stand_in is read:
                model.fill = lambda rows: None  # type: ignore[method-assign]
            for seed, prompt in enumerate(prompts):
                params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
                request = engine.submit(prompt, params)
                while request.finish_reason is None:
                    start, before = time.thread_time(), request.stats.num_steps
                    engine.step()
                    if stand_in is read and before:
                        times.append((time.thread_time() - start) * 1e3)
    finally:
        model.evaluate, model.fill = evaluate, fill  # type: ignore[method-assign]
    return times


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = model_parser("step", "Time of a decoding step: t(n), the host's parts, the collective.")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--kv", type=int, nargs="+", metavar="N", help="cached tokens for t(n) (default 256 1024)")
    parser.add_argument("--both", action="store_true", help="half of the nodes for the Jacobi window and its pool")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
