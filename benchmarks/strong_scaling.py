"""Strong scaling of steps: tokens per step at 1, 2, 4 and 8 ranks with a fixed node budget per rank.

    python -m benchmarks.strong_scaling --data classeval.jsonl --output benchmarks/results/strong_scaling.json

Which tokens a step emits does not depend on how its tree is split, so one process evaluates each whole tree and counts
what every rank would evaluate of it, by the same partition and the same pending chains (tests/test_ranks.py asserts
that several ranks take these very steps). Time is not measured; `--simulate` predicts it (benchmarks/simulate.py), and
benchmarks.fleet measures it with real ranks. A rank's budget is split between the Jacobi window and the trie with its
recycled candidates; all of it grows with the ranks.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.progress import Progress

import lpr.engine.engine
from benchmarks.common import load_prompts, model_parser, run_main, table
from benchmarks.simulate import run as simulate
from benchmarks.simulate import simulate_parser
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.config import TreeSizes
from lpr.core.partition import partition
from lpr.core.state import num_computed_after
from lpr.engine.stats import DecodeStats
from lpr.engine.step import Outcome, decode_step


class Ranks:
    """Counts what each of several ranks would evaluate of the trees of one request after the other."""

    def __init__(self, num_ranks: int, decode: TreeSizes) -> None:
        """No step counted yet."""
        self.num_ranks = num_ranks
        self.capacity = decode.owned_capacity(num_ranks)
        self.num_computed_tokens = [0] * num_ranks
        self.num_nodes = 0
        self.num_evaluated = 0
        self.num_pending = 0
        self.largest_shards = 0

    def count(self, outcome: Outcome, num_tokens: int) -> None:
        """Take in a step of a sequence that had `num_tokens` tokens before it; the first computed its prompt."""
        if not self.num_computed_tokens[0]:
            self.num_computed_tokens = [num_tokens - 1] * self.num_ranks
        pending = [num_tokens - held - 1 for held in self.num_computed_tokens]
        shards = partition(outcome.tree, self.num_ranks, pending, self.capacity)
        self.num_computed_tokens = num_computed_after(num_tokens, outcome.path, shards)
        sizes = [len(shard.nodes) + chain for shard, chain in zip(shards, pending, strict=True)]
        self.num_nodes += len(outcome.tree)
        self.num_evaluated += sum(sizes)
        self.num_pending += sum(pending)
        self.largest_shards += max(sizes)

    def end_request(self) -> None:
        """The next step belongs to another sequence."""
        self.num_computed_tokens = [0] * self.num_ranks


def run_case(
    engine: Engine, num_ranks: int, decode: DecodeConfig, prompts: list[str], params: list[SamplingParams], advance: Any
) -> tuple[DecodeStats, Ranks, int]:
    """Complete `prompts` one by one as `num_ranks` ranks would."""
    engine.configure(decode.for_one_rank(num_ranks))
    sizes = decode.resolved(num_ranks)
    total, ranks = DecodeStats(), Ranks(num_ranks, sizes)

    def counting_step(batch: Any, *args: Any) -> Any:
        before = [len(run.state.tokens) for run in batch]
        outcomes, length = decode_step(batch, *args)
        for outcome, num_tokens in zip(outcomes, before, strict=True):
            ranks.count(outcome, num_tokens)
        return outcomes, length

    lpr.engine.engine.decode_step = counting_step  # type: ignore[assignment]
    try:
        for prompt, each in zip(prompts, params, strict=True):
            total.add(engine.generate([prompt], each)[0].stats)
            ranks.end_request()
            advance()
    finally:
        lpr.engine.engine.decode_step = decode_step
    return total, ranks, 4 * sizes.payload_words(decode.max_batch_size, num_ranks)


def per_rank(budget: int, window_share: float) -> DecodeConfig:
    """A configuration of about `budget` nodes per rank, of which the window and its pool take `window_share`."""
    columns = round(budget * window_share / 8)
    return DecodeConfig(window_size=columns, guess_set_size=columns, trie_nodes=budget - 8 * columns, max_batch_size=1)


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Run every budget, temperature and number of ranks."""
    prompts = load_prompts(options.data, options.prompts)
    engine = Engine.from_pretrained(options.model or bundled_model(), dtype=options.dtype, device=options.device)
    console.print(
        "ceiling: the ranks' number, if every rank's nodes paid as the first's; the paper: 1.4-1.5x on 8 GPUs"
    )
    cases = [(t, b, n) for t in options.temperatures for b in options.budgets for n in options.ranks]
    found = []
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("decoding", total=len(cases) * len(prompts))
        for temperature, budget, num_ranks in cases:
            params = [
                SamplingParams(max_new_tokens=options.max_new_tokens, temperature=temperature, seed=seed)
                for seed in range(len(prompts))
            ]
            decode = per_rank(budget, options.window_share)
            total, ranks, payload = run_case(engine, num_ranks, decode, prompts, params, lambda: progress.advance(bar))
            found.append(
                {
                    "temperature": temperature,
                    "budget_per_rank": budget,
                    "num_ranks": num_ranks,
                    "tokens_per_step": round(total.tokens_per_step, 3),
                    "nodes_per_step": round(ranks.num_nodes / total.num_steps, 1),
                    "nodes_of_largest_shard": round(ranks.largest_shards / total.num_steps, 1),
                    "evaluated_redundantly": round(1 - ranks.num_nodes / ranks.num_evaluated, 4),
                    "pending_tokens_per_rank": round(ranks.num_pending / total.num_steps / num_ranks, 2),
                    "payload_bytes_per_rank": payload,
                    "num_tokens": total.num_tokens,
                    "per_step": {
                        name: {
                            "drafted": round(count.drafted / total.num_steps, 1),
                            "accepted": round(count.accepted / total.num_steps, 4),
                        }
                        for name, count in total.sources.items()
                    },
                }
            )
    report(found, options, console)
    return {
        "benchmark": "strong_scaling",
        "data": options.data.rsplit("/", 1)[-1],
        "num_prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "window_share": options.window_share,
        "runs": found,
    }


def report(found: list[dict[str, Any]], options: argparse.Namespace, console: Console) -> None:
    """One table per temperature and budget."""
    for temperature in options.temperatures:
        for budget in options.budgets:
            runs = [run for run in found if (run["temperature"], run["budget_per_rank"]) == (temperature, budget)]
            rows = [
                [
                    str(run["num_ranks"]),
                    f"{run['tokens_per_step']:.2f}",
                    f"{run['tokens_per_step'] / runs[0]['tokens_per_step']:.2f}x",
                    f"{run['nodes_per_step']:.0f}",
                    f"{run['nodes_of_largest_shard']:.0f}",
                    f"{100 * run['evaluated_redundantly']:.1f} %",
                    f"{run['payload_bytes_per_rank'] / 1024:.1f}",
                ]
                for run in runs
            ]
            name = "greedy" if temperature == 0 else f"temperature {temperature}"
            columns = ["ranks", "tokens/step", "scaling", "nodes", "largest shard", "redundant", "KiB per rank"]
            console.print(table(f"{budget} nodes per rank, {name}", columns, rows))


def main() -> int:
    """Run the command line; returns the exit code."""
    if "--simulate" in sys.argv:
        parser = simulate_parser()
        parser.add_argument("--simulate", action="store_true", help="predict time instead of counting steps")
        return run_main(parser, simulate)
    parser = model_parser("strong_scaling", "Tokens per step against the number of ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--window-share", type=float, default=0.5, help="part of the budget for window and pool")
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
