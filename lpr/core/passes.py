"""How many passes of a low-bit copy pay (lpr.model.self_draft): one more while its tokens are worth its time.

A pass extends each draft by a token, which is emitted if it and all before it are what the model chooses. It takes its
own time, and the next step evaluates a token more per sequence. With r tokens per millisecond, which steps have had of
late, passes included, it pays if the tokens that it is expected to bring exceed r times that time: so the rate rises to
the highest that a number of passes can have. Where none pays the copy rests, and tries a pass now and then. Each rank
counts its own copy's choices by its own clock: what it drafts is data, and ranks need not decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, frexp

from lpr.core.step_times import StepTimes

MOST_PASSES = 8  # passes after a step at most
NUM_OCTAVES = 16  # octaves of odds above 1 that are counted apart
TRUSTED, MEMORY = 4.0, 400.0  # trials that the first estimate of an octave counts for, and most that count at all
FIRST = [round(1 / (1 + exp(-1.1 * octave)), 3) for octave in range(NUM_OCTAVES)]
"""The first estimates, as 8 bits of SmolLM2-135M have them."""
RATE_MEMORY = 0.97  # what a step still counts for after the next one
FIRST_STEPS = 4  # plain steps that count before the first one, where the times of steps are known
PROBE = 0.004  # part of all time that passes may take while none is expected to pay
EARLY_PROBES = 16
"""Passes that are tried sooner, the first one this many times as soon: what the first passes took may be wrong."""
LEAST_TEXT = 0.4  # path probability of a token of the text below which a pass does not evaluate it
FASTER, SLOWER = 0.7, 0.05
"""Weights of a pass that took less or more than those before: other programs make passes longer, none shorter."""
MOST_SURPRISE = 3.0  # most by which the first pass of a size counts for longer than others let expect
FADING = 0.995
"""What is left of the time of a pass when one did not pay by it: a disturbed one is not believed for ever."""


@dataclass
class Agreement:
    """How often proposals were right, by the octave of their odds."""

    right: list[float] = field(default_factory=lambda: [TRUSTED * first for first in FIRST])
    tried: list[float] = field(default_factory=lambda: [TRUSTED] * NUM_OCTAVES)
    mean: float = 0.95  # of all proposals of late

    def of(self, share: float) -> float:
        """The estimate for a proposal of such a share."""
        octave = octave_of(share)
        return self.right[octave] / self.tried[octave]

    def count(self, shares: Sequence[float], proposed: Sequence[int], chosen: Sequence[int]) -> None:
        """Count a chain of proposals, behind which these tokens were chosen: up to the first wrong one."""
        for share, mine, token in zip(shares, proposed, chosen, strict=False):
            octave, is_right = octave_of(share), float(mine == token)
            keep = min(1.0, (MEMORY - 1) / self.tried[octave])
            self.right[octave] = keep * self.right[octave] + is_right
            self.tried[octave] = keep * self.tried[octave] + 1
            self.mean += 0.01 * (is_right - self.mean)
            if not is_right:
                return


class Passes:
    """Counts what passes take and bring, and decides on the next one."""

    def __init__(self, fixed: int | None = None, fewest: int = 0, first_ms: float | None = None) -> None:
        """Always `fixed` passes or, by what pays, `fewest` or more; a pass of one token took `first_ms` at start."""
        self._fixed, self._fewest = fixed, fewest
        self.copy, self.text = Agreement(), Agreement()
        """Of the copy's choices with the model's, and of the text's continuations with the copy's choices."""
        self._pass_ms: dict[int, float] = {} if first_ms is None else {1: first_ms}
        self._faded: dict[int, float] = {}
        self._times: StepTimes | None = None
        self._longest, self._idle_ms, self._num_probed = 1, 0.0, 0
        self._rates: dict[int, list[float]] = {}

    def begin_step(self, times: StepTimes | None, longest: int) -> None:
        """Begin a step of sequences of up to `longest` tokens; `times` are those of steps, if they are known."""
        self._times, self._longest = times, longest

    def path(self, shares: Sequence[float]) -> float:
        """The probability that a chain of the copy's choices of these shares is right."""
        path = 1.0
        for share in shares:
            path *= self.copy.of(share)
        return path

    def likely_text(self, shares: Sequence[float]) -> tuple[int, float]:
        """How many tokens of a continuation a pass should evaluate, and the probability that all of them are right."""
        path = 1.0
        for count, share in enumerate(shares):
            further = path * self.text.of(share)
            if further < LEAST_TEXT:
                return count, path
            path = further
        return len(shares), path

    def worth(self, num_made: int, gains: Sequence[float], num_entries: int) -> bool:
        """True if one more pass pays, of `num_entries` tokens, after `num_made` passes.

        `gains` are the probabilities that each draft is right so far and needs the copy.
        """
        if num_made >= MOST_PASSES or self._fixed is not None:
            return self._fixed is not None and num_made < min(self._fixed, MOST_PASSES)
        count = len(gains)
        tokens, ms = self._rate(count)
        if num_made < self._fewest or not self._pass_ms or not ms:
            return True
        took = self._pass_time(num_entries)
        if self._times is not None:
            entries = count * (num_made + 1)
            took += self._time(entries + count, count) - self._time(entries, count)
        pays = self.copy.mean * sum(gains) * ms > tokens * took
        if pays:
            self._idle_ms = 0.0
            return True
        if not num_made:
            size = size_of(num_entries)
            self._faded[size] = FADING * self._faded.get(size, 1.0)
        share = PROBE * max(1.0, EARLY_PROBES / (1 + self._num_probed))
        if num_made or self._idle_ms * share < took:
            return False
        self._idle_ms, self._num_probed = 0.0, self._num_probed + 1
        return True

    def count_pass(self, num_entries: int, ms: float) -> None:
        """Count a pass of so many tokens that took `ms` milliseconds."""
        size = size_of(num_entries)
        if size not in self._pass_ms and self._pass_ms:
            self._pass_ms[size] = min(ms, MOST_SURPRISE * self._pass_time(size))
        self._faded.pop(size, None)
        known = self._pass_ms.setdefault(size, ms)
        self._pass_ms[size] += FASTER * (ms - known) if ms < known else SLOWER * (min(ms, 2 * known) - known)

    def count_step(self, count: int, tokens: int, ms: float) -> None:
        """Count a step of `count` sequences that emitted `tokens` and took `ms` milliseconds, passes included."""
        rate = self._rate(count)
        rate[:] = RATE_MEMORY * rate[0] + tokens, RATE_MEMORY * rate[1] + ms
        self._idle_ms += ms

    def _rate(self, count: int) -> list[float]:
        """Tokens and milliseconds of late, of about as many sequences."""
        size = size_of(count)
        if size not in self._rates:
            first = FIRST_STEPS if self._times is not None else 0
            self._rates[size] = [first * float(size), first * self._time(size, size) if first else 0.0]
        return self._rates[size]

    def _pass_time(self, num_entries: int) -> float:
        """Milliseconds of a pass, no more than a larger one takes; of a new size by others and the times of steps."""
        size = size_of(num_entries)
        larger = [ms * self._faded.get(known, 1.0) for known, ms in self._pass_ms.items() if known >= size]
        if larger:
            return min(larger)
        near = max(self._pass_ms)
        grown = self._time(size, 1) / self._time(near, 1) if self._times is not None else 1.0
        return self._pass_ms[near] * grown * self._faded.get(size, 1.0)

    def _time(self, entries: int, batch: int) -> float:
        assert self._times is not None
        return self._times.time(entries, batch, self._longest)


def octave_of(share: float) -> int:
    """The octave of the odds of a share above one half; 0 for others."""
    odds = share / max(1.0 - share, 1e-9)
    return min(max(frexp(odds)[1], 0), NUM_OCTAVES - 1)


def size_of(count: int) -> int:
    return 1 << (count - 1).bit_length()
