"""What vLLM's steps cost by their number of tokens, from the time between two calls of a proposer.

vLLM calls its proposer once a step and waits for it, as it switches asynchronous scheduling off. So the time between
two calls is that of a step, the host's work included, if all its requests were in the step before it. A step that
computes a prompt, or before which the server had nothing to do, has a request that was not, or a row without a token.

The first steps of each batch size give a line through their times: every other one has short drafts, as nothing would
show what a shorter step takes where all have long ones. Later steps correct it (`StepTimesTracker`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lpr.core.constants import KNOTS
from lpr.core.step_times import StepTimes, StepTimesTracker, interpolate
from lpr.vllm.requests import Request

TRIED = 16
"""Measured steps of a batch size that its line is drawn through."""
SHORT = 0.3
"""What a token costs in every other one of them, as a part of a step of one token."""
REFRESH = 16
"""Later steps after which the times in use are renewed: that takes longer than a draft."""


class StepClock:
    """Times of a step by its tokens, in milliseconds where they are measured."""

    def __init__(self, token_cost: float, is_measured: bool) -> None:
        """A further token costs `token_cost` of a step of one token, until steps show otherwise if `is_measured`."""
        self._token_cost, self._is_measured = token_cost, is_measured
        self._table = StepTimes({(1, 0): _line_of(token_cost)})
        self._short = StepTimes({(1, 0): _line_of(SHORT)})
        self._tried: dict[int, list[tuple[int, float]]] = {}
        """Tokens and milliseconds of the first steps, by batch size rounded up to a power of two."""
        self._tracker: StepTimesTracker | None = None
        self._num_tracked = 0
        self._began = 0.0
        self._evaluates: Mapping[Request, int] = {}
        """The tokens that the running step evaluates of each of its requests, as far as is known."""

    def row(self, num_sequences: int) -> list[float]:
        """Times of a step of so many sequences, at `constants.KNOTS` tokens."""
        return self._table.row(num_sequences, 0)

    def token_cost(self, num_sequences: int) -> float:
        """Time of a further token of a step, up to as many as there are sequences, as a part of one without drafts."""
        row = self.row(num_sequences)
        plain = interpolate(row, num_sequences)
        return (interpolate(row, 2 * num_sequences) / plain - 1) / num_sequences

    def row_to_draft(self, num_sequences: int) -> list[float]:
        """The times by which the next step is drafted: those of `row`, or such that drafts are short."""
        number = len(self._tried.get(_size(num_sequences), ()))
        return self._short.row(1, 0) if number < TRIED and number % 2 else self.row(num_sequences)

    def begin(self, now: float, running: Sequence[Request], is_whole: bool) -> None:
        """A step has ended at `now` (seconds), which brought tokens to the `running` requests.

        It `is_whole` if every row of it got some.
        """
        began, self._began = self._began, now
        evaluated = [self._evaluates.get(request, 0) for request in running]
        if self._is_measured and is_whole and all(evaluated) and now > began:
            self._observe(sum(evaluated), len(running), 1e3 * (now - began))

    def end(self, running: Sequence[Request], drafts: Sequence[Sequence[int]]) -> None:
        """The next step evaluates these `drafts`, and a token before each."""
        self._evaluates = {request: 1 + len(draft) for request, draft in zip(running, drafts, strict=True)}

    def _observe(self, count: int, num_sequences: int, milliseconds: float) -> None:
        tried = self._tried.setdefault(_size(num_sequences), [])
        if len(tried) < TRIED:
            tried.append((count, milliseconds))
            if len(tried) == TRIED:
                known = self._tracker.table().rows if self._tracker is not None else {}
                self._table = StepTimes({**known, (_size(num_sequences), 0): line_through(tried, self._token_cost)})
                self._tracker = StepTimesTracker(self._table)
        elif self._tracker is not None:
            self._tracker.observe(count, num_sequences, 0, milliseconds)
            self._num_tracked += 1
            if self._num_tracked % REFRESH == 0:
                self._table = self._tracker.table()


def _line_of(token_cost: float) -> list[float]:
    return [1.0 + token_cost * (knot - 1) for knot in KNOTS]


def line_through(steps: Sequence[tuple[int, float]], token_cost: float) -> list[float]:
    """A line at `KNOTS` through tokens and times, by the median of the slopes between them (Theil 1950, Sen 1968).

    Slopes count by how many tokens they span. Where all steps have as many tokens, the slope is that of `token_cost`.
    """
    counts, times = np.array(steps, float).T
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


def _size(num_sequences: int) -> int:
    return 1 << (num_sequences - 1).bit_length()
