"""What other ranks do in the same step, and so what a rank's own tree really costs.

Ranks of an engine step together, and a step lasts as long as its busiest rank. So nodes below what another rank is
busy with anyway cost nothing, and nodes beyond it make the requests of all ranks wait. Which is the case is not known
when trees are drafted, but what the others evaluate now besides trees is (prompts, pending chains), and how large their
trees were of late. With X the load of the busiest other rank, a tree is to bring most tokens of *all* requests per
millisecond of E[t(max(n, X))], where X is as likely each of the last few it would have been.

Where all ranks are alike this leads to the same sizes as if each were alone: one of R that is the busiest with
probability 1 / R pays R times the price. Where they are not, a rank with poor drafts uses the time that others need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lpr.core.step_times import KNOTS, times_at

MEMORY = 8
"""Steps whose trees say how large those of the next one may be."""

PART = 0.5
"""Of the others' trees, what is counted on. Each rank may grow as far as the others have, so with all of it trees never
shrink again: 0.65 and less are stable, and 0.35 to 0.65 alike within 2 % (dev/LOG.md)."""


class Rows(Protocol):
    """What a budget asks of a table of step times."""

    def row(self, batch: int, kv: int) -> list[float]:
        """Milliseconds at each of KNOTS (StepTimes.row)."""
        ...


class TimesBeside:
    """Step times of a rank's tokens beside those of others, as `StepTimes.row` gives them."""

    def __init__(self, table: Rows, own: int, others: Sequence[float]) -> None:
        """Times of `table`, with `own` tokens that the rank evaluates anyway and the `others`' possible loads."""
        self._table, self._own, self._others = table, own, others
        self._found: dict[tuple[int, int], list[float]] = {}

    def row(self, batch: int, kv: int) -> list[float]:
        """Expected milliseconds at each of KNOTS, ascending."""
        key = batch, kv
        if key not in self._found:
            row = np.array(self._table.row(*key))
            others = np.array(self._others or [0.0])
            loads = np.maximum(np.array(KNOTS, float) + self._own, others[:, None])
            self._found[key] = (times_at(loads, row).sum(0) / len(others)).tolist()
        return self._found[key]


@dataclass(frozen=True)
class Work:
    """What is known of a step before it is drafted."""

    served: Sequence[int]
    """Per rank, the requests that it drafts for."""
    pending: Sequence[int]
    """Per rank, the tokens of these requests that it evaluates besides their trees."""
    fills: Sequence[int]
    """Per rank, the tokens that it fills of chains longer than a tree."""


class Beside:
    """What the ranks' trees were like in the last steps; alike on all ranks."""

    def __init__(self, num_ranks: int) -> None:
        """No step yet."""
        self._recent: list[deque[float]] = [deque(maxlen=MEMORY) for _ in range(num_ranks)]
        """Per rank, the nodes per request that it has evaluated."""

    def observe(self, work: Work, loads: Sequence[int]) -> None:
        """Take in the tokens that ranks have evaluated in a step, without what they filled."""
        for recent, load, pending, served in zip(self._recent, loads, work.pending, work.served, strict=True):
            if served:
                recent.append((load - pending) / served)

    def others(self, work: Work, homes: Sequence[int]) -> list[float]:
        """What the busiest rank outside `homes` may evaluate in a step, each as likely; none if nobody else works."""
        found = [0.0] * MEMORY
        for rank, recent in enumerate(self._recent):
            if rank in homes:
                continue
            served, known = work.served[rank], work.pending[rank] + work.fills[rank]
            for at in range(MEMORY):
                nodes = PART * recent[at % len(recent)] * served if served and recent else 0.0
                found[at] = max(found[at], known + nodes)
        return found if any(found) else []
