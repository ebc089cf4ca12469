"""How many passes of a low-bit copy pay (lpr.model.self_draft): one more while its tokens are worth its time.

A pass extends each draft by a token, which is emitted if all before it and itself are what the model chooses. It takes
its own time, and the next step evaluates a token more per sequence. With r tokens per millisecond, which steps have had
of late, passes of any kind included, it pays if the tokens that it is expected to bring exceed r times that time: so
the rate rises to the highest that a number of passes can have. Where none pays the copy rests, and tries a pass now and
then. Each rank counts its own copy's choices by its own clock: what it drafts is data, and ranks need not decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import frexp

from lpr.core.step_times import StepTimes

MOST_PASSES = 8
"""Passes after a step at most: rows of the cache and guesses of a payload have room for as many."""
NUM_OCTAVES = 16
"""Octaves of the odds of a choice that are counted apart."""
TRUSTED, MEMORY = 8.0, 400.0
"""Trials that the first estimate of an octave counts for, and most that count at all."""
FIRST_AGREEMENT = 0.9
RATE_MEMORY = 0.97
"""What a step still counts for after the next one."""
PROBE = 0.004
"""Part of all time that passes may take while none is expected to pay."""


class Passes:
    """Counts what passes take and bring, and decides on the next one."""

    def __init__(self, fixed: int | None = None, fewest: int = 0) -> None:
        """Always `fixed` passes or, by what pays, `fewest` or more."""
        self._fixed, self._fewest = fixed, fewest
        self._right = [TRUSTED * first_agreement(octave) for octave in range(NUM_OCTAVES)]
        self._tried = [TRUSTED] * NUM_OCTAVES
        self._all = [TRUSTED * FIRST_AGREEMENT, TRUSTED]
        self._pass_ms: dict[int, float] = {}
        self._times: StepTimes | None = None
        self._longest, self._idle_ms = 1, 0.0
        self._rates: dict[int, list[float]] = {}

    def begin_step(self, times: StepTimes | None, longest: int) -> None:
        """Begin a step of sequences of up to `longest` tokens; `times` are those of steps, if they are known."""
        self._times, self._longest = times, longest

    def agreement(self, share: float) -> float:
        """How often a choice of such a share (lpr.model.self_draft.Ending) was the model's."""
        octave = octave_of(share)
        return self._right[octave] / self._tried[octave]

    def worth(self, chains: Sequence[Sequence[float]]) -> bool:
        """True if one more pass over `chains` pays; they are the shares of each draft's choices so far."""
        depth, count = len(chains[0]), len(chains)
        if depth >= MOST_PASSES or self._fixed is not None:
            return self._fixed is not None and depth < min(self._fixed, MOST_PASSES)
        if depth < self._fewest or size_of(count) not in self._pass_ms and not self._pass_ms:
            return True
        expected = 0.0
        for shares in chains:
            path = self._all[0] / self._all[1]
            for share in shares:
                path *= self.agreement(share)
            expected += path
        took = self._pass_time(count)
        if self._times is not None:
            took += self._time(count * (depth + 2), count) - self._time(count * (depth + 1), count)
        tokens, ms = self._rates.get(size_of(count), (0.0, 0.0))
        if not ms:
            return True
        if expected * ms > tokens * took:
            self._idle_ms = 0.0
            return True
        if depth == 0 and self._idle_ms * PROBE > took:
            self._idle_ms = 0.0
            return True
        return False

    def count_pass(self, count: int, ms: float) -> None:
        """Count a pass over `count` drafts that took `ms` milliseconds."""
        size = size_of(count)
        known = self._pass_ms.get(size)
        if known is None:
            self._pass_ms[size] = ms
        else:  # another program makes a pass longer, and nothing makes it shorter
            self._pass_ms[size] += 0.3 * (ms - known) if ms < known else 0.05 * (min(ms, 2 * known) - known)

    def count_choices(self, shares: Sequence[float], chain: Sequence[int], emitted: Sequence[int]) -> None:
        """Count a draft `chain`, behind which the model has `emitted` tokens."""
        for share, drafted, token in zip(shares, chain, emitted, strict=False):
            is_right, octave = drafted == token, octave_of(share)
            self._tried[octave] = min(self._tried[octave] + 1, MEMORY)
            self._right[octave] += (is_right - self._right[octave] / self._tried[octave]) if self._tried[octave] == MEMORY else is_right
            keep = 1 - 1 / MEMORY if self._all[1] >= MEMORY else 1.0
            self._all = [keep * self._all[0] + is_right, keep * self._all[1] + 1]
            if not is_right:
                return

    def count_step(self, count: int, tokens: int, ms: float) -> None:
        """Count a step of `count` sequences that emitted `tokens` and took `ms` milliseconds, passes included."""
        rate = self._rates.setdefault(size_of(count), [0.0, 0.0])
        rate[:] = RATE_MEMORY * rate[0] + tokens, RATE_MEMORY * rate[1] + ms
        self._idle_ms += ms

    def _pass_time(self, count: int) -> float:
        """Milliseconds of a pass over `count` drafts; where none was made, by those nearby and the times of steps."""
        size = size_of(count)
        if size in self._pass_ms:
            return self._pass_ms[size]
        near = min(self._pass_ms, key=lambda known: abs(known.bit_length() - size.bit_length()))
        scale = self._time(count, count) / self._time(near, near) if self._times is not None else 1.0
        return self._pass_ms[near] * scale

    def _time(self, entries: int, batch: int) -> float:
        assert self._times is not None
        return self._times.time(entries, batch, self._longest)


def octave_of(share: float) -> int:
    """The octave of the odds of a share above one half; 0 for others."""
    odds = share / max(1.0 - share, 1e-9)
    return min(max(frexp(odds)[1], 0), NUM_OCTAVES - 1)


def first_agreement(octave: int) -> float:
    """The agreement before anything was counted: of odds of 2^octave."""
    return min(0.98, 0.5 + 0.08 * octave)


def size_of(count: int) -> int:
    """The next power of two: numbers of sequences that count together."""
    return 1 << (count - 1).bit_length()
