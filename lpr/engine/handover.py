"""What a replica that joins a running mesh is told: all that the others hold alike, except K/V and drafting state.

Its K/V is computed from the tokens, piece by piece like any pending chain. What drafts were learnt from one request
(calibration, window, n-gram pool, recycled candidates) begins anew on *all* ranks when the mesh changes, so it needs no
format of its own; it is soon learnt again, and decides no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lpr.config import DecodeConfig, TreeSizes
from lpr.engine.request import Request
from lpr.engine.scheduler import Scheduler
from lpr.engine.stats import DecodeStats
from lpr.protocol import Submit, TokenLogprobs


class Count(msgspec.Struct, frozen=True, array_like=True):
    """Nodes of one source at one depth."""

    source: int
    depth: int
    drafted: int
    accepted: int


class Carried(msgspec.Struct, frozen=True, array_like=True):
    """A request on its way from rank to rank."""

    submit: Submit
    """The command that would submit the request as it is by now."""
    num_cached_tokens: int
    logprobs: list[TokenLogprobs]
    num_steps: int
    num_fill_steps: int
    num_nodes: int
    counts: list[Count]
    num_computed_tokens: list[int] = []
    """Per rank of the new mesh, of a request that runs."""
    slots: list[int] = []
    """The same."""
    homes: list[int] = []
    place: float = 0.0
    """In the queue, of one that waits."""
    arrival: int = 0
    arrived_ms: float = 0.0

    def restore(self, request: Request) -> Request:
        """Complete a request that was made from `submit`."""
        request.num_cached_tokens = self.num_cached_tokens
        stats = DecodeStats(
            num_steps=self.num_steps,
            num_fill_steps=self.num_fill_steps,
            num_tokens=request.num_output,
            num_nodes=self.num_nodes,
        )
        for count in self.counts:
            stats.drafted[count.source, count.depth] = count.drafted
            stats.accepted[count.source, count.depth] = count.accepted
        request.slots, request.homes = list(self.slots), list(self.homes)
        request.arrived_ms = self.arrived_ms
        request.resume(stats, self.logprobs)
        return request


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The replicated state."""

    decode: DecodeConfig
    sizes: TreeSizes
    times: dict[str, Any] | None
    """Step times that decide now, as StepTimes.to_json makes them; None where sizes are fixed."""
    follows: bool
    """Do the times that steps really take change that table?"""
    is_draining: bool
    next_id: int
    history: bytes
    """int32 tokens of the shared trie."""
    tenants: list[tuple[str, bytes]]
    """The same of each tenant's own trie, the least recently used one first."""
    read_to: dict[str, str]
    """By tenant: how far these go in what other replicas of the fleet have written."""
    running: list[Carried]
    """In the order of their slots."""
    waiting: list[Carried]
    """In the order of the queue."""
    num_arrivals: int
    num_queries: int
    num_hits: int
    now: float = 0.0
    """On the clock of the scheduler's targets, if there are any."""


def carried(request: Request, place: float = 0.0, arrival: int = 0) -> Carried:
    """A request as another rank can go on with it."""
    stats = request.stats
    return Carried(
        submit=request.submit,
        num_cached_tokens=request.num_cached_tokens,
        logprobs=request.logprobs,
        num_steps=stats.num_steps,
        num_fill_steps=stats.num_fill_steps,
        num_nodes=stats.num_nodes,
        counts=[Count(*at, stats.drafted[at], stats.accepted[at]) for at in stats.drafted],
        num_computed_tokens=list(request.num_computed_tokens) if request.state is not None else [],
        slots=list(request.slots),
        homes=list(request.homes),
        place=place,
        arrival=arrival,
        arrived_ms=request.arrived_ms,
    )


def state_of(scheduler: Scheduler[Request], **known: Any) -> State:
    """The state of a replica: its scheduler's part, and all else that is `known`."""
    return State(
        running=[carried(request) for request in scheduler.running],
        waiting=[carried(request, place, arrival) for place, arrival, request in scheduler.waiting],
        num_arrivals=scheduler.num_arrivals,
        num_queries=scheduler.num_queries,
        num_hits=scheduler.num_hits,
        now=scheduler.targets.now if scheduler.targets is not None else 0.0,
        **known,
    )


def resume(scheduler: Scheduler[Request], state: State, running: Sequence[Request], waiting: Sequence[Request]) -> None:
    """Let an empty scheduler go on with the restored requests of a state."""
    places = [(each.place, each.arrival) for each in state.waiting]
    queue = [(*at, request) for at, request in zip(places, waiting, strict=True)]
    scheduler.resume(running, queue, state.num_arrivals)
    scheduler.num_queries, scheduler.num_hits = state.num_queries, state.num_hits
    if scheduler.targets is not None:
        scheduler.targets.now = state.now


def encode(state: State) -> bytes:
    """A state as bytes (MessagePack)."""
    return msgspec.msgpack.encode(state)


def decode(data: bytes) -> State:
    """The state of `encode`; raises msgspec.MsgspecError for anything else."""
    return msgspec.msgpack.decode(data, type=State)
