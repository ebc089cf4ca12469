"""What drafted tokens are said to be worth, and what they turn out to be worth."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lpr.config import DecodeConfig
from lpr.core.calibration import Calibration, cell_within, first_cell
from lpr.core.constants import CELL_MEMORY, NUM_KINDS, NUM_STAGES, RECENT_STAGE, SEVERAL
from lpr.core.drafting import Drafter
from lpr.core.tree import Source, TokenTree

OWN, SHARED = int(Source.TRIE), int(Source.SHARED_TRIE)


def numbers(seed: int) -> Iterator[int]:
    """Pseudo-random whole numbers below 65536, the same everywhere."""
    while True:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield seed >> 48


def phrases(seed: int, num_phrases: int) -> list[int]:
    """Some 600 tokens of phrases of 3 to 12 tokens, some of which come more often than others."""
    source = numbers(seed)
    known = [[next(source) % 200 for _ in range(3 + next(source) % 10)] for _ in range(num_phrases)]
    text: list[int] = []
    while len(text) < 600:
        text += known[min(next(source) % num_phrases, next(source) % num_phrases)]
    return text


def replay(drafter: Drafter, prompt: list[int], text: list[int], budget: int = 32) -> tuple[float, int, int]:
    """Decode `text` greedily; what was expected to be accepted, what was, and the number of steps."""
    drafter.observe(prompt)
    root, done, expected, accepted, steps = prompt[-1], 0, 0.0, 0, 0
    while done < len(text) - 1:
        tree = TokenTree(root)
        expected += sum(drafter.draft(tree, budget)[1:])
        path = [0]
        while done < len(text) - 1 and (child := tree.children[path[-1]].get(text[done])) is not None:
            path.append(child)
            done += 1
        root = text[done]
        done += 1
        drafter.learn(tree, path)
        drafter.observe([*(tree.tokens[node] for node in path[1:]), root])
        accepted += len(path) - 1
        steps += 1
    return expected, accepted, steps


def drafter_with(calibration: Calibration) -> Drafter:
    drafter = Drafter(DecodeConfig(window_size=0, trie_nodes=32).resolved())
    drafter.calibration = calibration
    return drafter


@pytest.mark.parametrize("num_phrases", [15, 40])
def test_the_probabilities_say_how_many_tokens_are_accepted(num_phrases):
    calibration, expected, accepted = Calibration(), 0.0, 0
    for seed in range(12):
        text = phrases(seed, num_phrases)
        outcome = replay(drafter_with(calibration), text[:120], text[120:])
        if seed > 1:
            expected, accepted = expected + outcome[0], accepted + outcome[1]
    assert accepted > 2000
    assert expected == pytest.approx(accepted, rel=0.12)


@pytest.mark.slow
def test_a_calibration_that_starts_wrong_comes_nearer_by_what_is_accepted():
    wrong = Calibration()
    for cell, frequency in enumerate(wrong.frequencies):
        wrong.frequencies[cell] = frequency**3
    ratios = []
    for seed in range(12):
        text = phrases(seed, 40)
        expected, accepted, _ = replay(drafter_with(wrong), text[:120], text[120:])
        ratios.append(expected / accepted)
    assert max(ratios[:2]) < 0.4
    assert sum(ratios[-4:]) / 4 > 1.2 * sum(ratios[:2]) / 2


@pytest.mark.parametrize("is_sampled", [False, True])
def test_shipped_frequencies_are_probabilities_that_grow_with_the_score(is_sampled):
    frequencies = Calibration(is_sampled).frequencies
    for stage in range(NUM_STAGES):
        for depth in (0, 1, 2, 6, 16, 60):
            for kind in range(2 * SEVERAL + 1):
                first = first_cell(stage, depth)
                row = [frequencies[first + cell_within(kind, 2.0**octave)] for octave in range(-20, 20)]
                assert row[0] > 0 and row[-1] <= 1 and row == sorted(row)


def test_a_cell_is_shared_by_one_stage_depth_and_kind_only():
    cells = {
        first_cell(stage, depth) + cell_within(kind, odds)
        for stage in range(NUM_STAGES)
        for depth in (0, 1, 3, 9, 99)
        for kind in range(2 * SEVERAL + 1)
        for odds in (0.0, 2.0**-30, 0.3, 0.7, 3.0, 2.0**30)
    }
    assert len(cells) == NUM_STAGES * 5 * NUM_KINDS * 5  # odds of 0 and of 0.7 share an octave
    assert cells <= set(range(len(Calibration().frequencies)))


def observed(path: list[int], cells: list[int]) -> tuple[Calibration, Calibration]:
    """Calibrations before and after a step on a root with children 1, 2, 3, where 4 and 5 are children of 1."""
    tree = TokenTree(7)
    for parent, token in [(0, 10), (0, 11), (0, 12), (1, 13), (1, 14)]:
        tree.add(parent, token, Source.TRIE)
    after = Calibration()
    after.observe(tree, path, cells)
    return Calibration(), after


def test_only_children_of_accepted_nodes_count():
    first, second, third = (first_cell(0, 0) + cell_within(OWN, odds) for odds in (4.0, 1.0, 0.1))
    below = first_cell(0, 1) + cell_within(OWN, 4.0)
    before, after = observed([0, 2], [-1, first, second, third, below, below])
    assert after.frequencies[second] > before.frequencies[second]
    assert after.frequencies[first] < before.frequencies[first]
    assert after.frequencies[third] < before.frequencies[third]
    assert after.frequencies[below] == before.frequencies[below]
    before, after = observed([0, 1], [-1, first, second, third, below, below])
    assert after.frequencies[below] < before.frequencies[below]
    assert after.trials[below] == before.trials[below] + 2


def test_a_later_stage_than_the_right_one_was_not_asked():
    early, late = (first_cell(stage, 0) + cell_within(OWN, 1.0) for stage in (0, 1))
    before, after = observed([0, 1], [-1, early, late, late, -1, -1])
    assert after.frequencies[late] == before.frequencies[late]
    before, after = observed([0, 2], [-1, early, late, late, -1, -1])
    assert after.frequencies[early] < before.frequencies[early]
    assert after.trials[late] == before.trials[late] + 2


def test_a_right_node_that_no_source_proposed_makes_all_others_wrong():
    early, late = (first_cell(stage, 0) + cell_within(OWN, 1.0) for stage in (0, RECENT_STAGE))
    before, after = observed([0, 3], [-1, early, late, -1, -1, -1])
    assert after.frequencies[early] < before.frequencies[early]
    assert after.frequencies[late] < before.frequencies[late]


def test_frequencies_stay_within_bounds_and_forget():
    cell = first_cell(0, 0) + cell_within(SHARED, 1.0)
    tree = TokenTree(7)
    tree.add(0, 10, Source.SHARED_TRIE)
    calibration = Calibration()
    for path in ([0], [0, 1]):
        for _ in range(10 * int(CELL_MEMORY)):
            calibration.observe(tree, path, [-1, cell])
        assert 0 < calibration.frequencies[cell] <= 1
        assert calibration.frequencies[cell] == pytest.approx(len(path) - 1, abs=1e-3)
    assert calibration.trials[cell] == CELL_MEMORY


def test_the_digest_covers_what_was_observed():
    cells = [-1, *[first_cell(0, 0) + cell_within(OWN, odds) for odds in (4.0, 1.0, 0.1)], -1, -1]
    one, same, other = observed([0, 1], cells)[1], observed([0, 1], cells)[1], observed([0, 2], cells)[1]
    assert one.digest == same.digest != other.digest
    drifted = Calibration()
    drifted.frequencies[cells[1]] += 1e-12
    tree = TokenTree(7)
    for token in (10, 11, 12):
        tree.add(0, token, Source.TRIE)
    drifted.observe(tree, [0, 1], cells)
    assert drifted.digest != one.digest
