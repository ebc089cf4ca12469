"""The state that a replica receives when it joins a running mesh: the replicated state, except K/V and drafts.

The newcomer computes the K/V from the tokens, in chunks like any pending chain. The drafting state of a request
(calibration, window, n-gram pool, recycled candidates) is reset on *all* ranks when the mesh changes, so it is not
sent; it affects only speed and is soon learned again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from lpr.config import DecodeConfig, TreeSizes
from lpr.core.digest import digest_of
from lpr.core.step_times import StepTimes
from lpr.dist.comm import Comm, is_driver
from lpr.engine.commands import LoadAdapter, TakeIn
from lpr.engine.exchange import worst_of_replica
from lpr.engine.kv_pool import PoolSize
from lpr.engine.request import Request
from lpr.engine.requests import RequestTable
from lpr.engine.stats import DecodeStats
from lpr.protocol import Submit, TokenLogprobs
from lpr.sched.scheduler import CacheCounts

if TYPE_CHECKING:
    from lpr.engine.replica import Replica


class RequestState(msgspec.Struct, frozen=True, array_like=True):
    """A request as it is sent from rank to rank."""

    submit: Submit
    """The command that submits it with its present output."""
    num_cached_tokens: int
    logprobs: list[TokenLogprobs]
    stats: tuple[int, int, int, int]
    """The counts of DecodeStats, steps to nodes."""
    counts: list[tuple[int, int, int, int]]
    """By source and depth: nodes drafted and accepted."""
    num_computed_tokens: list[int]
    """Per rank of the new mesh; empty if it waits. The same holds for the slots."""
    slots: list[int]
    homes: list[int]
    arrived_ms: float
    admission: int
    num_preempted_tokens: int
    pages: list[list[int]]
    """Per rank."""
    charged: float

    @classmethod
    def of(cls, request: Request, pages: list[list[int]]) -> RequestState:
        """The state of `request`, whose K/V lies in `pages`, per rank."""
        stats = request.stats
        return cls(
            submit=request.submit,
            num_cached_tokens=request.num_cached_tokens,
            logprobs=request.logprobs,
            stats=(stats.num_steps, stats.num_fill_steps, stats.num_tokens, stats.num_nodes),
            counts=[(*at, stats.drafted[at], stats.accepted[at]) for at in stats.drafted],
            num_computed_tokens=request.num_computed_tokens if request.state is not None else [],
            slots=request.slots,
            homes=request.homes,
            arrived_ms=request.arrived_ms,
            admission=request.admission,
            num_preempted_tokens=request.num_preempted_tokens,
            pages=pages,
            charged=request.charged,
        )

    def restore(self, requests: RequestTable) -> Request:
        """The request, which is open in `requests` from now on."""
        request = requests.make(self.submit)
        stats = DecodeStats(*self.stats)
        for source, depth, drafted, accepted in self.counts:
            stats.drafted[source, depth], stats.accepted[source, depth] = drafted, accepted
        request.num_cached_tokens = self.num_cached_tokens
        request.slots, request.homes = self.slots, self.homes
        request.arrived_ms, request.admission, request.charged = self.arrived_ms, self.admission, self.charged
        request.num_preempted_tokens = self.num_preempted_tokens
        request.resume(stats, self.logprobs)
        requests.open[request.id] = request
        return request


class SetUp(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the cache and the captured steps of a replica."""

    decode: DecodeConfig
    sizes: TreeSizes
    times: dict[str, Any] | None
    """The current step times (StepTimes.to_json); None if sizes are fixed."""
    follows: bool
    """True if measured steps update the step times."""
    num_pages: int
    num_host_pages: int

    @classmethod
    def of(cls, replica: Replica) -> SetUp:
        times, limits = replica.sizer.times, replica.scheduler.limits
        return cls(
            decode=replica.decode,
            sizes=replica.sizes,
            times=None if times is None else times.to_json(),
            follows=replica.start_times.follows,
            num_pages=limits.num_pages,
            num_host_pages=limits.num_host_pages,
        )

    def apply(self, replica: Replica) -> None:
        """Set up a newcomer; raises InputError if there is no room. What a call before has made is kept if it fits."""
        times = StepTimes.from_json(self.times) if self.times is not None else None
        replica.start_times.times, replica.start_times.follows = times, self.follows
        size = PoolSize(self.num_pages, 0, self.num_host_pages)
        replica.set_up(self.decode, self.sizes, times, Comm(), given=size)  # a world of one: the others take no part


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The replicated state."""

    set_up: SetUp
    is_draining: bool
    next_id: int
    history: bytes
    """int32 tokens of the shared index."""
    tenants: list[tuple[str, bytes]]
    """The same of each tenant's own index, the least recently used one first."""
    adapter_names: list[LoadAdapter]
    adapters: dict[str, str]
    """By digest, the folders of all that are loaded."""
    read_to: dict[str, str]
    """By tenant: the last stream entry that its index includes (lpr.fleet)."""
    running: list[RequestState]
    """In the order of their slots."""
    waiting: list[tuple[float, int, RequestState]]
    """The entries of the queue (lpr.sched.queue)."""
    shares: tuple[float, dict[str, tuple[float, float]]]
    """The clocks of the keys (lpr.sched.fair_shares)."""
    num_arrivals: int
    counts: CacheCounts
    now: float = 0.0
    """The clock of the scheduler's latency targets, if there are any."""


def tell_newcomers(replica: Replica) -> None:
    """On the driver: let replicas that join later know what to set up, before they are taken in."""
    membership = replica.comm.membership
    if membership is not None and is_driver(replica.comm):
        membership.set_up = msgspec.msgpack.encode(SetUp.of(replica))


def await_welcome(replica: Replica) -> bytes | None:
    """As Membership.await_welcome, with the cache and the captured steps made before: the mesh does not wait for them.

    A draft-only rank, which has another cache, makes it later; so do tp ranks that a change of sizes finds apart.
    """
    comm, membership = replica.comm, replica.comm.membership
    assert membership is not None
    known = membership.set_up if comm.serves else b""
    digest = digest_of(known.hex()) % 2**31
    if worst_of_replica(comm, digest) == -worst_of_replica(comm, -digest) and known:
        msgspec.msgpack.decode(known, type=SetUp).apply(replica)
    return membership.await_welcome(comm.serves)


def take_in(replica: Replica, command: TakeIn) -> None:
    """Continue with the replicas that join, and hand over the state to them."""
    membership = replica.comm.membership
    assert membership is not None
    membership.take_in(command.replicas, replica.comm.only_drafts, command.beside)
    replica.adopt_mesh()
    membership.meet(state_of(replica) if is_driver(replica.comm) else b"")


def state_of(replica: Replica) -> bytes:
    """The state of a replica, packed."""
    scheduler, drafts = replica.scheduler, replica.drafts
    targets = scheduler.limits.targets
    state = State(
        set_up=SetUp.of(replica),
        is_draining=replica.is_draining,
        next_id=replica.requests.next_id,
        adapter_names=list(replica.adapters.names.values()),
        adapters=replica.adapters.loaded,
        history=drafts.history().tobytes(),
        tenants=[(tenant, drafts.history(tenant).tobytes()) for tenant in drafts.tenants],
        read_to=drafts.read_to,
        running=[RequestState.of(request, scheduler.placement.tables(request)) for request in scheduler.running],
        waiting=[(place, arrival, RequestState.of(request, [])) for place, arrival, request in scheduler.waiting],
        shares=scheduler.waiting.shares.state,
        num_arrivals=scheduler.waiting.num_arrivals,
        counts=scheduler.counts,
        now=targets.now if targets is not None else 0.0,
    )
    return msgspec.msgpack.encode(state)


def resume(replica: Replica, data: bytes) -> None:
    """Restore a packed state on a newcomer without requests; raises InputError if there is no room for it."""
    state = msgspec.msgpack.decode(data, type=State)
    replica.is_draining, replica.requests.next_id = state.is_draining, state.next_id
    replica.adapters.resume(state.adapter_names, state.adapters)
    state.set_up.apply(replica)
    scheduler, drafts, requests = replica.scheduler, replica.drafts, replica.requests
    tenants = [(tenant, np.frombuffer(history, np.int32)) for tenant, history in state.tenants]
    drafts.restore(np.frombuffer(state.history, np.int32), tenants, state.read_to)
    running = [each.restore(requests) for each in state.running]
    queue = [(place, arrival, each.restore(requests)) for place, arrival, each in state.waiting]
    scheduler.resume(running, [each.pages for each in state.running], queue, state.num_arrivals)
    scheduler.waiting.shares.resume(state.shares)
    scheduler.counts = state.counts
    if scheduler.limits.targets is not None:
        scheduler.limits.targets.now = state.now
    for request, each in zip(running, state.running, strict=True):
        request.state = replica.new_state(request, each.num_computed_tokens)
    scheduler.placement.register(scheduler.running)
    for tenant, _ in state.tenants:  # restore the order of use, which drafting of running requests changed
        drafts.of(tenant)
