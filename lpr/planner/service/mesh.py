"""One mesh: its scheduler's steps one after the other, on a clock that a policy moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lpr.core.step_times import StepTimes
from lpr.engine.limits import Limits
from lpr.engine.scheduler import Scheduler
from lpr.planner.service.requests import Arrivals, SimRequest


class Policy(Protocol):
    """What a step costs and brings. Which ranks serve a request (`homes`) is the scheduler's affair."""

    def step(
        self, decoding: Sequence[SimRequest], filling: Sequence[tuple[SimRequest, Sequence[int]]]
    ) -> tuple[float, Sequence[int]]:
        """Seconds of a step, and the tokens that it brings to each request of `decoding`, at least one each.

        A decoding request also evaluates what its home ranks lack of its pending chain; those of `filling` evaluate so
        many tokens of theirs, per rank.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Slots:
    """The scheduler's limits, as DecodeConfig and the engine set them."""

    num_slots: int = 8
    """Of each rank."""
    num_ranks: int = 1
    """lp: the ranks of a replica work as one."""
    prefill_chunk: int = 512
    longest_chain: int = 64
    """Nodes of the largest tree."""
    packed: bool = True
    """Are unequal rows evaluated without padding?"""
    retains: bool = True
    """Do slots keep the prefixes of finished requests?"""
    most_homes: int | None = None
    """Most home ranks of a request; 0: always all. Default: as many as there are ranks."""
    join_chunk: int | None = None
    """As of Scheduler."""
    times: StepTimes | None = None
    """Step times by which the scheduler widens requests; None: whenever a rank is idle."""
    nodes_per_rank: int = 64
    """Of the largest tree that these times are asked about."""
    first_token_ms: float = math.inf
    """Target of the scheduler, which needs `times`."""
    per_token_ms: float = math.inf
    """The same."""

    def scheduler(self) -> Scheduler[SimRequest]:
        """An idle scheduler."""
        limits: Limits[SimRequest] = Limits(
            self.num_slots,
            self.num_ranks,
            self.prefill_chunk,
            self.longest_chain,
            packed=self.packed,
            retains=self.retains,
            most_homes=self.num_ranks if self.most_homes is None else self.most_homes,
            join_chunk=self.join_chunk,
        )
        if (times := self.times) is not None:
            limits.decide_by(lambda: times, self.nodes_per_rank, self.first_token_ms, self.per_token_ms)
        return Scheduler(limits)


class MeshRun:
    """One mesh on its way."""

    def __init__(self, policy: Policy, slots: Slots) -> None:
        """An idle mesh at time 0."""
        self._policy, self._scheduler = policy, slots.scheduler()
        self.now = 0.0
        """When its next step begins."""

    @property
    def is_idle(self) -> bool:
        """Has it nothing to do?"""
        return self._scheduler.is_idle

    @property
    def num_requests(self) -> int:
        """Waiting and running ones."""
        return len(self._scheduler.waiting) + len(self._scheduler.running)

    def add(self, request: SimRequest) -> None:
        """Let a request wait for a slot."""
        self._scheduler.add(request)

    def step(self) -> list[SimRequest]:
        """Take a step, if there is anything to do; returns the requests that have ended with it."""
        scheduler = self._scheduler
        while (admission := scheduler.admit()) is not None:
            admission.request.num_computed_tokens = list(admission.num_computed_tokens)
        schedule = scheduler.schedule()
        scheduler.take_moves()
        if schedule.is_empty:
            return []
        seconds, emitted = self._policy.step(schedule.decoding, schedule.filling)
        self.now += seconds
        if scheduler.limits.targets is not None:
            scheduler.limits.targets.now += 1e3 * seconds
        for request, counts in schedule.filling:
            request.num_computed_tokens = [
                computed + count for computed, count in zip(request.num_computed_tokens, counts, strict=True)
            ]
        for request, count in zip(schedule.decoding, emitted, strict=True):
            advance(request, count, self.now)
        ended = [each for each in schedule.decoding if each.num_left == 0]
        for request in ended:
            scheduler.finish(request)
        return ended


def simulate_mesh(arrivals: Arrivals, policy: Policy, slots: Slots) -> list[SimRequest]:
    """Serve all `arrivals` on one mesh; returns the requests as they end. Deterministic, if arrivals and policy are."""
    mesh, done = MeshRun(policy, slots), list[SimRequest]()
    while True:
        for request in arrivals.due(mesh.now):
            mesh.add(request)
        if mesh.is_idle:
            upcoming = arrivals.upcoming()
            if upcoming is None:
                return done
            mesh.now = max(mesh.now, upcoming)
            continue
        for request in mesh.step():
            arrivals.ended(request)
            done.append(request)


def advance(request: SimRequest, count: int, now: float) -> None:
    """Let `count` tokens, or as many as are missing, be added at time `now`."""
    if request.first is None:
        request.first = now
    request.num_steps += 1
    request.tokens.extend([request.tokens[-1]] * min(count, request.num_left))
    for rank in request.homes:
        request.num_computed_tokens[rank] = len(request.tokens) - 1
    request.ended = now
