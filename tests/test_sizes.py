"""Automatic sizes on recorded texts under known step times: what they take is exact, so it can be held to a limit."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.replay import FixedSizes, Tally, Task, replay_task
from lpr.config import DecodeConfig
from lpr.core.step_times import KNOTS, SHORTEST_KV, StepTimes
from lpr.native import AcceptanceHistory, AdaptiveBudget, Draft, Drafter, SuffixIndex, TokenTree


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


def automatic(tasks: Sequence[Task], costs: StepTimes, shared: SuffixIndex, most: int) -> float:
    """Speed relative to plain decoding with automatic sizes of up to `most` nodes."""
    sizes = AutomaticSizes(costs, shared, most)
    for task in tasks:
        replay_task(task, sizes)
    return over_plain(costs, sizes.tally, sizes.spent)


def fixed(tasks: Sequence[Task], costs: StepTimes, shared: SuffixIndex, size: int) -> float:
    """Speed relative to plain decoding with trees of `size` drafted nodes."""
    sizes = FixedSizes(DecodeConfig(window_size=0, trie_nodes=size).resolved(), shared)
    for task in tasks:
        replay_task(task, sizes)
    steps, nodes = sizes.tally.num_steps, 1 + sizes.tally.num_drafted / sizes.tally.num_steps
    # A draft that ended early is as cheap as it is small; a table of one slope makes the mean size exact.
    return over_plain(costs, sizes.tally, steps * costs.time(nodes))


def over_plain(costs: StepTimes, tally: Tally, spent: float) -> float:
    """Speed relative to plain decoding."""
    return tally.num_tokens * costs.time(1) / spent


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


def test_one_long_promise_that_failed_is_soon_forgiven() -> None:
    history = AcceptanceHistory()
    history.record_step(50.0, 0, 0.95)
    assert history.trust() > 0.4
    for _ in range(200):
        history.record_step(0.0, 0, 0.95)
    assert history.trust() > 0.8, "plain steps forget it"
    for _ in range(100):
        history.record_step(1.0, 0, 0.95)
    assert history.trust() < 0.15, "failing again and again is believed"
