"""Races: contestants complete the same prompts in turns, so that a drift of the machine's speed meets all alike."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from lpr import Engine, SamplingParams


@dataclass
class Output:
    """A completed prompt: its ids, and the steps and nodes that it took (0: unknown)."""

    token_ids: list[int]
    num_steps: int = 0
    num_nodes: int = 0


class Contestant(Protocol):
    """Completes prompts in turns."""

    def start(self, prompt: list[int], params: SamplingParams) -> Callable[[], Output | None]:
        """Begin a prompt; returns a function that takes the next turn, and returns the output after the last."""
        ...


class Lpr:
    """An engine that takes up to `steps` steps in a turn; without a limit, a whole completion."""

    def __init__(self, engine: Engine, steps: float = math.inf) -> None:
        """Wrap an engine."""
        self.engine, self.steps = engine, steps

    def start(self, prompt: list[int], params: SamplingParams) -> Callable[[], Output | None]:
        """Submit the prompt."""
        request = self.engine.submit(prompt, params)

        def turn() -> Output | None:
            taken = 0
            while request.finish_reason is None:
                if taken == self.steps:
                    return None
                self.engine.step()
                taken += 1
            done = request.completion()
            return Output(done.token_ids, done.stats.num_steps, done.stats.num_nodes)

        return turn


class Stock:
    """transformers' own generate, greedy, a whole completion in a turn."""

    def __init__(self, model: Any, **more: Any) -> None:
        """Wrap a model; `more` goes to generate."""
        self.model, self.more = model, more

    def start(self, prompt: list[int], params: SamplingParams) -> Callable[[], Output | None]:
        """The prompt as a tensor; the turn completes it."""
        return lambda: Output(stock_generate(self.model, prompt, params.max_new_tokens, **self.more))


def stock_generate(model: Any, prompt: list[int], max_new_tokens: int, **more: Any) -> list[int]:
    """The ids of transformers' greedy decoding."""
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, **more)
    return list(out[0, len(prompt) :].tolist())


@dataclass
class Tally:
    """Time and counts of a contestant, without the warm-up."""

    seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    num_nodes: int = 0
    num_different: int = 0  # Prompts whose ids differ from the first contestant's, with the warm-up.


@dataclass
class Race:
    """The tallies of some contestants."""

    tallies: dict[str, Tally]
    num_tokens: int = 0  # Emitted by the first contestant, without the warm-up.


def run_race(
    contestants: Mapping[str, Contestant],
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    advance: Callable[[], None] = lambda: None,
) -> Race:
    """Complete `prompts` in turns; the first prompt is a warm-up and does not count."""
    gc.collect()
    gc.freeze()  # no full collection inside a contestant's step
    race = Race({name: Tally() for name in contestants})
    for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        seconds, outputs = _complete(contestants, prompt, each)
        expected = next(iter(outputs[name] for name in contestants)).token_ids
        for name, tally in race.tallies.items():
            tally.num_different += outputs[name].token_ids != expected
            if index:
                tally.seconds.append(seconds[name])
                tally.num_steps += outputs[name].num_steps
                tally.num_nodes += outputs[name].num_nodes
        race.num_tokens += len(expected) if index else 0
        advance()
    return race


def _complete(
    contestants: Mapping[str, Contestant], prompt: list[int], params: SamplingParams
) -> tuple[dict[str, float], dict[str, Output]]:
    """Seconds and output of each contestant for one prompt."""
    turns = {name: contestant.start(prompt, params) for name, contestant in contestants.items()}
    seconds, outputs, order = dict.fromkeys(turns, 0.0), dict[str, Output](), list(turns)
    while len(outputs) < len(turns):
        for name in order:
            if name not in outputs:
                began = time.perf_counter()
                output = turns[name]()
                seconds[name] += time.perf_counter() - began
                if output is not None:
                    outputs[name] = output
        order = order[1:] + order[:1]
    return seconds, outputs
