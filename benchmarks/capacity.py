"""How many people can type at once: pages against slots of the same bytes, without a model.

    python -m benchmarks.capacity --data humaneval.jsonl --tokens 16384 --context 4096

The load is `typing` of benchmarks.serve: each person types on in a file of the data set, every keystroke sends the text
so far and cancels the request before. The engine's own scheduler serves more people than fit; a step emits --per-step
tokens of each decoding request. Slots of a full context run `tokens / context` requests at once, whatever their length.
The last line is JSON: `slots`, `running` (requests at once with pages, over the second half of the steps), `ratio`
(median over slots), the share of prompt tokens found in the cache, and preemptions.
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from operator import add
from typing import Any

from rich.console import Console
from transformers import AutoTokenizer

from benchmarks.common import DataOptions, Whole, run_main
from benchmarks.data import prompts_of
from lpr import bundled_model
from lpr.engine.limits import Limits
from lpr.engine.scheduler import Scheduler
from lpr.planner.simulated.mesh import SimRequest

OUTPUT = 32
"""Tokens of a completion, as in benchmarks.serve."""


@dataclass(frozen=True, kw_only=True)
class CapacityOptions(DataOptions):
    """Requests at once with pages and with slots, at equal bytes."""

    tokens: Whole = 16384
    """Tokens whose K/V there is memory for."""
    context: Whole = 4096
    """Longest sequence, for which a slot has room."""
    people: Whole = 400
    """People who type."""
    steps: Whole = 2000
    """Steps of the scheduler."""
    keystroke: float = 10.0
    """Mean steps between two keystrokes of a person: 0.2 s at steps of 20 ms."""
    per_step: Whole = 2
    """Tokens that a step emits of each decoding request."""
    nodes: Whole = 64
    """Nodes of a step's tree."""
    files: Whole = 20
    """Files of the data set; several people type in the same one."""
    seed: Whole = 0
    """Seed of the keystrokes."""


class Person:
    """Types on in a file."""

    def __init__(self, tokens: list[int], dice: random.Random, every: float) -> None:
        """Begin at two thirds of a file of `tokens`."""
        self._tokens, self._dice, self._every = tokens, dice, every
        self._at = len(tokens) * 2 // 3
        self._due = dice.expovariate(1 / every)
        self.request: SimRequest | None = None

    def keystroke(self, step: int) -> SimRequest | None:
        """The request of a keystroke that is due."""
        if step < self._due:
            return None
        self._due = step + self._dice.expovariate(1 / self._every)
        self._at = self._at + 1 if self._at < len(self._tokens) else len(self._tokens) * 2 // 3
        tokens = self._tokens[: self._at]
        self.request = SimRequest(step, len(tokens), OUTPUT, tokens=tokens)
        return self.request


def measure(options: CapacityOptions, console: Console) -> dict[str, Any]:
    """Let people type; raises InputError."""
    tokenizer = AutoTokenizer.from_pretrained(options.model or bundled_model())
    texts = [tokenizer(text)["input_ids"] for text in prompts_of(options, options.files)]
    limits = Limits[SimRequest](options.people, 1, 512, options.nodes, True, num_ahead=options.nodes)
    limits.num_pages = options.tokens // limits.page_size
    scheduler: Scheduler[SimRequest] = Scheduler(limits)
    dice = random.Random(options.seed)
    people = [Person(texts[number % len(texts)], dice, options.keystroke) for number in range(options.people)]
    running = []
    for step in range(options.steps):
        for person in people:
            before = person.request
            if (request := person.keystroke(step)) is not None:
                cancel(scheduler, before)
                scheduler.add(request)
        take_step(scheduler, options.per_step)
        running.append(len(scheduler.running))
    late = sorted(running[options.steps // 2 :])
    slots, median = options.tokens // options.context, statistics.median(late)
    counts, shown = scheduler.counts, {"least": late[0], "median": median, "most": late[-1]}
    lengths = [len(text) for text in texts]
    console.print(f"{median:g} requests at once with pages, {slots} with slots of {options.context} tokens")
    return {
        "tokens": options.tokens, "context": options.context, "prompt_tokens": statistics.median(lengths),
        "slots": slots, "running": shown, "ratio": round(median / max(1, slots), 2),
        "found": round(counts.hits / max(1, counts.queries), 3), "preemptions": counts.preemptions, "num_failed": 0,
    }  # fmt: skip


def cancel(scheduler: Scheduler[SimRequest], request: SimRequest | None) -> None:
    """Forget a request that waits or runs."""
    if request is None or scheduler.withdraw(request):
        return
    if request in scheduler.running:
        scheduler.finish(request)


def take_step(scheduler: Scheduler[SimRequest], per_step: int) -> None:
    """One step of all running requests; finished ones leave."""
    while (admitted := scheduler.admit()) is not None:
        admitted[0].num_computed_tokens = list(admitted[1])
    schedule = scheduler.schedule()
    scheduler.take_moves()
    for request, counts in schedule.filling:
        request.num_computed_tokens = list(map(add, request.num_computed_tokens, counts))
    for request in schedule.decoding:
        request.emit(per_step, 0.0)
    scheduler.end_step()
    for request in [each for each in scheduler.running if each.num_left == 0]:
        scheduler.finish(request)


def main() -> int:
    """Run the command line; returns the exit code."""
    return run_main("capacity", CapacityOptions, measure)


if __name__ == "__main__":
    sys.exit(main())
