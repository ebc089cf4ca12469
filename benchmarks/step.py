"""Where the time of a step goes: t(n), the host's parts of it, and its collective.

    python -m benchmarks.step --data classeval.jsonl --threads 1 --output benchmarks/results/step.json
    torchrun --nproc_per_node=2 -m benchmarks.step --collective 20 2192 4368

Parts are timed by the processor time of the thread: drafting, the model's forward with its inputs, the exchange,
accepting and committing, and text. "host alone" repeats the same steps with the recorded results of the model in place
of its forward, as on a host whose accelerator computes.

t(n) is the wall-clock time of evaluating n tokens after so many cached ones, as the engine measures it at start, up to
the n that takes STEEPEST times as long as one token. "collective" is the wall-clock time of the all-gather of a step's
fixed-size payload between two real ranks that do nothing else: gloo between CPUs, NCCL between GPUs. Ranks meet before
every gather, and the time is the slowest rank's until the result is on its host.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import DataOptions, Flag, Options, Whole, finish, read_options, run_main
from benchmarks.data import prompts_of
from benchmarks.engines import StepClock, load_engine, params_for, switch
from benchmarks.processes.launch import LAUNCHER, RunFailedError, execute
from lpr import DecodeConfig, Engine
from lpr.config import InputError
from lpr.core.step_times import KNOTS
from lpr.dist.comm import Comm
from lpr.dist.runtime import World, join, leave
from lpr.engine.hooks import StepHooks
from lpr.engine.sizing import STEEPEST, measure_step_times

PHASES = {"draft": "draft", "forward": "forward", "gather": "exchange", "commit": "accept, commit"}
"""Phases of a step as the engine reports them, and their names in the result."""
CACHED = (256, 1024)
"""Cached lengths that t(n) is measured at, where the model has so many positions."""
WARM_UP = 10


@dataclass(frozen=True, kw_only=True)
class StepOptions(DataOptions):
    """Time of a decoding step: t(n), the host's parts, the collective."""

    budgets: tuple[int, ...] = (1, 16, 64, 256)
    """Node budgets."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Temperatures."""
    kv: tuple[int, ...] = ()
    """Numbers of cached tokens for t(n); 256 and 1024 if none is given."""
    both: Flag = False
    """Use half of the nodes for the Jacobi window and its pool."""


@dataclass(frozen=True, kw_only=True)
class CollectiveOptions(Options):
    """Time of the all-gather of a step, between the ranks of torchrun."""

    collective: tuple[Whole, ...]
    """Payload sizes in bytes per rank."""
    repeats: Whole = 300
    """Gathers of each size."""
    device: str | None = None
    """cpu or cuda; a GPU per rank if there are GPUs."""


def measure(options: StepOptions, console: Console) -> dict[str, Any]:
    """Time the parts of every step of a few requests, per node budget."""
    prompts, engine = prompts_of(options), load_engine(options)
    console.print("ceiling: a step that is only the forward; target: 0.3 ms outside it at 64 nodes")
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
    return {"runs": runs, "step_times": costs, "collective": collective}


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
        costs = measure_step_times(engine.model, engine.replica.like, engine.comm, most, kv, lengths=[kv])
        row = costs.row(1, kv)
        # Knots beyond the one that took too long were not measured.
        measured = [(n, ms) for n, ms in zip(KNOTS, row, strict=True) if n <= max(2, most) and ms <= STEEPEST * row[0]]
        times = {str(n): round(ms, 4) for n, ms in measured}
        rows.append({"kv": kv, "critical_length": costs.critical_length(1, kv), "ms": times})
    return rows


def time_collective(sizes: Sequence[int], options: StepOptions) -> dict[str, Any]:
    """The result of `--collective` for two ranks and these payloads, or the reason of its failure."""
    device = ["--device", options.device.partition(":")[0]] if options.device else []
    worker = ["-m", "benchmarks.step", *device, "--collective", *map(str, sizes)]
    try:
        found = json.loads(execute([*LAUNCHER, "--nproc_per_node=2", *worker], 180.0, options.threads).splitlines()[-1])
    except RunFailedError as failure:
        return {"num_ranks": 2, "failed": str(failure)}
    return {name: found[name] for name in ("num_ranks", "backend", "device", "runs")}


def payload_bytes(decode: DecodeConfig, num_ranks: int) -> int:
    """Bytes that each of `num_ranks` ranks contributes to a step under `decode` (lpr.engine.exchange)."""
    carries_trees = decode.carries_trees(num_ranks)
    return 4 * decode.resolved(num_ranks).payload_words(decode.max_batch_size, num_ranks, carries_trees)


def gather_times(comm: Comm, device: torch.device, size: int, repeats: int) -> list[float]:
    """Milliseconds of `repeats` gathers of `size` bytes per rank, each the slowest rank's."""
    payload = torch.zeros(-(-size // 4), dtype=torch.int32, device=device)
    start = torch.zeros(1, dtype=torch.int32, device=device)
    mine = []
    for _ in range(WARM_UP + repeats):
        comm.gather(start)
        began = time.perf_counter()
        comm.gather(payload)
        mine.append(int((time.perf_counter() - began) * 1e9))
    times = comm.gather(torch.tensor(mine[WARM_UP:], dtype=torch.int64).view(torch.int32))
    return [ns / 1e6 for ns in times.contiguous().view(torch.int64).amax(0).tolist()]


def measure_collective(options: CollectiveOptions, comm: Comm, device: torch.device) -> dict[str, Any]:
    """Time the gathers of every size."""
    runs = []
    for size in options.collective:
        times = sorted(gather_times(comm, device, size, options.repeats))
        worst = times[int(0.99 * (len(times) - 1))]
        runs.append({"bytes": size, "median_ms": round(statistics.median(times), 4), "p99_ms": round(worst, 4)})
    num_ranks = comm.size * comm.tp_size
    backend = "nccl" if device.type == "cuda" and comm.num_sharing == 1 else "gloo"
    return {"num_ranks": num_ranks, "backend": backend, "device": str(device), "runs": runs}


def work_as_rank() -> int:
    """The program of each rank of `--collective`; rank 0 prints the result."""
    world = World.from_environment()
    try:
        options = read_options("step", CollectiveOptions)
        if not options.repeats or not all(options.collective):
            raise InputError("--repeats and --collective must be at least 1")
        if world.size < 2:
            raise InputError("--collective needs two ranks: torchrun --nproc_per_node=2 -m benchmarks.step")
    except InputError as error:
        print(f"benchmarks.step: {error}", file=sys.stderr)
        return 2
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
    gc.freeze()  # as lpr.generate does
    per_step: dict[str, list[float]] = defaultdict(list)
    clock = engine.hooks = StepClock(time.thread_time)
    try:
        for ms in decode_steps(engine, prompts, temperature, max_new_tokens):
            for phase, name in PHASES.items():
                per_step[name].append(clock.phases[phase])
            per_step["text"].append(ms - sum(clock.phases.values()))
            per_step["step"].append(ms)
            per_step["outside the forward"].append(ms - clock.phases["forward"])
    finally:
        engine.hooks = StepHooks()
    per_step["host alone"] = host_alone(engine, decode, prompts, temperature, max_new_tokens)
    return {
        "temperature": temperature,
        "num_steps": len(per_step["step"]),
        "device": str(engine.model.device),
        "threads": torch.get_num_threads(),
        "median_ms": {name: round(statistics.median(values), 4) for name, values in per_step.items()},
        "p99_ms": {name: round(sorted(values)[int(0.99 * (len(values) - 1))], 4) for name, values in per_step.items()},
    }


def decode_steps(engine: Engine, prompts: list[str], temperature: float, max_new_tokens: int) -> Iterator[float]:
    """Processor milliseconds of every step but each request's first, right after the step."""
    for prompt, params in zip(prompts, params_for(len(prompts), max_new_tokens, temperature), strict=True):
        request = engine.submit(prompt, params)
        while request.finish_reason is None:
            start, before = time.thread_time(), request.stats.num_steps
            engine.step()
            if before:
                yield (time.thread_time() - start) * 1e3


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
        model.adapter.step_inputs(rows, model.cache)
        return recorded.pop(0)

    times: list[float] = []
    try:
        for stand_in in (record, read):
            switch(engine, decode)
            model.evaluate = stand_in  # type: ignore[method-assign,assignment]
            if stand_in is read:
                model.fill = lambda rows: None  # type: ignore[method-assign]
            times = list(decode_steps(engine, prompts, temperature, max_new_tokens))
    finally:
        model.evaluate, model.fill = evaluate, fill  # type: ignore[method-assign]
    return times


def main() -> int:
    """Run the command line; returns the exit code."""
    if "--collective" in sys.argv:
        return work_as_rank()
    return run_main("step", StepOptions, measure)


if __name__ == "__main__":
    leave(World.from_environment(), main())
