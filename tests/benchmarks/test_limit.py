"""The limit of copying phrases, and why steps end (benchmarks.limit)."""

from __future__ import annotations

import random

import pytest
from benchmarks.limit import Cause, Phrases, StepEnds, fewest_steps

from benchmarks.replay import FixedSizes, Task, replay_task
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
    assert sum(sizes.ends.counts.values()) in (tally.num_steps, tally.num_steps - 1)


def test_why_a_step_ended() -> None:
    ends = StepEnds()
    ends.begin([1, 2, 3, 1])
    ends.end(0, 1, 2)
    ends.end(2, 2, 9, candidates=[8, 9])
    ends.end(0, 5, 2)
    ends.end(1, 2, 1)
    ends.end(1, 2, 9)
    assert ends.counts == {
        (Cause.FOLLOWED, True): 1,
        (Cause.CANDIDATE, False): 1,
        (Cause.LAST_IS_NEW, True): 1,
        (Cause.ELSEWHERE, False): 1,
        (Cause.NEW, False): 1,
    }
    ends.read([9, 4])  # the text goes on: 1, then 9, then 4
    ends.end(0, 1, 9)
    ends.end(0, 4, 1)
    assert ends.counts[Cause.FOLLOWED, True] == 2 and ends.counts[Cause.LAST_IS_NEW, True] == 2
    ends.begin([4, 4])
    ends.end(0, 1, 9)
    assert ends.counts[Cause.LAST_IS_NEW, True] == 3, "another request knows nothing of it"
    assert sum(row["steps"] for row in ends.rows(10)) == 8 and ends.rows(10)[0]["share"] == 0.2


def test_texts_that_all_requests_know() -> None:
    ends = StepEnds([[1, 2], [3]])
    for _ in range(2):
        ends.begin([5])
        ends.end(0, 1, 2)
        ends.end(0, 2, 3)
    assert ends.counts == {(Cause.FOLLOWED, True): 2, (Cause.LAST_IS_NEW, True): 2}
