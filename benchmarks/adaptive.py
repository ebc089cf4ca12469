"""Automatic sizes against every fixed size of a grid, and against plain decoding on text that cannot be predicted.

    python -m benchmarks.adaptive --data classeval.jsonl humaneval.jsonl --output benchmarks/results/adaptive.json

All contestants complete a prompt at the same time, a few steps each in turn, so that a machine whose speed drifts does
so for all of them: one whole completion after the other, equal engines differed by 10 %. Ratios are of the sums of
seconds over all prompts. The contestants share one model. Traps for the promise "never slower than plain decoding":
prompts of random tokens and real prompts at temperature 1.5, and a shared trie that was fed, for every pair of tokens
that will come, a wrong continuation.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.common import load_prompts, model_parser, run_main, table
from lpr import DecodeConfig, Engine, SamplingParams, bundled_model
from lpr.engine.request import Request
from lpr.model.loader import load

PLAIN, AUTO = "plain", "auto"
TURN = 8
"""Steps of a contestant before the next one's turn: each begins with caches that the others have filled."""


class Race:
    """Contestants that complete the same prompts, one after the other."""

    def __init__(self, loaded: Any, decodes: dict[str, DecodeConfig], costs: Any = None) -> None:
        """An engine per contestant, over one model."""
        self.engines = {name: Engine(loaded, decode, costs=costs) for name, decode in decodes.items()}
        self.seconds: dict[str, list[float]] = {name: [] for name in decodes}
        self.steps = dict.fromkeys(decodes, 0)
        self.nodes = dict.fromkeys(decodes, 0)
        self.tokens = 0
        self.different = 0

    def run(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], advance: Callable[[], None] = lambda: None
    ) -> None:
        """Complete `prompts`; the first one warms up and does not count."""
        gc.collect()
        gc.freeze()  # a full collection would fall into some contestant's step
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            requests = {name: engine.submit(prompt, each) for name, engine in self.engines.items()}
            seconds = dict.fromkeys(requests, 0.0)
            order = list(requests)
            while any(request.finish_reason is None for request in requests.values()):
                for name in order:
                    seconds[name] += self._turn(self.engines[name], requests[name])
                order = order[1:] + order[:1]
            outputs = {name: request.completion() for name, request in requests.items()}
            if index:
                for name, done in outputs.items():
                    self.seconds[name].append(seconds[name])
                    self.steps[name] += done.stats.num_steps
                    self.nodes[name] += done.stats.num_nodes
                self.tokens += len(outputs[PLAIN].token_ids)
                self.different += sum(done.token_ids != outputs[PLAIN].token_ids for done in outputs.values())
            advance()

    def _turn(self, engine: Engine, request: Request) -> float:
        """Seconds of the next `TURN` steps of a request, or of those that are left."""
        began = time.perf_counter()
        for _ in range(TURN):
            if request.finish_reason is None:
                engine.step()
        return time.perf_counter() - began

    def results(self) -> list[dict[str, Any]]:
        """Per contestant: tokens per second and step, and speed against plain decoding."""
        plain = sum(self.seconds[PLAIN])
        return [
            {
                "name": name,
                "tokens_per_second": round(self.tokens / sum(times), 2),
                "over_plain": round(plain / sum(times), 3),
                "median_over_plain_by_prompt": round(
                    statistics.median(p / t for p, t in zip(self.seconds[PLAIN], times, strict=True)), 3
                ),
                "tokens_per_step": round(self.tokens / self.steps[name], 3),
                "nodes_per_step": round(self.nodes[name] / self.steps[name], 1),
            }
            for name, times in self.seconds.items()
        ]


def grid(sizes: Sequence[int]) -> dict[str, DecodeConfig]:
    """Plain, automatic, and every fixed size: trie only, and half of it for the window and its pool."""
    decodes = {PLAIN: DecodeConfig.autoregressive(max_batch_size=1), AUTO: DecodeConfig(max_batch_size=1)}
    for size in sizes:
        decodes[f"trie {size}"] = DecodeConfig(window_size=0, trie_nodes=size, max_batch_size=1)
        if size >= 32:
            columns = size // 16
            decodes[f"both {size}"] = DecodeConfig(window_size=columns, trie_nodes=size - 8 * columns, max_batch_size=1)
    return decodes


def params_for(count: int, max_new_tokens: int, temperature: float) -> list[SamplingParams]:
    """One seed per prompt; end-of-text tokens do not end it, so that all contestants have enough to do."""
    return [
        SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in range(count)
    ]


def traps(loaded: Any, prompts: Sequence[list[int]], max_new_tokens: int, rng: random.Random) -> list[dict[str, Any]]:
    """Plain against automatic where drafts must fail."""
    decodes = {PLAIN: DecodeConfig.autoregressive(max_batch_size=1), AUTO: DecodeConfig(max_batch_size=1)}
    vocabulary = Engine(loaded, decodes[PLAIN]).model.vocab_size
    noise = [[rng.randrange(vocabulary) for _ in range(64)] for _ in prompts]
    hot = params_for(len(prompts), max_new_tokens, 1.5)
    cases: list[dict[str, Any]] = []
    for name, each in (("random tokens, temperature 1.5", noise), ("text, temperature 1.5", prompts)):
        race = Race(loaded, decodes)
        race.run(each, hot)
        cases.append({"case": name, "different": race.different, "results": race.results()})
    race = Race(loaded, decodes)
    warm = params_for(len(prompts), max_new_tokens, 0.8)
    for done in race.engines[PLAIN].generate(prompts, warm):
        ids = [*done.prompt_token_ids[-1:], *done.token_ids]
        for first, second, right in zip(ids, ids[1:], ids[2:], strict=False):
            wrong = [rng.randrange(vocabulary) for _ in range(6)]
            if wrong[0] != right:
                race.engines[AUTO].learn([first, second, *wrong])
    race.run(prompts, warm)
    cases.append({"case": "wrong trie, temperature 0.8", "different": race.different, "results": race.results()})
    return cases


def measure(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Race every data set and temperature, then the traps."""
    loaded = load(options.model or bundled_model(), options.dtype, options.device)
    encode = Engine(loaded, DecodeConfig.autoregressive(max_batch_size=1)).encode
    sets = {Path(path).stem: [encode(p) for p in load_prompts(path, options.prompts + 1)] for path in options.data}
    console.print("ceiling: the best of the grid's fixed sizes, chosen afterwards per data set and temperature")
    races = []
    decodes = grid(options.sizes)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("decoding", total=len(sets) * len(options.temperatures) * (options.prompts + 1))
        for data, prompts in sets.items():
            for temperature in options.temperatures:
                race = Race(loaded, decodes)
                params = params_for(len(prompts), options.max_new_tokens, temperature)
                race.run(prompts, params, lambda: progress.advance(bar))
                races.append(summary(data, temperature, race))
                console.print(show(races[-1]))
    first = next(iter(sets.values()))
    cases = traps(loaded, first, options.max_new_tokens, random.Random(0))
    rows = [[each["case"], f"{each['results'][1]['over_plain']:.3f}x"] for each in cases]
    console.print(table("automatic sizes where drafts fail", ["", "over plain"], rows))
    return {"benchmark": "adaptive", "races": races, "traps": cases, "max_new_tokens": options.max_new_tokens}


def summary(data: str, temperature: float, race: Race) -> dict[str, Any]:
    """A race in numbers: automatic sizes against the best fixed one."""
    results = race.results()
    speed = {each["name"]: each["tokens_per_second"] for each in results}
    best = max((name for name in speed if name not in (PLAIN, AUTO)), key=speed.__getitem__)
    return {
        "data": data,
        "temperature": temperature,
        "num_prompts": len(race.seconds[PLAIN]),
        "best_fixed": best,
        "auto_over_best_fixed": round(speed[AUTO] / speed[best], 3),
        "different": race.different,
        "results": results,
    }


def show(race: dict[str, Any]) -> Any:
    """A race as a table."""
    rows = [
        [
            each["name"] + (" *" if each["name"] == race["best_fixed"] else ""),
            f"{each['tokens_per_second']:.1f}",
            f"{each['over_plain']:.2f}x",
            f"{each['tokens_per_step']:.2f}",
            f"{each['nodes_per_step']:.1f}",
        ]
        for each in race["results"]
    ]
    title = f"{race['data']}, T={race['temperature']}: auto {race['auto_over_best_fixed']:.2f}x of the best fixed size"
    return table(title, ["", "tokens/s", "over plain", "tokens/step", "nodes/step"], rows)


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = model_parser("adaptive", "Automatic tree sizes against fixed ones and plain decoding.", many=True)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    return run_main(parser, measure)


if __name__ == "__main__":
    sys.exit(main())
