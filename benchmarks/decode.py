"""Wall clock of whole completions: lpr against transformers' greedy decoding and its prompt lookup, in one run.

    python -m benchmarks.decode --data classeval.jsonl --output benchmarks/results/decode.json

Every prompt is completed by all contestants in turn, so that a machine whose speed drifts does so for all of them.
Ratios are of medians over prompts, after one warm-up prompt. All must emit the same tokens; a difference is counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from transformers import AutoModelForCausalLM

from benchmarks.common import load_prompts, model_parser, run_main, split_budget, table
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model

Contestant = Callable[[list[int]], tuple[list[int], int]]
"""Prompt ids in; emitted ids and number of model steps out (0: not known)."""


def lpr_contestant(engine: Engine, decode: DecodeConfig, max_new_tokens: int) -> Contestant:
    """An engine's own decoding under `decode`, which is switched to before the first prompt."""

    def complete(prompt: list[int]) -> tuple[list[int], int]:
        done = engine.generate([prompt], SamplingParams(max_new_tokens=max_new_tokens))[0]
        return done.token_ids, done.stats.num_steps

    engine.configure(decode)
    return complete


def stock_contestant(model: Any, max_new_tokens: int, **more: Any) -> Contestant:
    """transformers' generate, greedy."""

    def complete(prompt: list[int]) -> tuple[list[int], int]:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **more
        )
        return out[0, len(prompt) :].tolist(), 0

    return complete


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Race all contestants over all prompts."""
    source = options.model or bundled_model()
    prompts = load_prompts(options.data, options.prompts + 1)
    engines = {
        name: Engine.from_pretrained(source, dtype=options.dtype, device=options.device)
        for name in (
            "lpr autoregressive",
            "lpr auto",
            *(f"lpr {kind} {budget}" for kind in options.kinds for budget in options.budgets),
        )
    }
    reference = engines["lpr autoregressive"]
    stock: Any = AutoModelForCausalLM.from_pretrained(source, dtype=reference.model.model.dtype)
    stock.to(reference.model.device)
    tokens = options.max_new_tokens
    contestants: dict[str, Contestant] = {
        "transformers greedy": stock_contestant(stock, tokens),
        "transformers prompt lookup": stock_contestant(stock, tokens, prompt_lookup_num_tokens=10),
    }
    for name, engine in engines.items():
        decode = DecodeConfig.autoregressive(max_batch_size=1)
        if name == "lpr auto":
            decode = DecodeConfig(max_batch_size=1)
        elif engine is not reference:
            _, kind, budget = name.split()
            decode = split_budget(kind, int(budget))
        contestants[name] = lpr_contestant(engine, decode, tokens)
    console.print("ceiling: seconds of plain decoding divided by tokens per step, if a step with a tree took no longer")
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    steps = dict.fromkeys(contestants, 0)
    emitted = 0
    different = dict.fromkeys(contestants, 0)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("decoding", total=len(prompts) * len(contestants))
        for index, text in enumerate(prompts):
            prompt = reference.encode(text)
            outputs = {}
            for name, complete in contestants.items():
                start = time.perf_counter()
                outputs[name], num_steps = complete(prompt)
                if index:  # the first prompt warms up
                    seconds[name].append(time.perf_counter() - start)
                    steps[name] += num_steps
                progress.advance(bar)
            expected = outputs["transformers greedy"]
            emitted += len(expected) if index else 0
            for name, ids in outputs.items():
                different[name] += ids != expected
    base = statistics.median(seconds["transformers greedy"])
    plain = statistics.median(seconds["lpr autoregressive"])
    results: list[dict[str, Any]] = [
        {
            "name": name,
            "median_seconds": round(statistics.median(times), 4),
            "speedup_over_transformers": round(base / statistics.median(times), 3),
            "speedup_over_autoregressive": round(plain / statistics.median(times), 3),
            "tokens_per_step": round(emitted / steps[name], 3) if steps[name] else None,
            "prompts_with_other_tokens": different[name],
        }
        for name, times in seconds.items()
    ]
    rows = [
        [
            each["name"],
            f"{each['median_seconds']:.3f}",
            f"{each['speedup_over_transformers']:.2f}x",
            f"{each['speedup_over_autoregressive']:.2f}x",
            f"{each['tokens_per_step']:.2f}" if each["tokens_per_step"] else "",
            str(each["prompts_with_other_tokens"]),
        ]
        for each in results
    ]
    columns = ["", "median s", "over transformers", "over lpr AR", "tokens/step", "other tokens"]
    console.print(table(f"{len(prompts) - 1} prompts x {tokens} tokens, greedy", columns, rows))
    return {
        "benchmark": "decode",
        "data": options.data.rsplit("/", 1)[-1],
        "num_prompts": len(prompts) - 1,
        "max_new_tokens": tokens,
        "device": str(reference.model.device),
        "dtype": str(reference.model.model.dtype),
        "results": results,
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = model_parser("decode", "Wall clock of completions against transformers.")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--kinds", nargs="+", default=["trie", "both"], choices=["window", "trie", "both"])
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
