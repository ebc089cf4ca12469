"""Wall clock of whole completions: lpr against transformers' greedy decoding and its prompt lookup, in one run.

    python -m benchmarks.decode --data classeval.jsonl --output benchmarks/results/decode.json

Every prompt is completed by all contestants in turn, each time in another order. Ratios are of medians over prompts,
after a few tokens of a warm-up prompt. `speedup_by_prompt` is relative to transformers for each prompt. Outputs that
differ from transformers' are counted.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from transformers import AutoModelForCausalLM

from benchmarks.common import DataOptions, progress, run_main
from benchmarks.data import prompts_of
from benchmarks.engines import engines_over, load_model, params_for, plain, split_budget, stock_generate
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model

WARM_UP_TOKENS = 32
STOCK, PLAIN, AUTO = "transformers greedy", "lpr autoregressive", "lpr auto"


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(DataOptions):
    """Wall clock of completions against transformers."""

    budgets: tuple[int, ...] = (16, 32, 64)  # Node budgets of fixed sizes.
    kinds: tuple[Literal["window", "trie", "both"], ...] = ("trie", "both")  # Draft sources of fixed sizes.


@dataclass
class Tally:
    """Time and counts of a contestant, without the warm-up."""

    seconds: list[float] = field(default_factory=list)
    num_steps: int = 0  # 0: unknown
    num_tokens: int = 0
    num_different: int = 0  # prompts whose ids differ from the first contestant's, with the warm-up


Contestant = Callable[[list[int], SamplingParams], tuple[list[int], int]]
"""Completes a prompt: its ids, and the number of its steps (0: unknown)."""


def by_lpr(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], int]:
    """A completion of an engine."""
    done = engine.generate([prompt], params)[0]
    return done.token_ids, done.stats.num_steps


def by_transformers(model: Any, prompt: list[int], params: SamplingParams, **more: Any) -> tuple[list[int], int]:
    """A completion of transformers' own generate, greedy."""
    return stock_generate(model, prompt, params.max_new_tokens, **more), 0


def run_race(
    contestants: Mapping[str, Contestant], prompts: Sequence[list[int]], params: Sequence[SamplingParams],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Tally]:  # fmt: skip
    """Complete `prompts` by turns; the first prompt is a warm-up and does not count."""
    gc.collect()
    gc.freeze()  # no full collection inside a contestant's step
    tallies, order = {name: Tally() for name in contestants}, list(contestants)
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        outputs: dict[str, list[int]] = {}
        for name in order:
            began = time.perf_counter()
            outputs[name], steps = contestants[name](prompt, each)
            if index:
                tallies[name].seconds.append(time.perf_counter() - began)
                tallies[name].num_steps += steps
                tallies[name].num_tokens += len(outputs[name])
        for name, tally in tallies.items():
            tally.num_different += outputs[name] != outputs[next(iter(contestants))]
        order = order[1:] + order[:1]
        advance()
    return tallies


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
        STOCK: partial(by_transformers, stock),
        "transformers prompt lookup": partial(by_transformers, stock, prompt_lookup_num_tokens=10),
        **{name: partial(by_lpr, engine) for name, engine in engines.items()},
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


def results_of(tallies: Mapping[str, Tally]) -> list[dict[str, Any]]:
    """Medians over prompts, also relative to transformers and to plain decoding."""
    medians = {name: statistics.median(tally.seconds) for name, tally in tallies.items()}
    return [
        {
            "name": name,
            "median_seconds": round(medians[name], 4),
            "speedup_over_transformers": round(medians[STOCK] / medians[name], 3),
            "speedup_over_autoregressive": round(medians[PLAIN] / medians[name], 3),
            "speedup_by_prompt": [
                round(stock / own, 3) for stock, own in zip(tallies[STOCK].seconds, tally.seconds, strict=True)
            ],
            "tokens_per_step": round(tally.num_tokens / tally.num_steps, 3) if tally.num_steps else None,
            "prompts_with_other_tokens": tally.num_different,
        }
        for name, tally in tallies.items()
    ]


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("decode", DecodeOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
