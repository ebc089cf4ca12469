"""Decides when a prediction head guesses, and how far: only while steps with guesses give more tokens per millisecond.

The number of accepted guesses does not show their benefit, because the text might have proposed the same tokens. So
steps with guesses and steps without are tried in turn: the faster kind is used, and the other one is tried again, ever
more rarely. Each rank decides for its own head by its own clock: guesses are gathered, so ranks need not agree. A
resting head processes the text late, many tokens at a time, so that it can resume at any step.
"""

from __future__ import annotations

from collections.abc import Sequence

from lpr.engine.outcomes import Outcome
from lpr.model.runner import TreeModel

TRIAL = 16  # steps of a trial
FIRST_STAY, LONGEST_STAY = 64, 1024
"""Steps until the slower kind is tried again; doubled after each lost trial, up to LONGEST_STAY."""
MEMORY = 0.98  # decay per step of the counts of a kind of step
FOLLOWED = 0.5  # part of the right guesses that have a right successor among the guesses


class Pace:
    """Compares steps with guesses and steps without."""

    def __init__(self) -> None:
        self.rests = False  # True while the head guesses nothing
        self._left, self._stay, self._is_trial = TRIAL, FIRST_STAY, True
        self._counts = {False: [0.0, 0.0], True: [0.0, 0.0]}  # tokens and milliseconds of steps, by `rests`

    def least(self, forward_ms: float) -> float:
        """The least sum of path probabilities for which another forward of the head, of `forward_ms`, pays."""
        tokens, ms = self._counts[False]
        return forward_ms * tokens / (FOLLOWED * ms) if ms else 0.0

    def steer(self, model: TreeModel, outcomes: Sequence[Outcome], ms: float) -> None:
        """Count a step of `ms` milliseconds, and tell the head of `model` whether and how far to guess."""
        self.observe(outcomes, ms)
        model.rests = self.rests
        if model.guesser is not None:
            model.guesser.least = self.least(model.guesser.forward_ms)

    def observe(self, outcomes: Sequence[Outcome], ms: float) -> None:
        """Count a step of `ms` milliseconds."""
        counts = self._counts[self.rests]
        counts[0] = MEMORY * counts[0] + sum(len(outcome.concluded.emitted) for outcome in outcomes)
        counts[1] = MEMORY * counts[1] + ms
        self._left -= 1
        if self._left > 0:
            return
        other = not self.rests
        if not self._is_trial or not self._counts[other][1]:
            self.rests, self._left, self._is_trial = other, TRIAL, True
            return
        is_faster = self._rate(self.rests) > self._rate(other)
        if not is_faster:
            self.rests = other
        self._stay = FIRST_STAY if is_faster else min(2 * self._stay, LONGEST_STAY)
        self._left, self._is_trial = self._stay, False

    def _rate(self, rests: bool) -> float:
        tokens, ms = self._counts[rests]
        return tokens / ms
