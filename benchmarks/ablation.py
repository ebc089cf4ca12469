"""Tokens per step by draft source: window only, trie only, both, at several budgets, greedy and sampled.

    python -m benchmarks.ablation --data classeval.jsonl --output benchmarks/results/ablation.json

Steps are counted, not timed, so any machine gives the same figures. Prompts run one by one, so the shared trie of a
configuration learns the outputs in order, as an engine's does. `by_depth` holds nodes drafted and accepted by source
at depths up to `up_to_depth` (1, 2, 4, 8, ...) and above the group before.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import model_parser, progress, run_main
from benchmarks.data import prompts_of
from benchmarks.engines import count_steps, load_engine, params_for, split_budget
from lpr.engine.stats import DecodeStats

KINDS = ("window", "trie", "both")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run every kind at every budget and temperature."""
    prompts, engine = prompts_of(options), load_engine(options)
    console.print(f"ceiling: {options.max_new_tokens} tokens per step (a whole output at once); plain decoding: 1")
    cases = list(product(options.temperatures, KINDS, options.budgets))
    found = []
    with progress(console, len(cases) * len(prompts)) as advance:
        for temperature, kind, budget in cases:
            decode, params = split_budget(kind, budget), params_for(len(prompts), options.max_new_tokens, temperature)
            total, _ = count_steps(engine, decode, prompts, params, 1, advance)
            case = {"temperature": temperature, "kind": kind, "budget": budget}
            sizes = {"window_size": decode.window_size, "trie_nodes": decode.trie_nodes}
            found.append({**case, **sizes, **figures(total)})
    return {"benchmark": "ablation", "data": Path(options.data).name, "num_prompts": len(prompts), "runs": found}


def figures(total: DecodeStats) -> dict[str, Any]:
    """What one configuration's steps came to."""
    return {
        "tokens_per_step": round(total.tokens_per_step, 3),
        "nodes_per_step": round(total.num_nodes / total.num_steps, 1),
        "num_tokens": total.num_tokens,
        "accepted_per_step": {
            name: round(count.accepted / total.num_steps, 3) for name, count in total.sources.items()
        },
        "num_steps": total.num_steps,
        "by_depth": [
            {"source": source, "up_to_depth": depth, **vars(count)}
            for (source, depth), count in sorted(total.by_depth.items())
        ],
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = model_parser("ablation", "Tokens per step by draft source and node budget.")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
