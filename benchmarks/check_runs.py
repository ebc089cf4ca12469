"""Real runs of one and two processes on this machine, and what the model of lpr.perf.simulate says of them.

Measured in one process: t(n), the time of a first step (which computes a prompt), and, by counting, how many steps two
ranks take and what the busiest evaluates. Measured in two idle processes: gloo's all-gather. From these the tokens per
second of real `torchrun ... -m lpr.generate` runs are predicted, and compared with what they reached. Two processes on
two cores have no spare core: what the machine does besides shows in the two-process runs first. `load_average` in the
file says how busy it was; above the number of cores the times say little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.common import load_prompts
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.config import InputError
from lpr.perf.measured import read_table
from lpr.perf.planning import payload_bytes

BUDGETS = (1, 8, 16, 32, 64, 96)
"""Trie nodes that t(n) is measured at; 1 is plain decoding."""
LOOKAHEAD = 16
"""Trie nodes per rank of the lookahead runs: a CPU has no idle arithmetic, so small trees pay best."""


def decode_config(trie_nodes: int) -> DecodeConfig:
    """The configuration of a run; 0 is plain decoding."""
    if not trie_nodes:
        return DecodeConfig.autoregressive(max_batch_size=1)
    return DecodeConfig(window_size=0, trie_nodes=trie_nodes, max_batch_size=1)


def measure_runs(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything and write it to `--measure-runs`; raises InputError."""
    if not options.data:
        raise InputError("--measure-runs needs --data FILE with prompts")
    torch.set_num_threads(options.threads)
    prompts = load_prompts(options.data, options.prompts)
    console.print("ceiling: twice the rate of one process, if two cores shared every step without a wait")
    engine = Engine.from_pretrained(bundled_model(), dtype="float32", device="cpu")
    times = [time_steps(engine, budget, prompts, options.max_new_tokens) for budget in BUDGETS]
    found: dict[str, Any] = {
        "source": f"bundled model, {options.threads} CPU threads, fp32, {len(prompts)} prompts",
        "rows": [{"nodes": row["nodes"], "kv": row["kv"], "milliseconds": row["ms"]} for row in times],
        "first_step_ms": statistics.median(row["first_ms"] for row in times),
        "num_prompts": len(prompts),
        "load_average": list(os.getloadavg()),
        "all_gather_ms": gather_ms(options.threads),
        "counted": [count_steps(engine, num, prompts, options.max_new_tokens) for num in (1, 2)],
        "runs": [
            real_run(num, trie_nodes, prompts, options)
            for _ in range(options.repeats)  # interleaved, so that a busy minute hits all alike
            for trie_nodes in (0, LOOKAHEAD)
            for num in (1, 2)
        ],
    }
    Path(options.measure_runs).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {options.measure_runs}")
    return {"benchmark": "simulate", "measured_runs": found}


def time_steps(engine: Engine, budget: int, prompts: list[str], max_new_tokens: int) -> dict[str, float]:
    """Median time and size of a step with trees of `budget` nodes, and of a request's first step."""
    engine.reconfigure(decode_config(budget - 1))
    first, later, sizes, lengths = [], [], [], []
    evaluate = engine.model.evaluate

    def counting(rows: Any, *args: Any) -> torch.Tensor:
        sizes.append(len(rows[0].tokens))
        lengths.append(rows[0].num_cached)
        return evaluate(rows, *args)

    engine.model.evaluate = counting  # type: ignore[method-assign,assignment]
    try:
        for prompt in prompts:
            request = engine.submit(prompt, SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True))
            began = time.perf_counter()
            while request.finish_reason is None:
                start, before = time.perf_counter(), request.stats.num_steps
                engine.step()
                if before:
                    later.append(time.perf_counter() - start)
                elif request.stats.num_steps:
                    first.append(time.perf_counter() - began)
                    sizes.pop()
                    lengths.pop()
    finally:
        engine.model.evaluate = evaluate  # type: ignore[method-assign]
    return {
        "nodes": statistics.mean(sizes),
        "kv": statistics.mean(lengths),
        "ms": statistics.median(later) * 1e3,
        "first_ms": statistics.median(first) * 1e3,
    }


def count_steps(engine: Engine, num_ranks: int, prompts: list[str], max_new_tokens: int) -> dict[str, float]:
    """Tokens per step of `num_ranks` ranks and the busiest one's nodes, counted in one process."""
    from benchmarks.strong_scaling import run_case

    params = [SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True) for _ in prompts]
    total, ranks, _ = run_case(engine, num_ranks, decode_config(LOOKAHEAD), prompts, params, lambda: None)
    return {
        "num_ranks": num_ranks,
        "tokens_per_step": total.tokens_per_step,
        "nodes": ranks.largest_shards / total.num_steps,
    }


def real_run(num_processes: int, trie_nodes: int, prompts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """One `torchrun ... -m lpr.generate` over the prompts; raises InputError if it fails."""
    sizes = {"window-size": 0, "trie-nodes": trie_nodes, "max-batch-size": 1, "max-new-tokens": options.max_new_tokens}
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "prompts.jsonl"), Path(folder, "out.jsonl")
        source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
        flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        command = ["-m", "lpr.generate", "--prompts", str(source), "--output", str(target), "--json", "--ignore-eos"]
        done = torchrun(num_processes, [*command, "--dtype", "float32", "--device", "cpu", *flags], options.threads)
    record = json.loads(done.strip().splitlines()[-1])
    return {
        "name": "lookahead" if trie_nodes else "plain decoding",
        "processes": num_processes,
        "tokens": record["num_tokens"],
        "steps": record["num_steps"],
        "seconds": record["seconds"],
    }


def gather_ms(threads: int) -> float:
    """Median time of gloo's all-gather of a lookahead payload between two processes."""
    return float(torchrun(2, ["-m", "benchmarks.check_runs"], threads).strip().splitlines()[-1])


def torchrun(num_processes: int, arguments: list[str], threads: int) -> str:
    """What `torchrun` prints to stdout; raises InputError if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [*command, *arguments], cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"a run of {num_processes} processes failed with {done.returncode}: {reason}")
    return done.stdout


def compare(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured (median over repeats) and predicted tokens per second of each kind of run."""
    try:
        table = read_table(found, "the measured runs")
        counted = {each["num_ranks"]: each for each in found["counted"]}
        groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for run in found["runs"]:
            groups.setdefault((run["name"], run["processes"]), []).append(run)
        compared = []
        for (name, processes), runs in groups.items():
            ahead = name == "lookahead"
            tokens = runs[0]["tokens"]
            nodes = counted[processes]["nodes"] if ahead else 1.0
            steps = tokens / counted[processes]["tokens_per_step"] if ahead else tokens
            gather = found["all_gather_ms"] * 1e-3 if processes > 1 else 0.0
            first = found["num_prompts"] * (found["first_step_ms"] * 1e-3 + gather)
            seconds = first + (steps - found["num_prompts"]) * (table.seconds(nodes) + gather)
            rates = sorted(run["tokens"] / run["seconds"] for run in runs)
            measured = statistics.median(rates)
            compared.append(
                {
                    "name": name,
                    "processes": processes,
                    "measured": round(measured, 2),
                    "measured_low": round(rates[0], 2),
                    "measured_high": round(rates[-1], 2),
                    "predicted": round(tokens / seconds, 2),
                    "ratio": round(tokens / seconds / measured, 4),
                    "predicted_steps": round(steps),
                    "steps": runs[0]["steps"],
                }
            )
        return compared
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as failure:
        raise InputError(f"these are not the runs that --measure-runs writes: {failure!r}") from failure


def _time_gather() -> None:
    """In each of two processes: the median of 300 all-gathers of a step's payload; rank 0 prints milliseconds."""
    dist.init_process_group("gloo")
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    payload = torch.zeros(payload_bytes(decode_config(LOOKAHEAD), 2) // 4, dtype=torch.int32)
    gathered = torch.empty(2 * payload.numel(), dtype=payload.dtype)
    times = []
    for _ in range(330):
        start = time.perf_counter()
        gather(gathered, payload)
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(statistics.median(times[30:]) * 1e3)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _time_gather()
