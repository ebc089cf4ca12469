"""Strong scaling of steps: tokens per step at 1, 2, 4 and 8 ranks with a fixed node budget per rank.

    python -m benchmarks.strong_scaling --data classeval.jsonl --output benchmarks/results/strong_scaling.json
    python -m benchmarks.strong_scaling --simulate --output benchmarks/results/simulate.json

Steps are counted in one process (benchmarks/engines.py), not timed: `--simulate` predicts time
(benchmarks/simulated/speed.py) and benchmarks.fleet measures it with real ranks. A rank's budget is split between the
Jacobi window and the trie with its recycled candidates; all of it grows with the ranks.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import model_parser, progress, run_main, whole
from benchmarks.data import prompts_of
from benchmarks.engines import RankCounter, count_steps, load_engine, params_for
from benchmarks.simulated.speed import simulate, simulate_parser
from lpr import DecodeConfig
from lpr.core.wire import payload_words
from lpr.engine.stats import DecodeStats


def per_rank(budget: int, window_share: float) -> DecodeConfig:
    """A configuration of about `budget` nodes per rank, of which the window and its pool take `window_share`."""
    columns = round(budget * window_share / 8)
    return DecodeConfig(window_size=columns, guess_set_size=columns, trie_nodes=budget - 8 * columns, max_batch_size=1)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run every budget, temperature and number of ranks."""
    prompts, engine = prompts_of(options)[options.skip :], load_engine(options)
    console.print("ceiling: as many times as ranks, if every rank's nodes paid as the first's; the paper: 1.5x on 8")
    cases = list(product(options.temperatures, options.budgets, options.ranks))
    seeds = {temperature: options.seeds if temperature else 1 for temperature in options.temperatures}
    found = []
    with progress(console, sum(seeds[temperature] for temperature, _, _ in cases) * len(prompts)) as advance:
        for temperature, budget, num_ranks in cases:
            decode = per_rank(budget, options.window_share)
            total, counter, by_seed = DecodeStats(), RankCounter(num_ranks, 0), []
            for seed in range(seeds[temperature]):  # each knows nothing of what the others have sampled
                params = params_for(len(prompts), options.max_new_tokens, temperature, first_seed=seed * len(prompts))
                stats, mine = count_steps(engine, decode, prompts, params, num_ranks, advance)
                by_seed.append(round(stats.tokens_per_step, 3))
                total.add(stats)
                counter.add(mine)
            sizes, carries_trees = decode.resolved(num_ranks), decode.carries_trees(num_ranks)
            payload = 4 * payload_words(sizes, decode.max_batch_size, num_ranks, carries_trees)
            case = {"temperature": temperature, "budget_per_rank": budget, "num_ranks": num_ranks}
            counts = figures(total, counter)
            found.append({**case, **counts, "by_seed": by_seed, "payload_bytes_per_rank": payload})
    return {
        "benchmark": "strong_scaling",
        "data": Path(options.data).name,
        "first_prompt": options.skip,
        "num_prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "window_share": options.window_share,
        "runs": found,
    }


def figures(total: DecodeStats, counter: RankCounter) -> dict[str, Any]:
    """What the steps of one configuration came to."""
    steps = total.num_steps
    return {
        "tokens_per_step": round(total.tokens_per_step, 3),
        "nodes_per_step": round(counter.num_nodes / steps, 1),
        "nodes_of_largest_shard": round(counter.largest_shards / steps, 1),
        "evaluated_redundantly": round(1 - counter.num_nodes / counter.num_evaluated, 4),
        "pending_tokens_per_rank": round(counter.num_pending / steps / counter.num_ranks, 2),
        "num_tokens": total.num_tokens,
        "per_step": {
            name: {"drafted": round(count.drafted / steps, 1), "accepted": round(count.accepted / steps, 4)}
            for name, count in total.sources.items()
        },
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    if "--simulate" in sys.argv:
        parser = simulate_parser()
        parser.add_argument("--simulate", action="store_true", help="predict time instead of counting steps")
        return run_main(parser, simulate)
    parser = model_parser("strong_scaling", "Tokens per step against the number of ranks.")
    parser.add_argument("--skip", type=whole, default=0, metavar="N", help="leave out the first N prompts")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--seeds", type=whole, default=1, metavar="N", help="of each prompt at temperatures above 0")
    parser.add_argument("--window-share", type=float, default=0.5, help="part of the budget for window and pool")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
