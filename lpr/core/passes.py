"""The number of passes of a low-bit copy that pay (lpr.model.self_draft).

A pass extends each draft by a token, which is emitted if it and all before it are what the model chooses. Where the
text repeats, it has proposed that token as well: so steps with passes and steps without are counted apart, by how far
the text is expected to continue. The kind of step with more tokens per millisecond is taken; the other is tried for a
small part of the time. A further pass pays if its expected tokens exceed the recent rate times its milliseconds.

Times are those of step times (lpr.core.step_times), and a pass counts by its relation to the steps around it: on a
busy machine both take longer. Each rank counts its own copy's choices by its own clock: what it drafts is data, and
ranks need not decide alike.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, frexp, inf

from lpr.core.step_times import StepTimes

MOST_PASSES = 8  # passes after a step at most
NUM_OCTAVES = 16  # octaves of odds above 1 that are counted apart
TRUSTED, MEMORY = 4.0, 400.0  # trials that the first estimate of an octave counts for, and most that count at all
FIRST = [round(1 / (1 + exp(-1.1 * octave)), 3) for octave in range(NUM_OCTAVES)]
"""The first estimates, as 8 bits of SmolLM2-135M have them."""
RATE_MEMORY = 0.98  # what a step still counts for after the next one
EXPLORED = 0.008  # part of all time that what seems worse may cost
SURE = 64.0
"""Steps of a way after which it is tried no more, unless the other one has had as many times as many."""
LEAST_TEXT = 0.4  # path probability of a token of the text below which a pass does not evaluate it
RUNS = (0.3, 1.0, 2.5, 5.0)  # tokens that the text is expected to bring: borders of kinds that are counted apart
FIRST_RUNS = (0.1, 0.6, 1.6, 3.5, 6.0)  # those of each kind before any step is counted
FIRST_DRAFTED, FIRST_WEIGHT = 2.5, 3.0  # tokens that passes add, as first believed, and steps that beliefs count for
MOST_STEPS = 50.0  # steps of a kind that count at most
PASS_WEIGHT, LOAD_WEIGHT = 0.05, 0.1
"""Weight of the latest pass of a size, unless it is one of the first, and of the latest step."""
MOST_SURPRISE = 3.0  # most by which a pass or a step counts for longer than those before


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

    def estimates(self) -> list[float]:
        """The estimates of all octaves."""
        return [right / tried for right, tried in zip(self.right, self.tried, strict=True)]

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


@dataclass
class Way:
    """What steps of one kind have brought that begin with passes, or without: per sequence."""

    tokens: float
    ms: float
    weight: float = FIRST_WEIGHT
    num_steps: int = 0

    def count(self, tokens: float, ms: float) -> None:
        """Count a sequence's part of a step."""
        self.num_steps += 1
        self.weight = min(self.weight + 1.0, MOST_STEPS)
        self.tokens += (tokens - self.tokens) / self.weight
        self.ms += (ms - self.ms) / self.weight


class Passes:
    """Counts what passes take and bring, and decides on the next one."""

    def __init__(self, fixed: int | None = None, fewest: int = 0, first_ms: Mapping[int, float] | None = None) -> None:
        """Always `fixed` passes or, by what pays, `fewest` or more; `first_ms` are the times at start, by tokens."""
        self._fixed, self._fewest = fixed, fewest
        self.copy, self.text = Agreement(), Agreement()
        """Of the copy's choices with the model's, and of the text's continuations with the copy's choices."""
        self._pass_ms = dict(first_ms or {})  # milliseconds of a pass by its size, a power of two
        self._num_timed: dict[int, int] = {}
        self._times: StepTimes | None = None
        self._longest, self._load, self._allowed, self._own_ms = 1, 1.0, 0.0, 0.0
        self._ways: dict[tuple[int, int, bool], Way] = {}
        self._rates: dict[int, list[float]] = {}

    @property
    def is_fixed(self) -> bool:
        """True if the number of passes is given."""
        return self._fixed is not None

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

    def begins(self, runs: Sequence[float], num_entries: int) -> bool:
        """True if a first pass of `num_entries` tokens is made for drafts behind which the text is so long."""
        if self._fixed is not None:
            return self._fixed > 0
        if self._fewest or self._times is None or not self._pass_ms:
            return True
        count = len(runs)
        ways = [[self._way(count, run, drafts) for run in runs] for drafts in (False, True)]
        tokens, ms = self._rate(count)
        gains = [sum([way.tokens * ms - way.ms * tokens for way in each]) / ms for each in ways]
        better = gains[1] > gains[0]
        tried = [min([way.num_steps for way in each]) for each in ways]
        lost = abs(gains[1] - gains[0]) * ms / tokens
        if tried[not better] < max(SURE, tried[better] / SURE) and lost <= self._allowed:
            self._allowed -= lost
            return not better
        return better

    def worth(self, num_made: int, gains: Sequence[float], num_entries: int) -> bool:
        """True if one more pass pays, of `num_entries` tokens, after `num_made` passes.

        `gains` are the probabilities that each draft is right so far and needs the copy.
        """
        least, price = self._needed(num_made, len(gains))
        return sum(gains) > least + (price * self.pass_time(num_entries) if price else 0.0)

    def rules(self, most_entries: int) -> tuple[list[float], list[float], list[float], list[float], float]:
        """The thresholds of `worth` for one sequence, for native/draft_passes.h.

        A pass pays if its gain exceeds the sum of the first two: by passes made, and by entries of the pass. Then the
        estimates of the copy and of the text per octave, and LEAST_TEXT.
        """
        needed = [self._needed(made, 1) for made in range(MOST_PASSES)]
        price = max([price for _, price in needed])
        by_entries = [price * self.pass_time(1 + text) if price else 0.0 for text in range(most_entries)]
        by_made = [least for least, _ in needed if least < inf]
        return by_made, by_entries, self.copy.estimates(), self.text.estimates(), LEAST_TEXT

    def _needed(self, num_made: int, count: int) -> tuple[float, float]:
        """What the gains of one more pass for `count` drafts must exceed: a constant, and a part per millisecond."""
        if num_made >= (MOST_PASSES if self._fixed is None else min(self._fixed, MOST_PASSES)):
            return inf, 0.0
        if self._fixed is not None or num_made < self._fewest or not self._pass_ms or not self._rate(count)[1]:
            return -inf, 0.0
        price = self._price(count)
        return price * self._longer_ms(num_made, count), price

    def _price(self, count: int) -> float:
        """Accepted tokens that a millisecond must add: the recent rate over the recent agreement."""
        tokens, ms = self._rate(count)
        return tokens / (ms * self.copy.mean)

    def _longer_ms(self, num_made: int, count: int) -> float:
        """Milliseconds that the tokens of one more pass add to the next step."""
        entries = count * (num_made + 1)
        return self.step_time(entries + count, count) - self.step_time(entries, count)

    def count_pass(self, num_entries: int, ms: float) -> None:
        """Count a pass of so many tokens that took `ms` milliseconds."""
        size = size_of(num_entries)
        ms /= self._load
        known = self.pass_time(num_entries) if self._pass_ms else ms
        number = self._num_timed[size] = self._num_timed.get(size, 0) + 1
        weight = max(PASS_WEIGHT, 1.0 / (1 + number))
        self._pass_ms[size] = known + weight * (min(ms, MOST_SURPRISE * known) - known)

    def count_step(self, entries: int, count: int, ms: float) -> None:
        """Count a step of `count` sequences and `entries` tokens that took `ms` milliseconds without its passes."""
        self._own_ms = ms
        self._allowed = min(self._allowed + EXPLORED * ms / self._load, 4 * ms)
        if self._times is not None:
            load = min(max(ms / self.step_time(entries, count), 1 / MOST_SURPRISE), MOST_SURPRISE)
            self._load += LOAD_WEIGHT * (load - self._load)

    def count_tokens(self, count: int, run: float, drafted: bool, tokens: float, ms: float) -> None:
        """Count what a step of `count` sequences has brought one of them in its part of the time, passes included.

        `run` is what the text was expected to bring, and `drafted` is true if passes were made.
        """
        self._way(count, run, drafted).count(tokens, ms)
        rate, memory = self._rate(count), RATE_MEMORY ** (1 / count)
        rate[:] = memory * rate[0] + tokens, memory * rate[1] + ms

    def _way(self, count: int, run: float, drafted: bool) -> Way:
        kind, size = bisect(RUNS, run), size_of(count)
        key = size, kind, drafted
        if key not in self._ways:
            first = FIRST_RUNS[kind]
            entries, tokens = 1.0 + 2.0 * first, 1.0 + first
            if drafted:
                entries, tokens = entries + FIRST_DRAFTED, tokens + FIRST_DRAFTED
            ms = self.step_time(round(entries * size), size) / size
            self._ways[key] = Way(tokens, ms + (3 * self.pass_time(size) / size if drafted and self._pass_ms else 0.0))
        return self._ways[key]

    def _rate(self, count: int) -> list[float]:
        """Tokens and milliseconds of late of a sequence among about as many."""
        size = size_of(count)
        if size not in self._rates:
            first = self._way(size, 0.0, False)
            self._rates[size] = [4.0 * first.tokens, 4.0 * first.ms]
        return self._rates[size]

    def pass_time(self, num_entries: int) -> float:
        """Milliseconds of a pass, no more than a larger one takes; of a new size by others and the times of steps."""
        size = size_of(num_entries)
        larger = [ms for known, ms in self._pass_ms.items() if known >= size]
        if larger:
            return min(larger)
        near = max(self._pass_ms)
        return self._pass_ms[near] * max(1.0, self.step_time(size, 1) / max(self.step_time(near, 1), 1e-9))

    def step_time(self, entries: int, count: int) -> float:
        """Milliseconds of a step of `count` sequences without passes; without step times those of the last one."""
        return self._times.time(entries, count, self._longest) if self._times is not None else self._own_ms


def octave_of(share: float) -> int:
    """The octave of the odds of a share above one half; 0 for others."""
    odds = share / max(1.0 - share, 1e-9)
    return min(max(frexp(odds)[1], 0), NUM_OCTAVES - 1)


def size_of(count: int) -> int:
    return 1 << (count - 1).bit_length()
