"""Wall clock of whole completions: lpr against transformers' greedy decoding and its prompt lookup, in one run.

    python -m benchmarks.decode --data classeval.jsonl --output benchmarks/results/decode.json

Every prompt is completed by all contestants in turn (benchmarks/race.py). Ratios are of medians over prompts, after a
few tokens of a warm-up prompt. `speedup_by_prompt` is relative to transformers for each prompt. Outputs that differ
from transformers' are counted.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks.common import DataOptions, progress, run_main
from benchmarks.data import prompts_of
from benchmarks.engines import engines_over, load_model, params_for, plain, split_budget
from benchmarks.race import Contestant, Lpr, Race, Stock, run_race
from lpr import DecodeConfig, bundled_model

WARM_UP_TOKENS = 32
STOCK, PLAIN, AUTO = "transformers greedy", "lpr autoregressive", "lpr auto"


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(DataOptions):
    """Wall clock of completions against transformers."""

    budgets: tuple[int, ...] = (16, 32, 64)  # Node budgets of fixed sizes.
    kinds: tuple[Literal["window", "trie", "both"], ...] = ("trie", "both")  # Draft sources of fixed sizes.


def measure(options: DecodeOptions, console: Console) -> dict[str, Any]:
    """Race all contestants over all prompts."""
    decodes = {PLAIN: plain(), AUTO: DecodeConfig(max_batch_size=1)}
    decodes |= {f"lpr {kind} {size}": split_budget(kind, size) for kind in options.kinds for size in options.budgets}
    texts = prompts_of(options, options.skip + options.prompts + 1)
    engines = engines_over(load_model(options), decodes)
    model = engines[PLAIN].model
    stock: Any = AutoModelForCausalLM.from_pretrained(options.model or bundled_model(), dtype=model.model.dtype)
    stock.to(model.device)
    contestants: dict[str, Contestant] = {
        STOCK: Stock(stock),
        "transformers prompt lookup": Stock(stock, prompt_lookup_num_tokens=10),
        **{name: Lpr(engine) for name, engine in engines.items()},
    }
    console.print("ceiling: seconds of plain decoding divided by tokens per step, if a step with a tree took no longer")
    prompts = [engines[PLAIN].encode(text) for text in texts]
    first, *params = params_for(len(prompts), options.max_new_tokens, 0.0)
    params = [replace(first, max_new_tokens=min(WARM_UP_TOKENS, options.max_new_tokens)), *params]
    with progress(console, len(prompts)) as advance:
        race = run_race(contestants, prompts, params, advance)
    return {
        "data": Path(options.data).name,
        "first_prompt": options.skip + 1,
        "num_prompts": len(prompts) - 1,
        "max_new_tokens": options.max_new_tokens,
        "device": str(model.device),
        "dtype": str(model.model.dtype),
        "results": results_of(race),
    }


def results_of(race: Race) -> list[dict[str, Any]]:
    """Medians over prompts, also relative to transformers and to plain decoding."""
    medians = {name: statistics.median(tally.seconds) for name, tally in race.tallies.items()}
    return [
        {
            "name": name,
            "median_seconds": round(medians[name], 4),
            "speedup_over_transformers": round(medians[STOCK] / medians[name], 3),
            "speedup_over_autoregressive": round(medians[PLAIN] / medians[name], 3),
            "speedup_by_prompt": [
                round(stock / own, 3) for stock, own in zip(race.tallies[STOCK].seconds, tally.seconds, strict=True)
            ],
            "tokens_per_step": round(race.num_tokens / tally.num_steps, 3) if tally.num_steps else None,
            "prompts_with_other_tokens": tally.num_different,
        }
        for name, tally in race.tallies.items()
    ]


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("decode", DecodeOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
