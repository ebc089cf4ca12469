"""Where the host's time of a step goes: drafting, inputs, forward, choice, exchange, acceptance, text.

    python -m benchmarks.step --data classeval.jsonl --threads 1 --output benchmarks/results/step.json

Each part is timed by the processor time of its thread, so that other programs do not show; with one CPU thread that is
all the work there is. "outside the forward" is the whole step without the model's forward and without choosing
tokens from its logits, both of which an accelerator does. On a CPU the forward also empties the caches that the host's
work then runs in; "host alone" repeats the same steps with the recorded results of the model in the forward's place, as
a host does whose accelerator computes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

import lpr.model.runner
import lpr.step
from benchmarks.common import load_prompts, model_parser, run_main, table
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model

PARTS = {
    "draft": (lpr.step.SequenceState, "build"),
    "partition": (lpr.step, "split"),
    "rows": (lpr.step, "shard_row"),
    "selection": (lpr.step, "selection"),
    "inputs": (lpr.model.runner, "build_inputs"),
    "forward": (lpr.model.runner.TreeModel, "logits"),
    "choose": (lpr.model.runner, "choose"),
    "candidates": (lpr.model.runner, "candidates"),
    "exchange": (lpr.step.Exchange, "gather"),
    "accept": (lpr.step, "accept"),
    "commit": (lpr.step, "commit"),
    "advance": (lpr.step.SequenceState, "advance"),
    "text": (Engine, "_emit"),
}
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
    runs = []
    for budget in options.budgets:
        for temperature in options.temperatures:
            decode = DecodeConfig(window_size=0, trie_nodes=budget - 1, max_batch_size=1)
            if options.both:
                decode = DecodeConfig(window_size=budget // 16, guess_set_size=budget // 16, trie_nodes=budget // 2)
            runs.append(time_steps(engine, decode, prompts, temperature, options.max_new_tokens, budget))
    columns = ["median ms", *(f"{run['budget']} nodes, T={run['temperature']}" for run in runs)]
    names = [*PARTS, "step", "outside the forward", "host alone"]
    rows = [[name, *(f"{run['median_ms'][name]:.3f}" for run in runs)] for name in names]
    console.print(table("processor time of a step", columns, rows))
    return {"benchmark": "step", "runs": runs}


def time_steps(
    engine: Engine, decode: DecodeConfig, prompts: list[str], temperature: float, max_new_tokens: int, budget: int
) -> dict[str, Any]:
    """Medians over all decode steps but each request's first, which computes its prompt."""
    engine.reconfigure(decode)
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
            engine.reconfigure(decode)
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
    parser = model_parser("step", "Processor time of the parts of a decoding step.")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--both", action="store_true", help="half of the nodes for the Jacobi window and its pool")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
