"""One mesh: its scheduler's steps one after the other, on a clock that a policy moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lpr.engine.scheduler import Scheduler
from lpr.planner.simulated.requests import Arrivals, SimRequest


class Policy(Protocol):
    """The time and the yield of steps. The scheduler chooses the ranks that serve a request (`homes`)."""

    def step(
        self, decoding: Sequence[SimRequest], filling: Sequence[tuple[SimRequest, Sequence[int]]]
    ) -> tuple[float, Sequence[int]]:
        """Seconds of a step, and the tokens that it brings to each request of `decoding`, at least one each.

        A decoding request also evaluates the uncomputed tokens of its home ranks; those of `filling` evaluate so many
        of theirs, per rank.
        """
        ...


def simulate_mesh(arrivals: Arrivals, policy: Policy, scheduler: Scheduler[SimRequest]) -> list[SimRequest]:
    """Serve all `arrivals` on one mesh; returns the requests as they end. Deterministic, if arrivals and policy are."""
    now, done = 0.0, list[SimRequest]()
    while True:
        for request in arrivals.due(now):
            scheduler.add(request)
        if scheduler.is_idle:
            upcoming = arrivals.upcoming()
            if upcoming is None:
                return done
            now = max(now, upcoming)
            continue
        seconds, ended = _step(scheduler, policy, now)
        now += seconds
        for request in ended:
            arrivals.ended(request)
            done.append(request)


def _step(scheduler: Scheduler[SimRequest], policy: Policy, now: float) -> tuple[float, list[SimRequest]]:
    """A step that begins at `now`: its seconds, and the requests that end with it."""
    while (admitted := scheduler.admit()) is not None:
        admitted[0].num_computed_tokens = list(admitted[1])
    schedule = scheduler.schedule()
    scheduler.take_moves()
    if schedule.is_empty:
        return 0.0, []
    seconds, emitted = policy.step(schedule.decoding, schedule.filling)
    if scheduler.limits.targets is not None:
        scheduler.limits.targets.now += 1e3 * seconds
    for request, counts in schedule.filling:
        request.num_computed_tokens = [
            computed + count for computed, count in zip(request.num_computed_tokens, counts, strict=True)
        ]
    for request, count in zip(schedule.decoding, emitted, strict=True):
        _advance(request, count, now + seconds)
    ended = [each for each in schedule.decoding if each.num_left == 0]
    for request in ended:
        scheduler.finish(request)
    return seconds, ended


def _advance(request: SimRequest, count: int, now: float) -> None:
    """Emit `count` tokens, or as many as are left, at time `now`."""
    if request.first is None:
        request.first = now
    request.num_steps += 1
    request.tokens.extend([request.tokens[-1]] * min(count, request.num_left))
    for rank in request.homes:
        request.num_computed_tokens[rank] = len(request.tokens) - 1
    request.ended = now
