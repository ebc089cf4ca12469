"""The limit of drafting from text, and the causes of steps' ends.

*The limit*: every step copies the longest phrase that occurs in the text so far and continues it, and the model adds a
token: the parse of Lempel and Ziv (1977), with a bonus token for each phrase. A copy may overlap its source. A tree can
leave a phrase for another, so the limit is not a strict bound.

*Ends*: a step ends where the next token was not drafted. The cause shows what a better drafter would need.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

SEPARATOR = -1
"""Between texts, so that no phrase runs from one into the next."""


class Cause(StrEnum):
    """Why the next token was not drafted after the last accepted one."""

    FOLLOWED = "it had followed the last token somewhere"
    CANDIDATE = "it had been a candidate after the last token"
    LAST_IS_NEW = "the last token is new to the text"
    ELSEWHERE = "it is known, but not after the last token"
    NEW = "it is new to the text"


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
        if here >= len(tokens):
            return 0
        if self._first[int(tokens[here])] >= here:
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


LONGEST_BLOCK, LOOP = 32, 64
"""A text loops if a block of up to LONGEST_BLOCK tokens repeats over more than LOOP tokens."""


def loops(tokens: Sequence[int]) -> bool:
    """True if some block of the text repeats immediately; such a text favours copying."""
    text = np.array(tokens)
    for period in range(1, LONGEST_BLOCK + 1):
        run = 0
        for same in (text[period:] == text[:-period]).tolist():
            run = run + 1 if same else 0
            if run + period > LOOP and run >= period:
                return True
    return False


def fewest_steps(prompt: Sequence[int], completion: Sequence[int], known: Iterable[Sequence[int]] = ()) -> int:
    """Steps of the limit for `completion`: each is a longest phrase of the text so far, and one more token."""
    phrases = Phrases(known, [*prompt, *completion])
    at, end, steps = len(prompt), len(prompt) + len(completion), 0
    while at < end:
        at += phrases.longest(at) + 1
        steps += 1
    return steps


@dataclass(frozen=True)
class Counted:
    """An output: its tokens, its steps, the steps of the limit, and whether it loops."""

    num_tokens: int
    num_steps: int
    fewest_steps: int
    loops: bool


def count_output(
    prompt: Sequence[int], output: Sequence[int], num_steps: int, known: Iterable[Sequence[int]] = ()
) -> Counted:
    """An output of `num_steps` steps, where the `known` texts could be copied too."""
    return Counted(len(output), num_steps, fewest_steps(prompt, output, known), loops(output))


def figures_with_limit(outputs: Sequence[Counted]) -> dict[str, Any]:
    """Tokens per step of some outputs and of the limit, for a result file, also without outputs that loop."""
    straight = [each for each in outputs if not each.loops]
    found = {**_figures(outputs), "looping_outputs": round(1 - len(straight) / len(outputs), 4)}
    return {**found, "without_loops": _figures(straight)} if straight else found


def _figures(outputs: Sequence[Counted]) -> dict[str, Any]:
    tokens = sum(each.num_tokens for each in outputs)
    steps, fewest = sum(each.num_steps for each in outputs), sum(each.fewest_steps for each in outputs)
    return {
        "tokens_per_step": round(tokens / steps, 4),
        "limit_tokens_per_step": round(tokens / fewest, 4),
        "share_of_limit": round(fewest / steps, 4),
        "num_tokens": tokens,
        "num_steps": steps,
    }


@dataclass
class StepEnds:
    """Counts the causes of steps' ends, one request after the other."""

    known: Iterable[Sequence[int]] = ()
    """Texts that every request may copy from."""
    counts: Counter[tuple[Cause, bool]] = field(default_factory=Counter)
    """By cause, and whether the step ended at the root."""
    _followers: defaultdict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    _tokens: set[int] = field(default_factory=set)
    _last: int | None = None

    def begin(self, prompt: Sequence[int]) -> None:
        """Another request begins."""
        self._followers, self._tokens, self._last = defaultdict(set), set(), None
        for text in self.known:
            self._read(text)
            self._last = None
        self._read(prompt)

    def end(self, depth: int, last: int, came: int, candidates: Iterable[int] = ()) -> None:
        """A step ended `depth` nodes below the root, at the token `last`, where `came` was not drafted.

        `candidates` are the model's candidates after earlier occurrences of `last`, where known.
        """
        self.counts[self._cause(last, came, candidates), depth == 0] += 1

    def read(self, emitted: Sequence[int]) -> None:
        """The request's text has grown by a step."""
        self._read(emitted)

    def _cause(self, last: int, came: int, candidates: Iterable[int]) -> Cause:
        if came in self._followers.get(last, ()):
            return Cause.FOLLOWED
        if came in candidates:
            return Cause.CANDIDATE
        if last not in self._followers:
            return Cause.LAST_IS_NEW
        return Cause.ELSEWHERE if came in self._tokens else Cause.NEW

    def _read(self, tokens: Sequence[int]) -> None:
        before = [] if self._last is None else [self._last]
        for left, right in pairwise([*before, *tokens]):
            self._followers[left].add(right)
        self._tokens.update(tokens)
        if tokens:
            self._last = tokens[-1]

    def rows(self, num_steps: int) -> list[dict[str, Any]]:
        """Per cause and place, the number of steps and their share of `num_steps`, for a result file."""
        return [
            {"cause": cause.value, "at": "root" if at_root else "deeper", "steps": count,
             "share": round(count / num_steps, 4)}
            for at_root in (True, False)
            for cause in Cause
            if (count := self.counts[cause, at_root])
        ]  # fmt: skip
