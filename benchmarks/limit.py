"""The limit of drafting from text.

Every step copies the longest phrase that occurs in the text so far and continues it, and the model adds a token: the
parse of Lempel and Ziv (1977), with a bonus token for each phrase. A copy may overlap its source. A tree can leave a
phrase for another, so the limit is not a strict bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

SEPARATOR = -1
"""Between texts, so that no phrase runs from one into the next."""


class Phrases:
    """Longest phrases of a text that occur before a growing position."""

    def __init__(self, known: Iterable[Sequence[int]], text: Sequence[int]) -> None:
        """Index `text`, with the `known` texts before it."""
        joined: list[int] = []
        for each in known:
            joined += [*each, SEPARATOR]
        self._begin = len(joined)
        self._tokens = np.array([*joined, *text], np.int64)
        keys = self._tokens[:-1] << 32 | self._tokens[1:]
        order = np.argsort(keys, kind="stable")
        changes = np.flatnonzero(np.diff(keys[order])) + 1
        self._by_pair = {int(keys[places[0]]): places for places in np.split(order, changes) if len(places)}
        self._first: dict[int, int] = {}
        for place, token in enumerate(self._tokens.tolist()):
            self._first.setdefault(token, place)

    def longest(self, at: int) -> int:
        """Length of the longest phrase at position `at` that also occurs at an earlier position."""
        here, tokens = self._begin + at, self._tokens
        if here >= len(tokens) or self._first[int(tokens[here])] >= here:
            return 0
        if here + 1 == len(tokens):
            return 1
        places = self._by_pair[int(tokens[here] << 32 | tokens[here + 1])]
        places = places[: np.searchsorted(places, here)]
        if not len(places):
            return 1
        length = 2
        while here + length < len(tokens):
            going_on = places[tokens[places + length] == tokens[here + length]]
            if not len(going_on):
                break
            places, length = going_on, length + 1
        return length


def fewest_steps(prompt: Sequence[int], completion: Sequence[int], known: Iterable[Sequence[int]] = ()) -> int:
    """Steps of the limit for `completion`: each is a longest phrase of the text so far, and one more token."""
    phrases = Phrases(known, [*prompt, *completion])
    at, end, steps = len(prompt), len(prompt) + len(completion), 0
    while at < end:
        at += phrases.longest(at) + 1
        steps += 1
    return steps
