"""Real runs of one and two processes on this machine, and what the model of lpr.planner.prediction says of them.

Measured: t(n) and the time of a first step (which computes a prompt), in one process and in two that share the machine
but do not wait for each other (of these the slower one's time, step by step, as a gather would wait for it); gloo's
all-gather; and, by counting, how many steps one and two ranks take and what the busiest evaluates. From these the
tokens per second of real `torchrun ... -m lpr.generate` runs are predicted, and compared with what they reached.
`load_average` in the file says how busy the machine was; above the number of cores the times say little.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.common import load_prompts
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.config import InputError
from lpr.planner.footprint import payload_bytes
from lpr.planner.measured import read_table

BUDGETS = (1, 17, 33)
"""Nodes that t(n) is measured at; 1 is plain decoding."""
LOOKAHEAD = 16
"""SuffixIndex nodes per rank of the lookahead runs: a CPU has no idle arithmetic, so small trees pay best."""


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
    found: dict[str, Any] = {
        "source": f"bundled model, {options.threads} CPU threads per process, fp32, {len(prompts)} prompts",
        "num_prompts": len(prompts),
        "counted": [count_steps(engine, num, prompts, options.max_new_tokens) for num in (1, 2)],
        "repeats": [measure_once(engine, prompts, options) for _ in range(options.repeats)],
    }
    Path(options.measure_runs).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    console.print(f"written to {options.measure_runs}")
    return {"benchmark": "simulate", "measured_runs": found}


def measure_once(engine: Engine, prompts: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """What a prediction needs, and right after it the runs themselves, so that a busy minute hits all alike."""
    alone = [time_steps(engine, budget, prompts, options.max_new_tokens) for budget in BUDGETS]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "prompts.json")
        source.write_text(json.dumps(prompts), encoding="utf-8")
        worker = ["-m", "benchmarks.check_runs", str(source), str(options.max_new_tokens)]
        shared = json.loads(torchrun(2, worker, options.threads).strip().splitlines()[-1])
    return {
        "times": {"1": summary([each] for each in alone), "2": summary(shared["times"])},
        "all_gather_ms": shared["all_gather_ms"],
        "runs": [real_run(num, nodes, prompts, options) for nodes in (0, LOOKAHEAD) for num in (1, 2)],
        "load_average": os.getloadavg()[0],
    }


def summary(times: Iterable[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Means over the steps of every budget; where several processes ran, of the slower one's time of each step."""
    rows, firsts = [], []
    for ranks in times:
        steps = [max(each) for each in zip(*(rank["ms"] for rank in ranks), strict=True)]
        firsts += [max(each) for each in zip(*(rank["first_ms"] for rank in ranks), strict=True)]
        rows.append({"nodes": ranks[0]["nodes"], "kv": ranks[0]["kv"], "milliseconds": statistics.mean(steps)})
    return {"rows": rows, "first_step_ms": statistics.mean(firsts)}


def time_steps(engine: Engine, budget: int, prompts: list[str], max_new_tokens: int) -> dict[str, Any]:
    """Time of every step with trees of `budget` nodes, mean size, and times of the requests' first steps."""
    engine.configure(decode_config(budget - 1))
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
        "ms": [1e3 * each for each in later],
        "first_ms": [1e3 * each for each in first],
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
    """Measured and predicted tokens per second of each kind of run: medians over the repeats, and of their ratios."""
    try:
        counted = {each["num_ranks"]: each for each in found["counted"]}
        groups: dict[tuple[str, int], list[tuple[dict[str, Any], float, int]]] = {}
        for repeat in found["repeats"]:
            for run in repeat["runs"]:
                processes, tokens = run["processes"], run["tokens"]
                times = repeat["times"][str(processes)]
                table = read_table({"source": found["source"], **times}, "the measured runs")
                nodes, steps = 1.0, tokens
                if run["name"] == "lookahead":
                    nodes, steps = counted[processes]["nodes"], tokens / counted[processes]["tokens_per_step"]
                gather = repeat["all_gather_ms"] * 1e-3 if processes > 1 else 0.0
                first = times["first_step_ms"] * 1e-3 + gather
                later = table.seconds(nodes) + gather
                seconds = found["num_prompts"] * first + (steps - found["num_prompts"]) * later
                groups.setdefault((run["name"], processes), []).append((run, tokens / seconds, round(steps)))
        return [
            {
                "name": name,
                "processes": processes,
                "measured": round(statistics.median(run["tokens"] / run["seconds"] for run, _, _ in runs), 2),
                "predicted": round(statistics.median(rate for _, rate, _ in runs), 2),
                "ratios": [round(rate * run["seconds"] / run["tokens"], 4) for run, rate, _ in runs],
                "ratio": round(statistics.median(rate * run["seconds"] / run["tokens"] for run, rate, _ in runs), 4),
                "predicted_steps": runs[0][2],
                "steps": runs[0][0]["steps"],
                "load_average": [repeat["load_average"] for repeat in found["repeats"]],
            }
            for (name, processes), runs in groups.items()
        ]
    except (KeyError, TypeError, IndexError, ZeroDivisionError) as failure:
        raise InputError(f"these are not the runs that --measure-runs writes: {failure!r}") from failure


def _work(source: str, max_new_tokens: int) -> None:
    """In each of two processes: t(n) side by side, then the median of 300 all-gathers; rank 0 prints both as JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    prompts = json.loads(Path(source).read_text(encoding="utf-8"))
    engine = Engine.from_pretrained(bundled_model(), dtype="float32", device="cpu")
    times = []
    for budget in BUDGETS:
        dist.barrier()  # begin together; the steps themselves do not wait
        both: list[Any] = [None, None]
        dist.all_gather_object(both, time_steps(engine, budget, prompts, max_new_tokens))
        times.append(both)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    payload = torch.zeros(payload_bytes(decode_config(LOOKAHEAD), 2) // 4, dtype=torch.int32)
    gathered = torch.empty(2 * payload.numel(), dtype=payload.dtype)
    waits = []
    for _ in range(330):
        start = time.perf_counter()
        gather(gathered, payload)
        waits.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps({"times": times, "all_gather_ms": statistics.median(waits[30:]) * 1e3}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(sys.argv[1], int(sys.argv[2]))
