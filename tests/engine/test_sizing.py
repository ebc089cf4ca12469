"""Automatic sizes on recorded texts under known step times: what they take is exact, so it can be held to a limit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.replay import FixedSizes, Task, replay_task
from lpr.config import DecodeConfig, SamplingParams, TreeSizes
from lpr.core.budget import Promises
from lpr.core.step_times import KNOTS, SHORTEST_KV, StepTimes
from lpr.core.wire import node_width, payload_words, tables_of
from lpr.dist.comm import Comm
from lpr.engine.sizing import Sizer
from lpr.native import Budgets, SequenceState, SuffixIndex, draft_step


def copying_text(rng: random.Random, length: int) -> list[int]:
    """Long copies of what was before, between stretches that nothing foretells."""
    text = [rng.randrange(1000) for _ in range(60)]
    while len(text) < length:
        if rng.random() < 0.4:
            start = rng.randrange(len(text) - 40)
            text += text[start : start + rng.randrange(10, 40)]
        else:
            text += [rng.randrange(1000) for _ in range(rng.randrange(5, 25))]
    return text


def tasks(copies: bool) -> list[Task]:
    rng = random.Random(3)
    texts = [copying_text(rng, 700) if copies else [rng.randrange(1000) for _ in range(700)] for _ in range(6)]
    return [Task(text[:100], text[100:]) for text in texts]


def priced(percent: float) -> StepTimes:
    """Step times where each further node costs `percent` of a plain step."""
    return StepTimes({(1, SHORTEST_KV): [1 + percent / 100 * (knot - 1) for knot in KNOTS]})


def automatic(tasks: Sequence[Task], costs: StepTimes, shared: SuffixIndex, most: int, batch: int = 1) -> float:
    """Speed relative to plain decoding with automatic sizes of up to `most` nodes, by the engine's own calls.

    A task begins where another has ended, and only steps of a full `batch` count.
    """
    sizes = DecodeConfig(window_size=0, max_nodes=most, num_candidates=0).resolved()
    times, width = costs.row(batch, 1), node_width(sizes, False)
    budgets, num_tokens, spent = Budgets(sizes, 1, costs.row(1, 1)), 0, 0.0
    texts = [task.prompt + task.completion for task in tasks]
    waiting = [
        SequenceState(list(task.prompt), SamplingParams(), sizes, shared=shared, longest=len(text))
        for task, text in zip(tasks, texts, strict=True)
    ]
    running = list(range(batch))
    while len(running) == batch:
        states = [waiting[index] for index in running]
        budgets.begin_step({(0,): (times, 0.0)})
        draft = draft_step(states, budgets, 0, [list(range(batch))], sizes.num_nodes)
        payload = np.zeros((1, payload_words(sizes, batch, 1)), np.int32)
        payload[0, : len(draft.header)] = draft.header
        for index, state, tree, table in zip(
            running, states, draft.trees, tables_of(payload, sizes.num_nodes, width)[0], strict=True
        ):
            node = 0
            for token in texts[index][len(state.tokens) :]:
                table[node, 0] = token
                node = tree.find(node, token)
                if node < 0:
                    break
        spent += costs.time(sum(map(len, draft.trees)), batch)
        num_tokens += sum(len(each.emitted) for each in draft.conclude(payload, width, budgets)[0])
        left = iter(range(max(running) + 1, len(waiting)))
        ended = [index for index in running if len(waiting[index].tokens) == len(texts[index])]
        running = [
            index for index in (next(left, None) if each in ended else each for each in running) if index is not None
        ]
    return num_tokens * costs.time(batch, batch) / (batch * spent)


def fixed(tasks: Sequence[Task], costs: StepTimes, shared: SuffixIndex, size: int) -> float:
    """Speed relative to plain decoding with trees of `size` drafted nodes."""
    sizes = FixedSizes(DecodeConfig(window_size=0, trie_nodes=size).resolved(), shared)
    for task in tasks:
        replay_task(task, sizes)
    steps, nodes = sizes.tally.num_steps, 1 + sizes.tally.num_drafted / sizes.tally.num_steps
    # A draft that ended early is as cheap as it is small; a table of one slope makes the mean size exact.
    return sizes.tally.num_tokens * costs.time(1) / (steps * costs.time(nodes))


@pytest.mark.parametrize("price", [0.2, 1.0, 3.0, 10.0])
def test_automatic_sizes_keep_up_with_the_best_fixed_one(price: float) -> None:
    """A budget that took the rate of its last step for granted never drafted again after a copy: 0.16x."""
    texts, costs = tasks(copies=True), priced(price)
    best = max(fixed(texts, costs, SuffixIndex(10_000), size) for size in (4, 8, 16, 32, 64))
    assert automatic(texts, costs, SuffixIndex(10_000), 128) >= 0.95 * best
    assert best > 1.2, "there is something to win"


@pytest.mark.parametrize("price", [0.2, 1.0, 3.0, 10.0, 50.0])
def test_automatic_sizes_are_never_slower_than_plain_decoding(price: float) -> None:
    assert automatic(tasks(copies=False), priced(price), SuffixIndex(10_000), 128) >= 0.97


@pytest.mark.parametrize("price", [1.0, 2.0, 4.0])
def test_a_full_batch_is_not_slower_than_plain_decoding(price: float) -> None:
    """Prices as of sixteen sequences on a CPU, where a node must promise a third of a token."""
    texts, costs = [*tasks(copies=True), *tasks(copies=False)] * 2, priced(price)
    assert automatic(texts, costs, SuffixIndex(10_000), 64, batch=16) >= 0.97


def test_one_long_promise_that_failed_is_soon_forgiven() -> None:
    promises = Promises()
    promises.record_step(50.0, 0, 0.95)
    assert promises.trust() > 0.4
    for _ in range(200):
        promises.record_step(0.0, 0, 0.95)
    assert promises.trust() > 0.8, "plain steps forget it"
    for _ in range(100):
        promises.record_step(1.0, 0, 0.95)
    assert promises.trust() < 0.15, "failing again and again is believed"


def test_nodes_are_dearer_while_prompts_wait() -> None:
    """A step with nodes is longer for those too that have no token yet: they count with two tokens each."""
    times = priced(10)
    sizer = Sizer(TreeSizes(), times, Comm())
    seen: list[Any] = []
    sizer.budgets = SimpleNamespace(begin_step=seen.append)  # type: ignore[assignment]

    def request(num_tokens: int, num_steps: int) -> Any:
        stats = SimpleNamespace(num_tokens=num_tokens, num_steps=num_steps)
        return SimpleNamespace(homes=[0], tokens=[1] * 40, stats=stats)

    decoding = [SequenceState([1] * 40, SamplingParams(), TreeSizes()) for _ in range(2)]
    sizer.begin_step(decoding, [])
    sizer.begin_step(decoding, [], [request(0, 0), request(0, 0), request(20, 6)])
    assert [prices[0,] for prices in seen] == [(times.row(2, 40), 0.0), (times.row(2, 40), 2 + 2 + 2.8)]
