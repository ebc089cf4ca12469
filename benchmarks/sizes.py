"""Automatic sizes against fixed ones on recorded completions, under given step times: no model, no clock, no noise.

    python -m benchmarks.sizes --traces T.jsonl U.jsonl --last 50 --warm-first 50      # prices of 0.2, 1, 3 and 10 %
    python -m benchmarks.sizes --traces T.jsonl --last 50 --costs tn_h100.json         # a table of lpr.generate --costs

A recorded text is replayed as by benchmarks.replay, cold and, with --warm-first, with the completions of the file's
first tasks in the shared index. The time of a step comes from a table, or from a node's *price* in percent of a plain
step: t(n) = 1 + price * (n - 1). An accelerator below its knee is near 0.2 %, a CPU with a small model near 3 %.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import Options, Whole, progress, read_json, run_main
from benchmarks.replay import (
    FixedSizes,
    Tally,
    Task,
    default_tokenizer,
    learn,
    load_tokenizer,
    read_traces,
    replay_task,
    select,
    tasks_of,
)
from lpr.config import DecodeConfig
from lpr.core.step_times import KNOTS, SHORTEST_KV, StepTimes, read_step_times
from lpr.core.suffix_index import as_learnt
from lpr.native import AcceptanceHistory, AdaptiveBudget, Draft, Drafter, SuffixIndex, TokenTree

Learnt = Callable[[], SuffixIndex]
"""Makes the shared index that every contestant starts with."""


@dataclass(frozen=True, kw_only=True)
class SizesOptions(Options):
    """Automatic sizes on recorded completions, without a clock."""

    traces: tuple[str, ...]
    """JSON lines with prompt and completion."""
    last: Whole | None = None
    """Replay the last N tasks only."""
    warm_first: Whole | None = None
    """Replay again with the first N completions known."""
    prices: tuple[float, ...] = (0.2, 1, 3, 10)
    """Prices of a node, in percent of a plain step."""
    costs: tuple[str, ...] = ()
    """Files with tables of step times."""
    sizes: tuple[Whole, ...] = (4, 8, 16, 24, 32, 48, 64, 96, 128)
    """Fixed numbers of nodes."""
    max_nodes: Whole = 128
    """Most nodes of automatic sizes."""
    tokenizer: str | None = None
    """SentencePiece .model file, or name or path for AutoTokenizer."""


def priced(percent: float) -> StepTimes:
    """Step times where each further node costs `percent` of a plain step."""
    return StepTimes({(1, SHORTEST_KV): [1 + percent / 100 * (knot - 1) for knot in KNOTS]})


def trie_of(documents: Sequence[list[int]]) -> SuffixIndex:
    """A shared index of `documents`."""
    trie = SuffixIndex(DecodeConfig().trie_capacity)
    learn(trie, documents)
    return trie


class AutomaticSizes(FixedSizes):
    """Drafts trees of the sizes that `AdaptiveBudget` chooses under given step times."""

    def __init__(self, costs: StepTimes, shared: SuffixIndex, most: int) -> None:
        """Trees have up to `most` nodes."""
        super().__init__(DecodeConfig(window_size=0, max_nodes=most).resolved(), shared)
        self.costs, self.spent = costs, 0.0
        self.budget, self.history = AdaptiveBudget(self.config, costs), AcceptanceHistory()

    def begin_task(self) -> None:
        """Another request has a history of its own."""
        self.history = AcceptanceHistory()

    def draft(self, drafter: Drafter, tree: TokenTree) -> None:
        """Draft as many nodes as the budget asks for, and cut those that do not pay."""
        self.budget.begin(1, 0, 0)
        request = self.budget.request(self.history)
        draft = Draft(tree, drafter.draft(tree, request.nodes, price=request.price), 1)
        self.budget.cut([draft], [self.history])
        self.spent += self.costs.time(len(tree))

    def observe(self, tree: TokenTree, path: list[int]) -> None:
        """Learn from what was accepted."""
        self.budget.observe([tree], [path], [self.history])


def automatic(tasks: Sequence[Task], costs: StepTimes, shared: SuffixIndex, most: int) -> dict[str, float]:
    """Replay `tasks` with automatic sizes of up to `most` nodes."""
    sizes = AutomaticSizes(costs, shared, most)
    for task in tasks:
        replay_task(task, sizes)
    return _result(costs, sizes.tally, sizes.spent)


def fixed(tasks: Sequence[Task], tables: Sequence[StepTimes], shared: SuffixIndex, size: int) -> list[dict[str, float]]:
    """Replay `tasks` with trees of `size` drafted nodes; one result per table of step times."""
    sizes = FixedSizes(DecodeConfig(window_size=0, trie_nodes=size).resolved(), shared)
    for task in tasks:
        replay_task(task, sizes)
    steps, nodes = sizes.tally.num_steps, 1 + sizes.tally.num_drafted / sizes.tally.num_steps
    # A draft that ended early is as cheap as it is small; a table of one slope makes the mean size exact.
    return [_result(costs, sizes.tally, steps * costs.time(nodes)) for costs in tables]


def _result(costs: StepTimes, tally: Tally, spent: float) -> dict[str, float]:
    return {
        "over_plain": round(tally.num_tokens * costs.time(1) / spent, 4),
        "tokens_per_step": round(tally.num_tokens / tally.num_steps, 3),
        "nodes_per_step": round(1 + tally.num_drafted / tally.num_steps, 2),
    }


def compare(
    tasks: Sequence[Task], tables: dict[str, StepTimes], learnt: Learnt, sizes: Sequence[int], most: int, advance: Any
) -> list[dict[str, Any]]:
    """Automatic sizes against the best of `sizes`, under each of the `tables`."""
    by_size = {}
    for size in sizes:
        by_size[size] = fixed(tasks, list(tables.values()), learnt(), size)
        advance()
    races = []
    for index, (name, costs) in enumerate(tables.items()):
        speed = {size: found[index]["over_plain"] for size, found in by_size.items()}
        best = max(speed, key=speed.__getitem__)
        found = automatic(tasks, costs, learnt(), most)
        advance()
        races.append(
            {
                "costs": name,
                "best_fixed": best,
                "best_fixed_over_plain": speed[best],
                "auto_over_best_fixed": round(found["over_plain"] / speed[best], 3),
                "auto": found,
                "fixed": {str(size): each[index] for size, each in by_size.items()},
            }
        )
    return races


def measure(options: SizesOptions, console: Console) -> dict[str, Any]:
    """Replay as the command line says."""
    encode = load_tokenizer(options.tokenizer or default_tokenizer())
    tables = {f"{price:g} % a node": priced(price) for price in options.prices}
    for path in options.costs:
        tables[Path(path).name] = read_step_times(read_json(path), f"--costs {path}")
    console.print("ceiling: the best of the fixed sizes, chosen afterwards per table")
    runs = []
    for path in options.traces:
        pairs = read_traces(path)
        tasks = tasks_of(select(pairs, None, options.last), encode, path)
        for num_warm in [0, options.warm_first] if options.warm_first else [0]:
            learnt = partial(trie_of, [as_learnt(encode(prompt), encode(text)) for prompt, text in pairs[:num_warm]])
            with progress(console, len(options.sizes) + len(tables), "replay") as advance:
                races = compare(tasks, tables, learnt, options.sizes, options.max_nodes, advance)
            run = {"traces": Path(path).name, "num_tasks": len(tasks), "num_warm_tasks": num_warm, "races": races}
            runs.append(run)
    return {"max_nodes": options.max_nodes, "runs": runs}


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("sizes", SizesOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
