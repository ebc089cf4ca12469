"""Times of vLLM's steps by their number of tokens, measured between two calls of a proposer.

vLLM calls its proposer once per step and waits for it, because async scheduling is off. So the time between two calls
is that of a step, including the host's work, if all its requests were in the previous step. This excludes steps that
compute a prompt and steps after an idle period: they have a new request or a row without a token.

The first steps of each batch size give a line through the times of steps with drafts, and the relative time of steps
without drafts: vLLM does more work if there are tokens to verify. Some of these trial steps have few drafts or none, so
that their times are measured too. Later steps correct the line (`StepTimesTracker`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lpr.core.constants import KNOTS
from lpr.core.step_times import MOST_SURPRISE, StepTimes, StepTimesTracker, interpolate
from lpr.vllm.requests import Request

NONE, FEW = 1e6, 0.3  # token costs that suppress all or most drafts, relative to a step of one token
TRIALS = (None, FEW, None, NONE) * 4
"""Token costs in the first measured steps of a batch size; None: the current estimate."""
MOST_SHORTENED = 2 * len(TRIALS)
"""Most drafts shortened for trials: if every step computes a prompt, none of them is measured."""
REFRESH = 16  # steps between updates of the times in use, because an update takes longer than a draft
PLAIN_MEMORY = 0.1  # weight of the latest step without drafts in the mean of such steps


class Step(NamedTuple):
    num_tokens: int
    num_sequences: int
    milliseconds: float

    @property
    def is_plain(self) -> bool:
        return self.num_tokens == self.num_sequences


@dataclass
class BatchSize:
    """The measurements of a batch size, rounded up to a power of two."""

    trials: list[Step] = field(default_factory=list)
    num_shortened: int = 0
    plain_log: float = 0.0  # log of the time of a step without drafts, relative to one with drafts and as many tokens


class StepClock:
    """Times of a step by its tokens, in milliseconds where they are measured."""

    def __init__(self, token_cost: float, is_measured: bool) -> None:
        """`token_cost` is the time of a further token relative to a step of one token; updated if `is_measured`."""
        self._token_cost, self._is_measured = token_cost, is_measured
        self._table = StepTimes({(1, 0): _line_of(token_cost)})
        self._sizes: dict[int, BatchSize] = {}
        self._tracker: StepTimesTracker | None = None
        self._num_tracked = 0
        self._began = 0.0
        self._evaluates: Mapping[Request, int] = {}
        """Per request, the number of tokens that the running step evaluates, if known."""

    def row(self, num_sequences: int) -> list[float]:
        """Times of a step of `num_sequences` sequences with drafts, at `constants.KNOTS` tokens."""
        return self._table.row(num_sequences, 0)

    def plain_part(self, num_sequences: int) -> float:
        """Time of a step without drafts, relative to `row` at as many tokens."""
        return math.exp(min(0.0, self._size(num_sequences).plain_log))

    def to_draft(self, num_sequences: int) -> tuple[list[float], float]:
        """The row and the plain part for the next step's drafts: the current estimates, or those of a trial."""
        size = self._size(num_sequences)
        number = len(size.trials)
        cost = TRIALS[number] if number < len(TRIALS) and size.num_shortened < MOST_SHORTENED else None
        if cost is None:
            return self.row(num_sequences), self.plain_part(num_sequences)
        size.num_shortened += 1
        return _line_of(cost), 1.0

    def token_cost(self, num_sequences: int) -> float:
        """Mean time of a further token, up to one per sequence, relative to a step without drafts."""
        row = self.row(num_sequences)
        plain = interpolate(row, num_sequences) * self.plain_part(num_sequences)
        return (interpolate(row, 2 * num_sequences) / plain - 1) / num_sequences

    def begin(self, now: float, running: Sequence[Request], is_whole: bool) -> None:
        """A step has ended at `now` (seconds) with tokens for the `running` requests; for all rows if it `is_whole`."""
        began, self._began = self._began, now
        evaluated = [self._evaluates.get(request, 0) for request in running]
        if self._is_measured and is_whole and all(evaluated) and now > began:
            self._observe(Step(sum(evaluated), len(running), 1e3 * (now - began)))

    def end(self, running: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        """The next step evaluates these `drafts`, and a token before each."""
        self._evaluates = {request: 1 + len(draft) for request, draft in zip(running, drafts, strict=True)}

    def _size(self, num_sequences: int) -> BatchSize:
        return self._sizes.setdefault(_rounded(num_sequences), BatchSize())

    def _observe(self, step: Step) -> None:
        size = self._size(step.num_sequences)
        if len(size.trials) < len(TRIALS):
            size.trials.append(step)
            if len(size.trials) == len(TRIALS):
                self._learn(size)
        elif step.is_plain:
            off = self._off(step) - size.plain_log
            size.plain_log += PLAIN_MEMORY * min(max(off, -MOST_SURPRISE), MOST_SURPRISE)
        elif self._tracker is not None:
            self._tracker.observe(step.num_tokens, step.num_sequences, 0, step.milliseconds)
            self._num_tracked += 1
            if self._num_tracked % REFRESH == 0:
                self._table = self._tracker.table()

    def _learn(self, size: BatchSize) -> None:
        """Draw the line of a batch size whose trials are complete."""
        plain = [step for step in size.trials if step.is_plain]
        drafted = [step for step in size.trials if not step.is_plain]
        known = self._tracker.table().rows if self._tracker is not None else {}
        key = _rounded(size.trials[0].num_sequences), 0
        self._table = StepTimes({**known, key: line_through(drafted or plain, self._token_cost)})
        self._tracker = StepTimesTracker(self._table)
        if plain and drafted:
            size.plain_log = float(np.median([self._off(step) for step in plain]))

    def _off(self, step: Step) -> float:
        return math.log(step.milliseconds / interpolate(self.row(step.num_sequences), step.num_tokens))


def _rounded(num_sequences: int) -> int:
    return 1 << (num_sequences - 1).bit_length()


def _line_of(token_cost: float) -> list[float]:
    return [1.0 + token_cost * (knot - 1) for knot in KNOTS]


def line_through(steps: Sequence[Step], token_cost: float) -> list[float]:
    """A line at `KNOTS` through tokens and times, by the median of the slopes between them (Theil 1950, Sen 1968).

    Slopes are weighted by the tokens that they span. If all steps have equally many tokens, `token_cost` is the slope.
    """
    counts = np.array([step.num_tokens for step in steps], float)
    times = np.array([step.milliseconds for step in steps])
    before, after = np.triu_indices(len(counts), 1)
    spans = counts[after] - counts[before]
    before, after, spans = before[spans != 0], after[spans != 0], spans[spans != 0]
    if len(spans):
        slopes = (times[after] - times[before]) / spans
        order = np.argsort(slopes)
        weights = np.abs(spans[order]).cumsum()
        slope = max(0.0, float(slopes[order][np.searchsorted(weights, weights[-1] / 2)]))
    else:
        slope = token_cost * float(np.median(times / (1.0 + token_cost * (counts - 1.0))))
    level = max(float(np.median(times - slope * counts)), 0.01 * float(np.median(times)))
    return [level + slope * knot for knot in KNOTS]
