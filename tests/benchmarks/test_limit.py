"""The limit of copying phrases (benchmarks.replay)."""

from __future__ import annotations

import random

import pytest

from benchmarks.replay import FixedSizes, Phrases, Task, fewest_steps, replay_task
from lpr.config import DecodeConfig
from lpr.native import SuffixIndex


def longest_by_looking(known: list[list[int]], text: list[int], at: int) -> int:
    """The longest phrase at `at`, by trying every earlier place."""
    best = 0
    for source, limit in [*((each, len(each)) for each in known), (text, at)]:
        for begin in range(limit):
            length = 0
            while (
                at + length < len(text) and begin + length < len(source) and source[begin + length] == text[at + length]
            ):
                length += 1
            best = max(best, length)
    return best


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_phrase_is_found(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(1 + seed % 5) for _ in range(40)]
    known = [[chance.randrange(1 + seed % 5) for _ in range(length)] for length in (0, 1, 9)][: seed % 4]
    phrases = Phrases(known, text)
    for at in range(len(text)):
        assert phrases.longest(at) == longest_by_looking(known, text, at)


def test_each_step_is_a_phrase_and_one_more_token() -> None:
    assert fewest_steps([1, 2, 3], [1, 2, 3, 4]) == 1, "three copied, one from the model"
    assert fewest_steps([1, 2, 3], [1, 2, 3, 4, 5]) == 2
    assert fewest_steps([7], [7, 7, 7, 7, 7, 8]) == 1, "copying runs into what is being copied"
    assert fewest_steps([1], [2, 3, 4]) == 3
    assert fewest_steps([1], [2, 3, 4], known=[[2, 3]]) == 1
    assert fewest_steps([1], [2, 3, 4], known=[[2], [3]]) == 2, "no phrase runs from one text into the next"


def test_no_draft_does_better_on_plain_text() -> None:
    chance = random.Random(3)
    words = [[chance.randrange(50) for _ in range(chance.randrange(2, 9))] for _ in range(12)]
    text = [token for _ in range(60) for token in chance.choice(words)]
    sizes = FixedSizes(DecodeConfig(window_size=0, trie_nodes=64).resolved(), SuffixIndex(10_000))
    replay_task(Task(text[:100], text[100:]), sizes)
    tally = sizes.tally
    assert tally.fewest_steps <= tally.num_steps < len(text) - 100
