"""Ids and bits of logits of every way to decode against plain decoding, with exact mode and without.

    python -m benchmarks.exactness MODEL --dtypes bfloat16 float32 --output benchmarks/results/exactness.json

Prompts are decoded in groups of four, and the result is written to `--output` after each (tests/fakes/compared.py says
what is compared). The cost is the ratio of runs that take turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console

from benchmarks.common import Options, Whole, circumstances, run_main, write_json
from lpr import Engine, EngineOptions, SamplingParams, bundled_model
from lpr.model.loader import load
from tests.fakes.compared import BOTH, PLAIN, SHAPES, USUAL, Group, Worlds
from tests.fakes.prompts import PROMPTS

GROUP = 4  # prompts that every shape decodes before the next group
TEMPERATURES = (0.0, 0.8)  # temperatures of the prompts, in turn


@dataclass(frozen=True, kw_only=True)
class ExactnessOptions(Options):
    """Ids and logits against plain decoding, bit for bit."""

    threads: Whole = 1  # CPU threads; 0 leaves torch's default.
    model: tyro.conf.Positional[str] = str(bundled_model())  # Folder or hub id.
    dtypes: tuple[str, ...] = ("bfloat16", "float32")  # Types of the weights.
    prompts: Whole = 40  # Number of prompts, at most 47.
    tokens: Whole = 200  # Tokens per prompt.
    rounds: Whole = 5  # Pairs of runs for the cost.


def measure(options: ExactnessOptions, console: Console) -> dict[str, Any]:
    """All groups of all types, then the cost."""
    settings = {"model": Path(options.model).name, "tokens": options.tokens, "threads": torch.get_num_threads()}
    runs: list[dict[str, Any]] = [{"dtype": each, "prompts": 0, "exact": {}, "as usual": {}} for each in options.dtypes]
    result: dict[str, Any] = {**settings, "runs": runs, "cost": []}
    both = (True, False)
    worlds = {(dtype, exact): Worlds(options.model, dtype, exact) for dtype in options.dtypes for exact in both}
    for first in range(0, options.prompts, GROUP):
        for run in runs:
            for exact in both:
                add_group(run["exact" if exact else "as usual"], worlds[run["dtype"], exact], options, first)
            run["prompts"] += min(GROUP, options.prompts - first)
            console.print(f"{run['dtype']}: {run['prompts']} prompts")
        if options.output:
            write_json(Path(options.output), {"benchmark": "exactness", **result, **circumstances()})
    result["cost"] = [cost(options, dtype) for dtype in options.dtypes if options.rounds]
    return result


def add_group(sums: dict[str, Any], worlds: Worlds, options: ExactnessOptions, first: int) -> None:
    """Decode the prompts from `first` on and add the counts to `sums`."""
    texts = [*PROMPTS, *(one + other for one, other in pairwise(PROMPTS))]
    seeds = range(first, first + min(GROUP, options.prompts - first))
    engine = worlds.engines(1)[0]
    prompts = [engine.encode(texts[seed]) for seed in seeds]
    params = [
        SamplingParams(max_new_tokens=options.tokens, temperature=TEMPERATURES[seed % 2], seed=seed, ignore_eos=True)
        for seed in seeds
    ]
    found = Group(worlds, prompts, params).run(tuple(SHAPES) if worlds.exact else USUAL)
    for name, counts in found.items():
        before = sums.get(name, {})
        sums[name] = {key: round(before.get(key, 0) + value, 1) for key, value in counts.items()}


def cost(options: ExactnessOptions, dtype: str) -> dict[str, Any]:
    """Ratios of the seconds of a step with exact mode to those without, plain and with drafts, of alternating runs."""
    engines = {
        exact: Engine(load(options.model, dtype, "cpu"), PLAIN, EngineOptions(exact=exact)) for exact in (True, False)
    }
    found: dict[str, Any] = {"dtype": dtype, "rounds": options.rounds}
    for name, config in {"plain": PLAIN, "both": BOTH}.items():
        ratios = []
        for engine in engines.values():
            engine.configure(config)
        prompts = [engines[True].encode(text) for text in PROMPTS[:2]]
        for _ in range(options.rounds):
            seconds = {}
            for exact, engine in engines.items():
                began = time.perf_counter()
                done = engine.generate(prompts, SamplingParams(max_new_tokens=min(48, options.tokens), ignore_eos=True))
                seconds[exact] = (time.perf_counter() - began) / sum(each.stats.num_steps for each in done)
            ratios.append(seconds[True] / seconds[False])
        found[name] = {"median": round(statistics.median(ratios), 3), "ratios": [round(each, 3) for each in ratios]}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run_main("exactness", ExactnessOptions, measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
