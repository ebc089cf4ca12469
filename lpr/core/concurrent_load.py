"""The load of other ranks in the same step, which decides what a rank's own tree really costs.

Ranks of an engine step together, and a step lasts as long as its busiest rank. So nodes below the load of another rank
cost nothing, and nodes beyond it make the requests of all ranks wait. The other loads are not known when trees are
drafted, except for what is evaluated besides trees (prompts, pending chains) and for how large the trees were in the
last steps. With X the load of the busiest other rank, a tree is to bring most tokens of *all* requests per millisecond
of E[t(max(n, X))], where each of the last few values of X is equally likely.

Where all ranks are alike this leads to the sizes that each would choose alone: one of R that is the busiest with
probability 1 / R pays R times the price. Where they are not, a rank with poor drafts uses the time that others need.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lpr.core.constants import KNOTS
from lpr.core.step_times import times_at

MEMORY = 8  # steps whose trees predict those of the next one

PART = 0.5
"""Part of the others' trees that counts. Each rank may grow as far as the others have, so with all of it trees never
shrink again: 0.65 and less are stable, and 0.35 to 0.65 alike within 2 % (dev/LOG.md)."""


def times_under_load(times: Sequence[float], own: int, others: Sequence[float]) -> list[float]:
    """Expected milliseconds at `KNOTS` of a rank's tokens, ascending, by those of a step of the rank alone.

    `own` are the tokens that the rank evaluates in any case, `others` the equally likely loads of the busiest other
    rank.
    """
    loads = np.maximum(np.array(KNOTS, float) + own, np.array(others or [0.0])[:, None])
    expected: list[float] = (times_at(loads, np.array(times)).sum(0) / len(loads)).tolist()
    return expected


@dataclass(frozen=True)
class Work:
    """What is known of a step before it is drafted."""

    served: Sequence[int]  # per rank, the requests that it drafts for
    pending: Sequence[int]  # per rank, the tokens of these requests that it evaluates besides their trees
    fills: Sequence[int]  # per rank, the tokens that it fills of chains longer than a tree


class ConcurrentLoad:
    """The size of the ranks' trees in the last steps; alike on all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._recent: list[deque[float]] = [deque(maxlen=MEMORY) for _ in range(num_ranks)]
        """Per rank, the nodes per request that it has evaluated."""

    def observe(self, work: Work, loads: Sequence[int]) -> None:
        """Take in the tokens that ranks have evaluated in a step, without those that they filled."""
        for recent, load, pending, served in zip(self._recent, loads, work.pending, work.served, strict=True):
            if served:
                recent.append((load - pending) / served)

    def others(self, work: Work, homes: Sequence[int]) -> list[float]:
        """Equally likely loads of the busiest rank outside `homes`; empty if no other rank works."""
        found = [0.0] * MEMORY
        for rank, recent in enumerate(self._recent):
            if rank in homes:
                continue
            served, known = work.served[rank], work.pending[rank] + work.fills[rank]
            for at in range(MEMORY):
                nodes = PART * recent[at % len(recent)] * served if served and recent else 0.0
                found[at] = max(found[at], known + nodes)
        return found if any(found) else []
