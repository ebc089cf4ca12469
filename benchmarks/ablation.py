"""Tokens per step by draft source: window only, trie only, both, at several budgets, greedy and sampled.

    python -m benchmarks.ablation --data classeval.jsonl --output benchmarks/results/ablation.json

Steps are counted, not timed, so any machine gives the same figures. Prompts run one by one, so the shared trie of a
configuration learns the outputs in order, as an engine's does. `by_depth` holds nodes drafted and accepted by source
at depths up to `up_to_depth` (1, 2, 4, 8, ...) and above the group before.

`share_of_limit` is how near the steps come to copying the longest phrase of the text so far in each (benchmarks.limit).
A model says something of rejected nodes, too, which a replay of recorded steps does not know, so held-out prompts are

    python -m benchmarks.ablation --model FOLDER --chat-template --data classeval.jsonl --skip 50 --prompts 62 \
        --kinds trie --budgets 17 65 --cold --together 4 --dtype bfloat16

where `--cold` lets no request draft from another's output, so that several can run together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import model_parser, progress, run_main, whole
from benchmarks.data import prompts_of
from benchmarks.engines import load_engine, params_for, split_budget, switch
from benchmarks.limit import Counted, beside_limit, count_output
from benchmarks.record import groups
from lpr import Completion, DecodeConfig, Engine, InputError, SamplingParams
from lpr.core.suffix_index import as_learnt
from lpr.engine.stats import DecodeStats

KINDS = ("window", "trie", "both")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run every kind at every budget and temperature."""
    if options.together > 1 and not options.cold:
        raise InputError("--together needs --cold: requests that learn from each other run in order")
    prompts, engine = prompts_of(options)[options.skip :], load_engine(options)
    if not prompts:
        raise InputError(f"{options.data} has no prompts behind the first {options.skip}")
    console.print(f"ceiling: {options.max_new_tokens} tokens per step (a whole output at once); plain decoding: 1")
    ids = [engine.encode(prompt) for prompt in prompts]
    cases = list(product(options.temperatures, options.kinds, options.budgets))
    found = []
    with progress(console, len(cases) * len(prompts)) as advance:
        for temperature, kind, budget in cases:
            decode = replace(split_budget(kind, budget), max_batch_size=max(1, options.together))
            params = params_for(len(prompts), options.max_new_tokens, temperature, first_seed=options.skip)
            outputs = complete(engine, decode, ids, params, options.cold, advance)
            case = {"temperature": temperature, "kind": kind, "budget": budget}
            sizes = {"window_size": decode.window_size, "trie_nodes": decode.trie_nodes}
            found.append({**case, **sizes, **figures_of(ids, outputs, options.cold)})
    return {
        "benchmark": "ablation",
        "data": Path(options.data).name,
        "first_prompt": options.skip,
        "num_prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "cold": options.cold,
        "runs": found,
    }


def complete(
    engine: Engine,
    decode: DecodeConfig,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    is_cold: bool,
    advance: Callable[[], None],
) -> list[Completion]:
    """Complete `prompts`, as many at a time as `decode` takes; if `is_cold`, none drafts from another's output."""
    switch(engine, decode)
    done: list[Completion] = []
    for numbers in groups(range(len(prompts)), decode.max_batch_size):
        requests = [engine.submit(prompts[number], params[number], learns=not is_cold) for number in numbers]
        while any(request.finish_reason is None for request in requests):
            engine.step()
        for request in requests:
            done.append(request.completion())
            advance()
    return done


def figures_of(prompts: Sequence[list[int]], outputs: Sequence[Completion], is_cold: bool) -> dict[str, Any]:
    """What one configuration's steps came to, beside the limit of the same outputs."""
    total, counted, known = DecodeStats(), list[Counted](), list[list[int]]()
    for prompt, output in zip(prompts, outputs, strict=True):
        counted.append(count_output(prompt, output.token_ids, output.stats.num_steps, known))
        total.add(output.stats)
        if not is_cold:
            known.append(as_learnt(prompt, output.token_ids))
    return {**figures(total), **beside_limit(counted)}


def figures(total: DecodeStats) -> dict[str, Any]:
    """What one configuration's steps came to."""
    return {
        "nodes_per_step": round(total.num_nodes / total.num_steps, 1),
        "accepted_per_step": {
            name: round(count.accepted / total.num_steps, 3) for name, count in total.sources.items()
        },
        "by_depth": [
            {"source": source, "up_to_depth": depth, **vars(count)}
            for (source, depth), count in sorted(total.by_depth.items())
        ],
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = model_parser("ablation", "Tokens per step by draft source and node budget.")
    parser.add_argument("--skip", type=whole, default=0, metavar="N", help="leave out the first N prompts")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--cold", action="store_true", help="no request drafts from the output of another")
    parser.add_argument("--together", type=whole, default=1, metavar="N", help="requests in a step (1; more: --cold)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
