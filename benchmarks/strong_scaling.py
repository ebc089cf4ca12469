"""Strong scaling of steps: tokens per step at 1, 2, 4 and 8 ranks with a fixed node budget per rank.

    python -m benchmarks.strong_scaling --data classeval.jsonl --output benchmarks/results/strong_scaling.json

Steps are counted in one process (benchmarks/engines.py), not timed. A rank's budget is split between the Jacobi window
and the trie with its recycled candidates; all of it grows with the ranks.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import DataOptions, Whole, progress, run_main
from benchmarks.data import prompts_of
from benchmarks.engines import RankCounter, count_steps, load_engine, params_for
from lpr import DecodeConfig
from lpr.core.wire import payload_words
from lpr.engine.stats import DecodeStats


@dataclass(frozen=True, kw_only=True)
class StrongScalingOptions(DataOptions):
    """Tokens per step against the number of ranks."""

    ranks: tuple[int, ...] = (1, 2, 4, 8)  # Numbers of ranks.
    budgets: tuple[int, ...] = (32, 64)  # Node budgets of a rank.
    temperatures: tuple[float, ...] = (0.0, 0.8)  # Temperatures.
    seeds: Whole = 1  # Seeds of each prompt at temperatures above 0.
    window_share: float = 0.5  # Share of the budget for the window and its pool.


def per_rank(budget: int, window_share: float) -> DecodeConfig:
    """A configuration of about `budget` nodes per rank, of which the window and its pool take `window_share`."""
    columns = round(budget * window_share / 8)
    return DecodeConfig(window_size=columns, guess_set_size=columns, trie_nodes=budget - 8 * columns, max_batch_size=1)


def measure(options: StrongScalingOptions, console: Console) -> dict[str, Any]:
    """Run every budget, temperature and number of ranks."""
    prompts, engine = prompts_of(options), load_engine(options)
    console.print("ceiling: the number of ranks, if every rank's nodes were worth the first's; the paper: 1.5x on 8")
    cases = list(product(options.temperatures, options.budgets, options.ranks))
    seeds = {temperature: options.seeds if temperature else 1 for temperature in options.temperatures}
    found = []
    with progress(console, sum(seeds[temperature] for temperature, _, _ in cases) * len(prompts)) as advance:
        for temperature, budget, num_ranks in cases:
            decode = per_rank(budget, options.window_share)
            total, counter, by_seed = DecodeStats(), RankCounter(num_ranks, 0), []
            for seed in range(seeds[temperature]):  # seeds do not learn from each other
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
        "data": Path(options.data).name,
        "first_prompt": options.skip,
        "num_prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "window_share": options.window_share,
        "runs": found,
    }


def figures(total: DecodeStats, counter: RankCounter) -> dict[str, Any]:
    """The figures of one configuration, per step."""
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
    return run_main("strong_scaling", StrongScalingOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
