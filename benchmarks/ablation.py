"""Tokens per step by draft source: window only, trie only, both, at several budgets, greedy and sampled.

    python -m benchmarks.ablation --data classeval.jsonl --output benchmarks/results/ablation.json

Steps are counted, not timed. Prompts run one by one, so the shared index of a configuration learns the outputs in
order. `by_depth` holds nodes drafted and accepted by source and depth (groups up to 1, 2, 4, 8, ...). `share_of_limit`
relates the steps to those of copying the longest phrase in each (benchmarks.limit). An engine drafts from the logits of
rejected nodes too, which a replay of recorded steps lacks, so the figures of held-out prompts are made with

    python -m benchmarks.ablation --model FOLDER --chat-template --data classeval.jsonl --skip 50 --prompts 62 \
        --kinds trie --budgets 17 65 --cold --together 4 --dtype bfloat16

where `--cold` lets no request draft from another's output, so several can run together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from benchmarks.common import DataOptions, Flag, Whole, progress, run_main
from benchmarks.data import prompts_of
from benchmarks.engines import load_engine, params_for, split_budget, switch
from benchmarks.limit import Counted, count_output, figures_with_limit
from benchmarks.record import groups
from lpr import Completion, DecodeConfig, Engine, InputError, SamplingParams
from lpr.core.suffix_index import as_learnt
from lpr.engine.stats import DecodeStats


@dataclass(frozen=True, kw_only=True)
class AblationOptions(DataOptions):
    """Tokens per step by draft source and node budget."""

    kinds: tuple[Literal["window", "trie", "both"], ...] = ("window", "trie", "both")
    """Draft sources."""
    cold: Flag = False
    """No request drafts from the output of another."""
    together: Whole = 1
    """Requests in a step; more than 1 need --cold."""
    budgets: tuple[int, ...] = (32, 64, 128, 256)
    """Node budgets."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Temperatures."""


def measure(options: AblationOptions, console: Console) -> dict[str, Any]:
    """Run every kind at every budget and temperature."""
    if options.together > 1 and not options.cold:
        raise InputError("--together needs --cold: requests that learn from each other run in order")
    prompts, engine = prompts_of(options), load_engine(options)
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
    """The figures of one configuration, with the limit of the same outputs."""
    total, counted, known = DecodeStats(), list[Counted](), list[list[int]]()
    for prompt, output in zip(prompts, outputs, strict=True):
        counted.append(count_output(prompt, output.token_ids, output.stats.num_steps, known))
        total.add(output.stats)
        if not is_cold:
            known.append(as_learnt(prompt, output.token_ids))
    return {
        "nodes_per_step": round(total.num_nodes / total.num_steps, 1),
        "accepted_per_step": {
            name: round(count.accepted / total.num_steps, 3) for name, count in total.sources.items()
        },
        "by_depth": [
            {"source": source, "up_to_depth": depth, **vars(count)}
            for (source, depth), count in sorted(total.by_depth.items())
        ],
        **figures_with_limit(counted),
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("ablation", AblationOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
