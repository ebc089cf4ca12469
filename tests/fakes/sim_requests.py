"""Requests without text, and a mesh that serves them with the engine's scheduler on a clock of step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add

from lpr.core.step_times import StepTimes
from lpr.sched.scheduler import Scheduler


@dataclass(eq=False, slots=True)
class SimRequest:
    """What the scheduler reads of a request, and the times of its tokens in seconds."""

    arrived: float
    num_prompt: int
    num_output: int
    tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    homes: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    first: float | None = None
    ended: float = 0.0
    num_steps: int = 0
    num_nodes: int = 0
    num_fill_steps: int = 0
    priority: int = 0
    tenant: str = ""
    share: str = ""
    weight: float = 1.0
    charged: float = 0.0
    admission: int = 0
    num_cached_tokens: int = 0
    num_preempted_tokens: int = 0
    arrived_ms: float = 0.0

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - min(self.num_computed_tokens[rank] for rank in self.homes)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        return self.num_prompt + self.num_output - len(self.tokens)

    @property
    def stats(self) -> SimRequest:
        return self

    @property
    def first_seconds(self) -> float:
        return (self.first or 0.0) - self.arrived

    @property
    def token_seconds(self) -> float:
        return (self.ended - (self.first or 0.0)) / max(1, self.num_output - 1)


def serve_on_one_rank(arrivals: Sequence[SimRequest], times: StepTimes, scheduler: Scheduler[SimRequest]) -> None:
    """Serve requests, by ascending `arrived`, without drafts: a step brings each decoding request a token."""
    now, waiting = 0.0, list(arrivals)
    while waiting or not scheduler.is_idle:
        if scheduler.is_idle:
            now = max(now, waiting[0].arrived)
        while waiting and waiting[0].arrived <= now:
            scheduler.add(waiting.pop(0))
        now += _step(scheduler, times, now)
        for request in [each for each in scheduler.running if each.num_left == 0]:
            scheduler.finish(request)


def _step(scheduler: Scheduler[SimRequest], times: StepTimes, now: float) -> float:
    """Seconds of the step that begins at `now`."""
    while (admitted := scheduler.admit()) is not None:
        admitted[0].num_computed_tokens = list(admitted[1])
    schedule = scheduler.schedule()
    scheduler.take_moves()
    if schedule.is_empty:
        return 0.0
    entries = sum(each.num_pending for each in schedule.decoding) + sum(counts[0] for _, counts in schedule.filling)
    lengths = [len(each.tokens) for each in schedule.decoding]
    lengths += [each.num_computed_tokens[0] for each, _ in schedule.filling]
    seconds = 1e-3 * times.time(entries, len(lengths), max(256, *lengths))
    if scheduler.limits.targets is not None:
        scheduler.limits.targets.now += 1e3 * seconds
    for request, counts in schedule.filling:
        request.num_computed_tokens = list(map(add, request.num_computed_tokens, counts))
    for request in schedule.decoding:
        request.first = now + seconds if request.first is None else request.first
        request.ended = now + seconds
        request.num_steps += 1
        request.num_nodes += 1
        request.tokens.append(request.tokens[-1])
        request.num_computed_tokens = [len(request.tokens) - 1]
    scheduler.end_step()
    return seconds
