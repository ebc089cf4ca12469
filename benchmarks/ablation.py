"""Tokens per step by draft source: window only, trie only, both, at several budgets, greedy and sampled.

    python -m benchmarks.ablation --data classeval.jsonl --output benchmarks/results/ablation.json

Steps are counted, not timed, so any machine gives the same figures. Prompts run one by one, so the shared trie of a
configuration learns the outputs in order, as an engine's does. `by_depth` holds nodes drafted and accepted by source
at depths up to `up_to_depth` (1, 2, 4, 8, ...) and above the group before.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common import load_prompts, model_parser, run_main, split_budget, table
from lpr import Engine, SamplingParams, bundled_model
from lpr.engine.stats import DecodeStats

KINDS = ("window", "trie", "both")


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run every kind at every budget and temperature."""
    prompts = load_prompts(options.data, options.prompts)
    engine = Engine.from_pretrained(options.model or bundled_model(), dtype=options.dtype, device=options.device)
    console.print(f"ceiling: {options.max_new_tokens} tokens per step (a whole output at once); plain decoding: 1")
    cases = [(t, kind, budget) for t in options.temperatures for kind in KINDS for budget in options.budgets]
    found = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("decoding", total=len(cases) * len(prompts))
        for temperature, kind, budget in cases:
            decode = split_budget(kind, budget)
            engine.configure(decode)
            total = DecodeStats()
            for seed, prompt in enumerate(prompts):
                params = SamplingParams(max_new_tokens=options.max_new_tokens, temperature=temperature, seed=seed)
                total.add(engine.generate([prompt], params)[0].stats)
                progress.advance(bar)
            found.append(
                {
                    "temperature": temperature,
                    "kind": kind,
                    "budget": budget,
                    "window_size": decode.window_size,
                    "trie_nodes": decode.trie_nodes,
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
            )
    for temperature in options.temperatures:
        rows = []
        for kind in KINDS:
            row = [kind]
            for budget in options.budgets:
                cell = next(
                    each for each in found
                    if (each["temperature"], each["kind"], each["budget"]) == (temperature, kind, budget)
                )  # fmt: skip
                row.append(f"{cell['tokens_per_step']:.2f}")
            rows.append(row)
        title = "tokens per step, " + ("greedy" if temperature == 0 else f"temperature {temperature}")
        console.print(table(title, ["nodes", *map(str, options.budgets)], rows))
    return {
        "benchmark": "ablation",
        "data": options.data.rsplit("/", 1)[-1],
        "num_prompts": len(prompts),
        "runs": found,
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = model_parser("ablation", "Tokens per step by draft source and node budget.")
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
