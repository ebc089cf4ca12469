"""Where the time of a step goes: t(n), the host's parts of it, and its collective.

    python -m benchmarks.step --data classeval.jsonl --threads 1 --output benchmarks/results/step.json
    torchrun --nproc_per_node=2 -m benchmarks.step --collective 20 2192 4368

Each part is timed by the processor time of its thread, so that other programs do not show; with one CPU thread that is
all the work there is. "outside the forward" is the whole step without the model's forward and without choosing
tokens from its logits, both of which an accelerator does. On a CPU the forward also empties the caches that the host's
work then runs in; "host alone" repeats the same steps with the recorded results of the model in the forward's place, as
a host does whose accelerator computes.

t(n) is the wall-clock time of evaluating n tokens after so many cached ones, as the engine measures it when it starts,
up to the n that takes STEEPEST times as long as one token. "collective" is the wall-clock time of the all-gather of
fixed-size payloads between two real ranks that do nothing else, of the payload that two ranks of such a budget
exchange: gloo between CPUs, NCCL between GPUs. The ranks meet in front of every gather, so that none waits there for
another's work, and the time is the slowest rank's until the result is on its host.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

import lpr.model.adapter
import lpr.model.sampling.sampler
from benchmarks.common import OneLineParser, finish, make_parser, model_parser, run_main, whole
from benchmarks.data import prompts_of
from benchmarks.engines import StepClock, load_engine, params_for, switch
from benchmarks.processes.launch import LAUNCHER, RunFailedError, execute
from lpr import DecodeConfig, Engine
from lpr.config import InputError
from lpr.core.step_times import KNOTS
from lpr.dist.comm import Comm
from lpr.dist.runtime import World, join, leave
from lpr.engine.sizing import STEEPEST, measure_step_times

MODEL_PARTS = {
    "inputs": (lpr.model.adapter, "build_inputs"),
    "forward": (lpr.model.adapter.Adapter, "forward"),
    "choose": (lpr.model.sampling.sampler, "choose"),
    "candidates": (lpr.model.sampling.sampler, "candidates"),
}
ON_DEVICE = ("forward", "choose", "candidates")
PHASES = {"draft": "draft", "gather": "exchange", "commit": "accept, commit"}
"""Phases of a step as an engine's recorder hears of them, and their names here; the forward is in MODEL_PARTS."""
CACHED = (256, 1024)
"""Cached lengths that t(n) is measured at, where the model has so many positions."""
WARM_UP = 10


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
    prompts, engine = prompts_of(options), load_engine(options)
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
            run = time_steps(engine, decode, prompts, temperature, options.max_new_tokens)
            runs.append({"budget": budget, **run, "payload_bytes_of_2_ranks": sizes[budget]})
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
    """What `--collective` says of two ranks and these payloads, or why it says nothing."""
    device = ["--device", options.device.partition(":")[0]] if options.device else []
    worker = ["-m", "benchmarks.step", *device, "--collective", *map(str, sizes)]
    try:
        said = json.loads(execute([*LAUNCHER, "--nproc_per_node=2", *worker], 180.0, options.threads).splitlines()[-1])
    except RunFailedError as failure:
        return {"num_ranks": 2, "failed": str(failure)}
    return {name: said[name] for name in ("num_ranks", "backend", "device", "runs")}


def payload_bytes(decode: DecodeConfig, num_ranks: int) -> int:
    """Bytes that each of `num_ranks` ranks contributes to a step under `decode` (lpr.engine.exchange)."""
    carries_trees = decode.carries_trees(num_ranks)
    return 4 * decode.resolved(num_ranks).payload_words(decode.max_batch_size, num_ranks, carries_trees)


def gather_times(comm: Comm, device: torch.device, size: int, repeats: int) -> list[float]:
    """Milliseconds of `repeats` gathers of `size` bytes per rank, each the slowest rank's."""
    payload = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
    mine = []
    for _ in range(WARM_UP + repeats):
        dist.barrier()
        began = time.perf_counter()
        comm.gather(payload)
        mine.append(int((time.perf_counter() - began) * 1e9))
    times = comm.gather(torch.tensor(mine[WARM_UP:], dtype=torch.int64).view(torch.int32))
    return [ns / 1e6 for ns in times.contiguous().view(torch.int64).amax(0).tolist()]


def measure_collective(options: argparse.Namespace, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Time the gathers of every size."""
    runs = []
    for size in options.collective:
        times = sorted(gather_times(comm, device, size, options.repeats))
        worst = times[int(0.99 * (len(times) - 1))]
        runs.append({"bytes": size, "median_ms": round(statistics.median(times), 4), "p99_ms": round(worst, 4)})
    num_ranks = comm.size * comm.tp_size
    return {"num_ranks": num_ranks, "backend": dist.get_backend(), "device": str(device), "runs": runs}


def work_as_rank() -> int:
    """What each rank of `--collective` does; rank 0 prints the result."""
    parser = make_parser("step --collective", "Time of the all-gather of a step.")
    parser.add_argument("--collective", type=whole, nargs="+", required=True, metavar="N", help="bytes, per rank")
    parser.add_argument("--repeats", type=whole, default=300, metavar="N", help="gathers of each size (default 300)")
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default: a GPU per rank if there are GPUs)")
    options, world = parser.parse_args(), World.from_environment()
    if not options.repeats or not all(options.collective):
        parser.error("--repeats and --collective must be at least 1")
    if world.size < 2:
        parser.error("needs at least two ranks: torchrun --nproc_per_node=2 -m benchmarks.step --collective N")
    device = world.device(options.device)
    with join(world, device, 60.0) as comm:
        result = measure_collective(options, comm, torch.device(device or "cpu"))
        if comm.rank == 0:
            finish({"benchmark": "collective", **result}, options.output)
    return 0


def time_steps(
    engine: Engine, decode: DecodeConfig, prompts: list[str], temperature: float, max_new_tokens: int
) -> dict[str, Any]:
    """Medians over all decode steps but each request's first, which computes its prompt."""
    switch(engine, decode)
    gc.freeze()  # as the command does
    per_step: dict[str, list[float]] = defaultdict(list)
    spent = {name: [0.0] for name in MODEL_PARTS}
    originals = {name: getattr(home, attribute) for name, (home, attribute) in MODEL_PARTS.items()}
    clock = engine.recorder = StepClock(time.thread_time)
    try:
        for name, (home, attribute) in MODEL_PARTS.items():
            setattr(home, attribute, timed(originals[name], spent[name]))
        for prompt, params in zip(prompts, params_for(len(prompts), max_new_tokens, temperature), strict=True):
            request = engine.submit(prompt, params)
            while request.finish_reason is None:
                for part in spent.values():
                    part[-1] = 0.0
                start, before = time.thread_time(), request.stats.num_steps
                engine.step()
                if before:
                    took = {name: part[-1] for name, part in spent.items()}
                    for name, ms in parts_of((time.thread_time() - start) * 1e3, clock.phases, took).items():
                        per_step[name].append(ms)
    finally:
        engine.recorder = None
        for name, (home, attribute) in MODEL_PARTS.items():
            setattr(home, attribute, originals[name])
    per_step["host alone"] = host_alone(engine, decode, prompts, temperature, max_new_tokens)
    return {
        "temperature": temperature,
        "num_steps": len(per_step["step"]),
        "device": str(engine.model.device),
        "threads": torch.get_num_threads(),
        "median_ms": {name: round(statistics.median(values), 4) for name, values in per_step.items()},
        "p99_ms": {name: round(sorted(values)[int(0.99 * (len(values) - 1))], 4) for name, values in per_step.items()},
    }


def parts_of(step: float, phases: dict[str, float], model: dict[str, float]) -> dict[str, float]:
    """The milliseconds of a step by part; "inputs" is all of the forward's phase that is the host's."""
    on_device = sum(model[name] for name in ON_DEVICE)
    parts = {PHASES[name]: ms for name, ms in phases.items() if name in PHASES}
    parts |= {**model, "inputs": phases["forward"] - on_device, "text": step - sum(phases.values())}
    return {**parts, "step": step, "outside the forward": step - on_device}


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
        assert model.cache is not None
        model.adapter.step_inputs(rows, model.cache)
        return recorded.pop(0)

    times: list[float] = []
    try:
        for stand_in in (record, read):
            switch(engine, decode)
            model.evaluate = stand_in  # type: ignore[method-assign,assignment]
            if stand_in is read:
                model.fill = lambda rows: None  # type: ignore[method-assign]
            for prompt, params in zip(prompts, params_for(len(prompts), max_new_tokens, temperature), strict=True):
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
    if "--collective" in sys.argv:
        return work_as_rank()
    parser: OneLineParser = model_parser("step", "Time of a decoding step: t(n), the host's parts, the collective.")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--kv", type=int, nargs="+", metavar="N", help="cached tokens for t(n) (default 256 1024)")
    parser.add_argument("--both", action="store_true", help="half of the nodes for the Jacobi window and its pool")
    return run_main(parser, measure)


if __name__ == "__main__":
    leave(World.from_environment(), main())
