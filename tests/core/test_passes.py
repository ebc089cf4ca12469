"""How many passes of a low-bit copy are made: by what they take and bring."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from lpr.core.constants import KNOTS
from lpr.core.passes import MOST_PASSES, Agreement, Passes, octave_of
from lpr.core.step_times import StepTimes

ROW = [17.0 + 0.5 * knot for knot in KNOTS]
TIMES = StepTimes({(1, 256): ROW, (16, 256): [40.0 + 2.0 * knot for knot in KNOTS]})


def made(passes: Passes, count: int = 1, right: float = 0.97, run_of_text: float = 0.0) -> int:
    """Passes that pay for `count` drafts whose choices are right so often."""
    num_made = 0
    while passes.worth(num_made, [right**num_made] * count, count) if num_made else passes.begins([run_of_text], count):
        num_made += 1
    return num_made


def tokens_of(number: int, right: float, run_of_text: float) -> float:
    """Tokens of a step behind so many passes, where the text has a part of what they draft."""
    drafted = sum(right**depth for depth in range(1 + number))
    return max(drafted, 1 + run_of_text + 0.2 * number) if number else 1 + run_of_text


def step_ms(number: int, pass_ms: float, run_of_text: float, count: int = 1) -> float:
    return TIMES.time(round(count * (1 + number + run_of_text)), count) + pass_ms * number


def run(
    passes: Passes,
    pass_ms: float,
    count: int = 1,
    num_steps: int = 300,
    right: float = 0.97,
    run_of_text: float = 0.0,
    load: float = 1.0,
) -> list[int]:
    """The number of passes of each step of `count` drafts, on a machine where they take so long, times `load`."""
    numbers = []
    for _ in range(num_steps):
        passes.begin_step(TIMES, 100)
        number = 0
        while (
            passes.worth(number, [right**number] * count, count)
            if number
            else passes.begins([run_of_text] * count, count)
        ):
            number += 1
            passes.count_pass(count, pass_ms * load)
        numbers.append(number)
        entries = round(count * (1 + number + run_of_text))
        passes.count_step(entries, count, TIMES.time(entries, count) * load)
        ms = (TIMES.time(entries, count) + passes.pass_time(count) * number) / count
        for _ in range(count):
            passes.count_tokens(count, run_of_text, number > 0, tokens_of(number, right, run_of_text), ms)
    return numbers


def rate(number: int, pass_ms: float, right: float, run_of_text: float = 0.0, count: int = 1) -> float:
    """Tokens per millisecond of steps with so many passes."""
    return count * tokens_of(number, right, run_of_text) / step_ms(number, pass_ms, run_of_text, count)


def rate_of(numbers: list[int], pass_ms: float, right: float, run_of_text: float = 0.0, count: int = 1) -> float:
    tokens = sum(count * tokens_of(number, right, run_of_text) for number in numbers)
    return tokens / sum(step_ms(number, pass_ms, run_of_text, count) for number in numbers)


@pytest.mark.parametrize("right", [0.8, 0.9, 0.97])
@pytest.mark.parametrize("pass_ms", [2.0, 6.0, 10.0])
def test_the_number_that_brings_most_tokens_per_second_is_found(pass_ms: float, right: float) -> None:
    passes = Passes(first_ms={1: 6.0})
    passes.copy.mean = right
    found = run(passes, pass_ms, right=right)[-60:]
    best = max(range(MOST_PASSES + 1), key=lambda number: rate(number, pass_ms, right))
    assert rate_of(found, pass_ms, right) > 0.95 * rate(best, pass_ms, right)


@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("run_of_text", [0.0, 0.7, 4.0])
@pytest.mark.parametrize("pass_ms", [3.0, 8.0, 30.0])
def test_little_is_lost_anywhere(pass_ms: float, run_of_text: float, count: int) -> None:
    """Also where the text has the tokens of passes."""
    passes = Passes(first_ms={1: pass_ms})
    plain = rate(0, pass_ms, 0.95, run_of_text, count)
    numbers = run(passes, pass_ms, count, 300, 0.95, run_of_text, load=2.0)
    assert rate_of(numbers, pass_ms, 0.95, run_of_text, count) > 0.98 * plain
    assert rate_of(numbers[150:], pass_ms, 0.95, run_of_text, count) > 0.99 * plain


def test_a_wrong_first_time_is_found_out() -> None:
    assert run(Passes(first_ms={1: 30.0}), 6.0, num_steps=1500)[-1] >= 3


def test_a_busy_machine_changes_no_decision() -> None:
    """Passes and steps take longer alike; what the shortest pass took says nothing then."""
    passes = Passes(first_ms={1: 8.0})
    assert sum(run(passes, 12.0, right=0.5)[-50:]) <= 6
    assert sum(run(passes, 12.0, right=0.5, load=3.0)) <= 60
    assert run(Passes(first_ms={1: 6.0}), 6.0, num_steps=150, load=3.0)[-1] >= 3


def test_many_sequences_rest_where_one_does_not() -> None:
    passes = Passes(first_ms={1: 6.0})
    assert run(passes, 6.0)[-1] >= 3
    assert sum(run(passes, 80.0, count=16)[50:]) <= 8
    assert run(passes, 6.0, num_steps=50)[-1] >= 3


def test_dear_passes_of_several_sequences_are_known_from_the_start() -> None:
    """A pass of four took 2.4 times one of one where a step took 1.2 times: by the steps' times it looked cheap."""
    numbers = [run(Passes(first_ms=first), 18.0, count=4, num_steps=12) for first in ({1: 7.0, 4: 18.0}, {1: 7.0})]
    assert sum(numbers[0]) < sum(numbers[1])


def test_passes_that_have_become_cheap_go_on() -> None:
    passes = Passes(first_ms={1: 25.0})
    assert run(passes, 25.0)[-1] == 0
    assert run(passes, 4.0, num_steps=3000)[-1] >= 3


def test_a_fixed_number_and_a_fewest() -> None:
    assert made(Passes(fixed=3)) == 3 and made(Passes(fixed=0)) == 0 and made(Passes(fixed=99)) == MOST_PASSES
    passes = Passes(fewest=1)
    assert set(run(passes, 300.0)[1:]) == {1}


def test_without_step_times_a_pass_goes_by_the_last_step() -> None:
    passes = Passes(fewest=1, first_ms={1: 6.0})
    for _ in range(100):
        passes.count_step(1, 1, 17.0)
        passes.count_tokens(1, 0.0, True, 2, 23.0)
    assert made(passes) >= 3 and made(passes, right=0.2) == 1
    assert passes.step_time(9, 1) == 17.0


@pytest.mark.parametrize("made_so", [{}, {"fewest": 2}, {"fixed": 3}, {"fixed": 0}, {"first_ms": None}])
def test_the_rules_of_one_draft_are_those_of_each_pass(made_so: dict[str, Any]) -> None:
    passes = Passes(**{"first_ms": {1: 6.0}, **made_so})
    passes.begin_step(TIMES, 100)
    if made_so.get("first_ms", True):
        for _ in range(30):
            passes.count_pass(3, 9.0)
            passes.count_tokens(1, 0.0, True, 3, 40.0)
    passes.copy.count([0.9] * 3, [5, 6, 7], [5, 6, 8])
    by_made, by_entries, copied, text, _ = passes.rules(8)
    for made, entries, gain in product(range(MOST_PASSES), range(1, 9), (0.01, 0.2, 0.4, 0.6, 0.8, 1.0)):
        pays = made < len(by_made) and gain > by_made[made] + by_entries[entries - 1]
        assert pays == passes.worth(made, [gain], entries)
    assert copied == [passes.copy.of(1 - 1 / (1 + 0.75 * 2**octave)) for octave in range(16)] != text


def test_agreement_follows_what_was_right() -> None:
    agreement = Agreement()
    first = agreement.of(0.9)
    for _ in range(300):
        agreement.count([0.9, 0.9, 0.6], [5, 6, 7], [5, 9, 7])
    assert agreement.of(0.9) == pytest.approx(0.5, abs=0.02) and first > 0.9
    assert agreement.of(0.6) == Agreement().of(0.6), "behind a wrong choice nothing is known"
    assert 0.4 < agreement.mean < 0.65


def test_text_is_evaluated_while_it_is_likely() -> None:
    passes = Passes()
    count, path = passes.likely_text([0.95, 0.95, 0.3, 0.3])
    assert count == 3 and 0.4 < path < 0.5
    assert passes.likely_text([]) == (0, 1.0)


def test_octaves() -> None:
    assert [octave_of(share) for share in (0.0, 0.4, 0.5, 0.67, 0.9, 1.0)] == [0, 0, 1, 2, 4, 15]
