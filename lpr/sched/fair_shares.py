"""Slots shared among the keys of a service: start-time fair queueing (Goyal et al., 1996) over steps in a slot.

Each share, the requests of one key, has a clock: the steps that they have held slots for, over the share's weight. The
waiting share with the least clock is admitted next. A request pays the mean of its share when it begins, and the rest
when it ends. A share without waiting requests begins at the clock of the latest admission: idle time earns no credit.
"""

from __future__ import annotations

from typing import Generic

from lpr.sched.limits import R

FIRST_STEPS = 16.0  # steps that the first request of a share is expected to take
NEW_WEIGHT = 0.25  # weight of the latest request in the mean of its share


class Shares(Generic[R]):
    """The clocks of all shares. Replicated: they follow from counts that all ranks hold alike."""

    def __init__(self) -> None:
        self._clocks: dict[str, tuple[float, float]] = {}  # by share: its clock, and the mean steps of its requests
        self._now = 0.0  # clock of the share that was admitted last, before it paid

    @property
    def state(self) -> tuple[float, dict[str, tuple[float, float]]]:
        """What another rank needs to go on from here."""
        return self._now, dict(self._clocks)

    def resume(self, state: tuple[float, dict[str, tuple[float, float]]]) -> None:
        self._now, self._clocks = state[0], dict(state[1])

    def due(self, request: R, num_before: int) -> float:
        """The clock at which a waiting request begins, after `num_before` others of its share."""
        clock, mean = self._of(request)
        return clock + num_before * mean / request.weight

    def enter(self, request: R) -> None:
        """Note a request whose share had no waiting one."""
        clock, mean = self._of(request)
        self._clocks[request.share] = max(clock, self._now), mean

    def begin(self, request: R) -> None:
        """Charge a request that gets a slot; one that had a slot before has paid."""
        clock, mean = self._of(request)
        self._now = max(self._now, clock)
        if not request.charged:
            request.charged = mean
            self._clocks[request.share] = clock + mean / request.weight, mean

    def end(self, request: R) -> None:
        """Charge what a request that gives its slot back took beyond its charge."""
        clock, mean = self._of(request)
        took = request.stats.num_steps + request.stats.num_fill_steps
        clock += (took - request.charged) / request.weight
        self._clocks[request.share] = clock, mean + NEW_WEIGHT * (took - mean)

    def _of(self, request: R) -> tuple[float, float]:
        return self._clocks.get(request.share, (0.0, FIRST_STEPS))
