"""How many passes of a low-bit copy are made: by what they take and bring."""

from __future__ import annotations

import pytest

from lpr.core.constants import KNOTS
from lpr.core.passes import FIRST_STEPS, MOST_PASSES, Agreement, Passes, octave_of
from lpr.core.step_times import StepTimes

ROW = [17.0 + 0.5 * knot for knot in KNOTS]
TIMES = StepTimes({(1, 256): ROW, (16, 256): [40.0 + 2.0 * knot for knot in KNOTS]})


def made(passes: Passes, count: int = 1, right: float = 0.97) -> int:
    """Passes that pay for `count` drafts whose choices are right so often."""
    num_made = 0
    while passes.worth(num_made, [right**num_made] * count, count):
        num_made += 1
    return num_made


def run(passes: Passes, pass_ms: float, count: int = 1, num_steps: int = 200, right: float = 0.97) -> list[int]:
    """The number of passes of each step of `count` drafts, on a machine where they take so long."""
    numbers = []
    for _ in range(num_steps):
        passes.begin_step(TIMES, 100)
        numbers.append(made(passes, count, right))
        for _ in range(numbers[-1]):
            passes.count_pass(count, pass_ms)
        tokens = sum(right**depth for depth in range(1 + numbers[-1])) * count
        passes.count_step(count, round(tokens), TIMES.time(count * (1 + numbers[-1]), count) + pass_ms * numbers[-1])
    return numbers


def rate(num_passes: int, pass_ms: float, right: float) -> float:
    """Tokens per millisecond of one sequence with so many passes in every step."""
    return sum(right**depth for depth in range(1 + num_passes)) / (TIMES.time(1 + num_passes) + pass_ms * num_passes)


@pytest.mark.parametrize("right", [0.8, 0.9, 0.97])
@pytest.mark.parametrize("pass_ms", [2.0, 6.0, 10.0])
def test_the_number_that_brings_most_tokens_per_second_is_found(pass_ms: float, right: float) -> None:
    passes = Passes()
    passes.copy.mean = right
    found = run(passes, pass_ms, right=right)[-1]
    best = max(range(MOST_PASSES + 1), key=lambda number: rate(number, pass_ms, right))
    assert rate(found, pass_ms, right) > 0.97 * rate(best, pass_ms, right)


def test_passes_that_take_as_long_as_steps_rest_and_are_tried_now_and_then() -> None:
    numbers = run(Passes(), 20.0, num_steps=6000)
    assert sum(numbers[1000:]) > 0
    for some in (numbers[:1000], numbers[1000:]):
        took = sum(TIMES.time(1 + number) + 20.0 * number for number in some)
        tokens = sum(0.97**depth for number in some for depth in range(1 + number))
        assert tokens / took > 0.98 / TIMES.time(1)


def test_a_wrong_first_time_is_found_out() -> None:
    numbers = run(Passes(first_ms=60.0), 6.0, num_steps=250)
    assert numbers[0] == 0 and numbers[-1] >= 3


def test_many_sequences_rest_where_one_does_not() -> None:
    passes = Passes()
    assert run(passes, 6.0)[-1] >= 3
    assert sum(run(passes, 80.0, count=16)[50:]) <= 3
    assert run(passes, 6.0, num_steps=5)[-1] >= 3


def test_passes_that_have_become_cheap_go_on() -> None:
    passes = Passes()
    assert run(passes, 25.0)[-1] == 0
    assert run(passes, 4.0, num_steps=3000)[-1] >= 3


def test_a_fixed_number_and_a_fewest() -> None:
    assert made(Passes(fixed=3)) == 3 and made(Passes(fixed=0)) == 0 and made(Passes(fixed=99)) == MOST_PASSES
    passes = Passes(fewest=1)
    assert set(run(passes, 300.0)[1:]) == {1}


def test_what_needs_no_copy_gets_none() -> None:
    passes = Passes()
    run(passes, 6.0)
    assert passes.worth(0, [1.0], 1) and not passes.worth(0, [0.1], 1)


def test_a_size_whose_only_pass_was_disturbed_is_tried_again() -> None:
    passes = Passes()
    run(passes, 6.0)
    passes.count_pass(2, 500.0)
    passes.begin_step(TIMES, 100)
    assert any(passes.worth(0, [1.0], 2) for _ in range(200))


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
    assert FIRST_STEPS > 0
