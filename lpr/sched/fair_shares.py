"""Fair sharing of slots between a service's API keys: start-time fair queueing (Goyal et al., 1996) over steps.

A share is the requests of one key. Its clock (virtual time) is the number of steps in which they held slots, over the
share's weight. The waiting share with the least clock is admitted next. A request is charged the mean number of steps
of its share when it begins, and the difference to its real number when it ends. A share without waiting requests starts
at the clock of the latest admission: idle time earns no credit.
"""

from typing import Generic

from lpr.sched.limits import R

FIRST_STEPS = 16.0  # steps that the first request of a share is expected to take
NEW_WEIGHT = 0.25  # weight of the latest request in the mean of its share


class Shares(Generic[R]):
    """The clocks of all shares. Replicated: they depend only on counts that are the same on all ranks."""

    def __init__(self) -> None:
        self._clocks: dict[str, tuple[float, float]] = {}  # by share: its clock, and the mean steps of its requests
        self._now = 0.0  # clock of the share that was admitted last, before it paid

    @property
    def state(self) -> tuple[float, dict[str, tuple[float, float]]]:
        """The state as (latest clock, clock and mean steps per share), for another rank to resume from."""
        return self._now, dict(self._clocks)

    def resume(self, state: tuple[float, dict[str, tuple[float, float]]]) -> None:
        self._now, self._clocks = state[0], dict(state[1])

    def due(self, request: R, num_before: int) -> float:
        """The clock of a waiting request's start, after `num_before` others of its share."""
        clock, mean = self._of(request)
        return clock + num_before * mean / request.weight

    def enter(self, request: R) -> None:
        """Start the clock of a share whose first waiting request arrives."""
        clock, mean = self._of(request)
        self._clocks[request.share] = max(clock, self._now), mean

    def begin(self, request: R) -> None:
        """Charge a request that gets a slot, unless it was charged before a preemption."""
        clock, mean = self._of(request)
        self._now = max(self._now, clock)
        if not request.charged:
            request.charged = mean
            self._clocks[request.share] = clock + mean / request.weight, mean

    def end(self, request: R) -> None:
        """Charge or refund the difference between a finished request's steps and its first charge."""
        clock, mean = self._of(request)
        took = request.stats.num_steps + request.stats.num_fill_steps
        clock += (took - request.charged) / request.weight
        self._clocks[request.share] = clock, mean + NEW_WEIGHT * (took - mean)

    def _of(self, request: R) -> tuple[float, float]:
        return self._clocks.get(request.share, (0.0, FIRST_STEPS))
