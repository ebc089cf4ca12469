"""The predicted load of other ranks in the same step, which decides the marginal cost of a rank's own nodes.

Ranks of an engine step together, and a step lasts as long as its busiest rank. So nodes below the load of another rank
cost nothing, and nodes beyond it make the requests of all ranks wait. When trees are drafted, the loads of other ranks
are known only in part: the tokens evaluated besides trees (prompts, pending chains), and the sizes of the trees of the
last steps. With X the load of the busiest other rank, a tree should maximise the expected tokens of *all* requests per
millisecond of E[t(max(n, X))], where each of the last few values of X is equally likely.

If all ranks have similar loads, this gives the sizes that each would choose alone: each of R ranks is the busiest with
probability 1 / R and pays R times the price. Otherwise a rank with poor drafts uses the time that other ranks need.
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
"""Part of the other ranks' trees that counts. Each rank may grow as far as the others have, so with 1.0 trees never
shrink again. Values up to 0.65 are stable, and 0.35 to 0.65 differ by less than 2 % (dev/LOG.md)."""


def times_under_load(times: Sequence[float], own: int, others: Sequence[float]) -> list[float]:
    """Expected milliseconds of a step at `KNOTS` of the rank's tree tokens; `times` are those of the rank alone.

    `own` is the number of tokens that the rank evaluates besides its trees, `others` the equally likely loads of the
    busiest other rank.
    """
    loads = np.maximum(np.array(KNOTS, float) + own, np.array(others or [0.0])[:, None])
    expected: list[float] = (times_at(loads, np.array(times)).sum(0) / len(loads)).tolist()
    return expected


@dataclass(frozen=True)
class Work:
    """The known load of each rank before the step's trees are drafted."""

    served: Sequence[int]  # per rank, the requests that it drafts for
    pending: Sequence[int]  # per rank, the tokens of these requests that it evaluates besides their trees
    fills: Sequence[int]  # per rank, the prompt tokens (pending chains longer than a tree) that it computes


class ConcurrentLoad:
    """The sizes of all ranks' trees in the last steps; the same on all ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._recent: list[deque[float]] = [deque(maxlen=MEMORY) for _ in range(num_ranks)]
        """Per rank, the nodes per request that it has evaluated."""

    def observe(self, work: Work, loads: Sequence[int]) -> None:
        """Count a step in which ranks evaluated `loads` tokens, without `work.fills`."""
        for recent, load, pending, served in zip(self._recent, loads, work.pending, work.served, strict=True):
            if served:
                recent.append((load - pending) / served)

    def others(self, work: Work, homes: Sequence[int]) -> list[float]:
        """Equally likely loads of the busiest rank outside `homes`; empty if no other rank has work."""
        found = [0.0] * MEMORY
        for rank, recent in enumerate(self._recent):
            if rank in homes:
                continue
            served, known = work.served[rank], work.pending[rank] + work.fills[rank]
            for at in range(MEMORY):
                nodes = PART * recent[at % len(recent)] * served if served and recent else 0.0
                found[at] = max(found[at], known + nodes)
        return found if any(found) else []
