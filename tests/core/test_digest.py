"""Digests: equal numbers in equal order, however they come in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lpr.core.digest import Digest, digest_of

WORDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=12)


def digest(*parts: list[int]) -> int:
    found = Digest()
    for part in parts:
        found.update(part)
    return found.value


@given(WORDS, WORDS)
def test_parts_are_their_whole_and_another_number_shows(first: list[int], second: list[int]) -> None:
    whole = first + second
    assert digest(first, second) == digest(whole) < 2**64
    for place in range(len(whole)):
        assert digest([*whole[:place], whole[place] ^ 1, *whole[place + 1 :]]) != digest(whole)


def test_order_shows_and_signs_are_those_of_64_bits() -> None:
    assert digest([3, 4]) != digest([4, 3])
    assert digest([-1]) == digest([2**64 - 1])


def test_a_string_has_the_same_digest_in_every_process() -> None:
    """Python's own hash has another seed in each."""
    assert digest_of("lpr") == 4209355692048833491 != digest_of("lp r")
