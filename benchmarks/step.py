"""Parts of a step's time: drafting, the forward, the exchange, committing, text.

    python -m benchmarks.step --data classeval.jsonl --threads 1 --output benchmarks/results/step.json

Parts are timed by the processor time of the thread. "host alone" repeats the same steps with the recorded results of
the model in place of its forward, as on a host whose accelerator computes.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import DataOptions, Flag, run_main
from benchmarks.data import prompts_of
from benchmarks.engines import StepClock, load_engine, params_for, switch
from lpr import DecodeConfig, Engine
from lpr.engine.hooks import StepHooks

PHASES = {"draft": "draft", "forward": "forward", "gather": "exchange", "commit": "accept, commit"}
"""Phases of a step as the engine reports them, and their names in the result."""


@dataclass(frozen=True, kw_only=True)
class StepOptions(DataOptions):
    """Parts of a decoding step's time."""

    budgets: tuple[int, ...] = (1, 16, 64, 256)
    """Node budgets."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Temperatures."""
    both: Flag = False
    """Use half of the nodes for the Jacobi window and its pool."""


def measure(options: StepOptions, console: Console) -> dict[str, Any]:
    """Time the parts of every step of a few requests, per node budget."""
    prompts, engine = prompts_of(options), load_engine(options)
    console.print("ceiling: a step that is only the forward; target: 0.3 ms outside it at 64 nodes")
    runs = []
    for budget in options.budgets:
        for temperature in options.temperatures:
            decode = tree_of(budget, options.both)
            run = time_steps(engine, decode, prompts, temperature, options.max_new_tokens)
            runs.append({"budget": budget, **run})
    return {"runs": runs}


def tree_of(budget: int, both: bool) -> DecodeConfig:
    """A configuration of about `budget` nodes: all for the trie, or half of them for the window and its pool."""
    if both:
        return DecodeConfig(window_size=budget // 16, guess_set_size=budget // 16, trie_nodes=budget // 2)
    return DecodeConfig(window_size=0, trie_nodes=budget - 1, max_batch_size=1)


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
            times = list(decode_steps(engine, prompts, temperature, max_new_tokens))
    finally:
        model.evaluate, model.fill = evaluate, fill  # type: ignore[method-assign]
    return times


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("step", StepOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
