"""Automatic sizes against every fixed size of a grid, and against plain decoding on text that cannot be predicted.

    python -m benchmarks.adaptive --data classeval.jsonl humaneval.jsonl --output benchmarks/results/adaptive.json

All contestants share one model and complete a prompt in turns of a few steps (benchmarks/race.py); with turns of a
whole completion, equal engines differed by 10 %. Ratios are of the sums of seconds over all prompts. Traps for the
promise "never slower than plain decoding": prompts of random tokens and real prompts at temperature 1.5, and a shared
index that holds a wrong continuation of every pair of tokens to come. Of a model with a prediction head every
contestant runs with it and without it.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import ManyDataOptions, progress, run_main
from benchmarks.data import load_prompts, template_of
from benchmarks.engines import OneModel, engines_over, load_model, params_for, plain, split_budget
from benchmarks.race import Lpr, Race, run_race
from lpr import DecodeConfig, Engine

PLAIN, AUTO = "plain", "auto"
TURN = 8
"""Steps of a contestant in a turn; a turn begins with caches that the others have filled."""


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions(ManyDataOptions):
    """Automatic tree sizes against fixed ones and plain decoding."""

    sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Fixed numbers of nodes."""
    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Temperatures."""


def grid(sizes: Sequence[int], has_head: bool = False) -> dict[str, DecodeConfig]:
    """Plain, automatic, and every fixed size: trie only, and half of it for the window and its pool.

    If the model `has_head`, all but plain decoding once more without it.
    """
    decodes = {PLAIN: plain(), AUTO: DecodeConfig(max_batch_size=1)}
    for size in sizes:
        decodes[f"trie {size}"] = DecodeConfig(window_size=0, trie_nodes=size, max_batch_size=1)
        if size >= 32:
            decodes[f"both {size}"] = split_budget("both", size)
    if has_head:
        drafting = {name: each for name, each in decodes.items() if name != PLAIN}
        decodes |= {name: replace(each, draft_heads="on") for name, each in drafting.items()}
        decodes |= {f"{name}, no head": replace(each, draft_heads="off") for name, each in drafting.items()}
    return decodes


def contestants(model: OneModel, decodes: dict[str, DecodeConfig]) -> dict[str, Lpr]:
    """An engine for each configuration, with empty draft indexes."""
    return {name: Lpr(engine, TURN) for name, engine in engines_over(model, decodes).items()}


def traps(model: OneModel, prompts: Sequence[list[int]], max_new_tokens: int) -> list[dict[str, Any]]:
    """Plain against automatic sizes where drafts must fail."""
    rng, racers = random.Random(0), contestants(model, grid([]))
    vocabulary = racers[PLAIN].engine.model.vocab_size
    noise = [[rng.randrange(vocabulary) for _ in range(64)] for _ in prompts]
    hot = params_for(len(prompts), max_new_tokens, 1.5, ignore_eos=True)
    cases: list[dict[str, Any]] = []
    for name, each in (("random tokens, temperature 1.5", noise), ("text, temperature 1.5", prompts)):
        race = run_race(contestants(model, grid([])), each, hot)
        cases.append({"case": name, **figures(race)})
    warm = params_for(len(prompts), max_new_tokens, 0.8, ignore_eos=True)
    mislead(racers, prompts, warm, rng)
    cases.append({"case": "wrong trie, temperature 0.8", **figures(run_race(racers, prompts, warm))})
    return cases


def mislead(racers: dict[str, Lpr], prompts: Sequence[list[int]], params: Any, rng: random.Random) -> None:
    """Feed the automatic contestant a wrong continuation of every pair of tokens to come."""
    engine: Engine = racers[PLAIN].engine
    for done in engine.generate(prompts, params):
        ids = [*done.prompt_token_ids[-1:], *done.token_ids]
        for first, second, right in zip(ids, ids[1:], ids[2:], strict=False):
            wrong = [rng.randrange(engine.model.vocab_size) for _ in range(6)]
            if wrong[0] != right:
                racers[AUTO].engine.learn([first, second, *wrong])


def figures(race: Race) -> dict[str, Any]:
    """Per contestant: tokens per second and step, and speed against plain decoding."""
    base = race.tallies[PLAIN].seconds
    results = [
        {
            "name": name,
            "tokens_per_second": round(race.num_tokens / sum(tally.seconds), 2),
            "over_plain": round(sum(base) / sum(tally.seconds), 3),
            "median_over_plain_by_prompt": round(
                statistics.median(p / t for p, t in zip(base, tally.seconds, strict=True)), 3
            ),
            "tokens_per_step": round(race.num_tokens / tally.num_steps, 3),
            "nodes_per_step": round(tally.num_nodes / tally.num_steps, 1),
        }
        for name, tally in race.tallies.items()
    ]
    return {"different": sum(tally.num_different for tally in race.tallies.values()), "results": results}


def measure(options: AdaptiveOptions, console: Console) -> dict[str, Any]:
    """Race every data set and temperature, then the traps."""
    template = template_of(options)
    texts = {Path(path).stem: load_prompts(path, options.prompts + 1, template) for path in options.data}
    console.print("ceiling: the best of the grid's fixed sizes, chosen afterwards per data set and temperature")
    model = load_model(options)
    races, encode = [], contestants(model, {PLAIN: plain()})[PLAIN].engine.encode
    sets = {data: [encode(text) for text in found] for data, found in texts.items()}
    with progress(console, len(options.temperatures) * sum(map(len, sets.values()))) as advance:
        for data, prompts in sets.items():
            for temperature in options.temperatures:
                params = params_for(len(prompts), options.max_new_tokens, temperature, ignore_eos=True)
                decodes = grid(options.sizes, model.loaded.head is not None)
                race = run_race(contestants(model, decodes), prompts, params, advance)
                races.append(summary(data, temperature, race))
    cases = traps(model, next(iter(sets.values())), options.max_new_tokens)
    return {"races": races, "traps": cases, "max_new_tokens": options.max_new_tokens}


def summary(data: str, temperature: float, race: Race) -> dict[str, Any]:
    """A race in numbers: automatic sizes against the best fixed one."""
    found = figures(race)
    speed = {each["name"]: each["tokens_per_second"] for each in found["results"]}
    best = max((name for name in speed if not name.startswith((PLAIN, AUTO))), key=speed.__getitem__)
    return {
        "data": data,
        "temperature": temperature,
        "num_prompts": len(race.tallies[PLAIN].seconds),
        "best_fixed": best,
        "auto_over_best_fixed": round(speed[AUTO] / speed[best], 3),
        **found,
    }


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("adaptive", AdaptiveOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
