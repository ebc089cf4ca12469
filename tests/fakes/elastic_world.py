"""Ranks that die where a test wants, as threads: real rendezvous and ProcessComm, groups that fail on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from lpr.dist.comm import ProcessComm
from lpr.dist.errors import CommError
from lpr.dist.group import FindLoss, Group
from lpr.dist.heartbeat import Heartbeat
from lpr.dist.membership import Membership
from lpr.dist.rendezvous import Decision, Member, Plan, Rendezvous


def hash_store() -> dist.Store:
    """A rendezvous store within this process."""
    return dist.HashStore()


WAIT = 60.0
"""Seconds after which a wait of a test's rank is a failure of the test."""


class RankDiedError(BaseException):
    """Ends the thread of a rank that dies; nothing in lpr catches it."""


@dataclass(frozen=True)
class Fault:
    """A rank dies in one collective."""

    epoch: int
    index: int
    """Of the collective among those of its epoch's group, from 0."""
    victim: int
    """World rank in that group."""
    late: bool = False
    """Does it die behind its own contribution? Then the collective ends on some ranks."""
    ahead: frozenset[int] = frozenset()
    """Those world ranks, if it is late."""


@dataclass
class _Collective:
    """One collective of a group."""

    given: dict[int, torch.Tensor | bytes] = field(default_factory=dict)
    victim_came: bool = False


class ThreadGroup(Group):
    """One rank's end of a group."""

    def __init__(self, world: ElasticWorld, name: str, rank: int, size: int) -> None:
        """World rank `rank` of the group `name`."""
        super().__init__()
        self.world = world
        self.name, self.rank, self.size = name, rank, size
        self.index = 0

    def begin_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As Group.begin_gather."""
        given = self._collect(payload.detach().cpu().clone(), range(self.size))
        return lambda: torch.stack([given[rank] for rank in range(self.size)])  # type: ignore[misc]

    def broadcast(self, message: bytes, length: int) -> bytes:
        """As Group.broadcast."""
        found = self._collect(message, [0])[0]
        assert isinstance(found, bytes) and len(found) == length
        return found

    def close(self) -> None:
        """As Group.close."""
        with self.world.lock:
            self.world.closed.setdefault(self.name, set()).add(self.rank)
            self.world.lock.notify_all()

    def _collect(self, mine: torch.Tensor | bytes, needed: range | list[int]) -> dict[int, torch.Tensor | bytes]:
        """What the `needed` ranks give to this group's next collective."""
        world, index = self.world, self.index
        if self.name.startswith("beside/"):  # connected before it was known of which epoch it is
            self.name = world.epoch_of(int(self.name.partition("/")[2]))
        self.index += 1
        with world.lock:
            mine_here = world.collectives.setdefault((self.name, index), _Collective())
            fault = world.faults.get((self.name, index))
            world.count(self.name, index)
            if fault is not None and fault.victim == self.rank:
                mine_here.victim_came = True
                if fault.late:
                    mine_here.given[self.rank] = mine
                world.lock.notify_all()
                raise RankDiedError
            mine_here.given[self.rank] = mine
            world.lock.notify_all()
            until = time.monotonic() + WAIT
            while True:
                if fault is not None:
                    if mine_here.victim_came and (not fault.late or self.rank not in fault.ahead):
                        raise CommError("a rank died in this collective")
                    ready = mine_here.victim_came
                else:
                    ready = True
                if ready and all(rank in mine_here.given for rank in needed):
                    return dict(mine_here.given)
                gone = world.closed.get(self.name, set())
                if any(rank in gone for rank in needed if rank not in mine_here.given):
                    raise CommError("a rank has left this group")
                if time.monotonic() > until:
                    raise AssertionError(f"rank {self.rank} hangs in collective {index} of {self.name}")
                world.lock.wait(0.05)


class DirectHeartbeat(Heartbeat):
    """Looks at the rendezvous store whenever it is asked; no thread."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        """With the rank's own connection."""
        super().__init__(lambda: rendezvous)
        self._rendezvous = rendezvous
        self._members: tuple[int, Sequence[int]] = -1, ()

    def start(self) -> None:
        """Nothing beats."""

    def watch(self, epoch: int, replicas: Sequence[int]) -> None:
        """As Heartbeat.watch."""
        self._members = epoch, replicas

    @property
    def loss(self) -> str | None:
        """Of the watched epoch."""
        return self._rendezvous.loss(*self._members)

    @loss.setter
    def loss(self, value: str | None) -> None:
        """Nothing is kept."""

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Replicas that wait."""
        return self._rendezvous.offered()

    @newcomers.setter
    def newcomers(self, value: tuple[int, ...]) -> None:
        """Nothing is kept."""

    @property
    def plan(self) -> Plan:
        """The driver's latest."""
        return self._rendezvous.plan

    @plan.setter
    def plan(self, value: Plan) -> None:
        """Nothing is kept."""


class ElasticWorld:
    """Threads that are replicas of a mesh, and a supervisor's part of the rendezvous."""

    def __init__(self, num_replicas: int, *faults: Fault) -> None:
        """`num_replicas` ranks at first."""
        self.num_replicas = num_replicas
        self.lock = threading.Condition()
        self.store = hash_store()
        self.faults = {(f"epoch/{fault.epoch}", fault.index): fault for fault in faults}
        self.collectives: dict[tuple[str, int], _Collective] = {}
        self.closed: dict[str, set[int]] = {}
        self.num_collectives: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self.failures: dict[int, BaseException] = {}
        self.num_beside = 0
        """Ranks that use a group which was connected before its epoch."""
        self.died: set[int] = set()
        self._beats: dict[int, DirectHeartbeat] = {}
        self._is_over = False

    def count(self, name: str, index: int) -> None:
        """Note that a collective was begun."""
        self.num_collectives[name] = max(self.num_collectives.get(name, 0), index + 1)

    def epoch_of(self, plan: int) -> str:
        """The group's name of the epoch to which a plan has led."""
        look, epoch = self.rendezvous(-1), 0
        while (decision := look.decision(epoch)) is not None and decision.beside != plan:
            epoch += 1
        assert decision is not None, f"plan {plan} has led to no epoch"
        self.num_beside += 1
        return f"epoch/{epoch}"

    def rendezvous(self, replica: int) -> Rendezvous:
        """A connection of `replica`'s."""
        return Rendezvous(self.store, Member(replica))

    def comm(self, replica: int, joins: bool = False) -> ProcessComm:
        """The mesh as `replica` sees it."""
        rendezvous = self.rendezvous(replica)

        def connect(name: str, rank: int, size: int, find_loss: FindLoss, is_start: bool) -> Group:
            return ThreadGroup(self, name, rank, size)

        beat = self._beats[replica] = DirectHeartbeat(rendezvous)
        how = {"joins": joins, "timeout": WAIT, "connects_beside": True}
        return ProcessComm(Membership(rendezvous, beat, connect, self.num_replicas, **how))  # type: ignore[arg-type]

    def start(self, replica: int, program: Callable[[ProcessComm], None], joins: bool = False) -> None:
        """Run `program` as a replica."""

        def main() -> None:
            comm = None
            try:
                comm = self.comm(replica, joins)
                program(comm)
                self._end()
            except RankDiedError:
                self.died.add(replica)
            except BaseException as failure:
                if not (self._is_over and isinstance(failure, CommError)):
                    self.failures[replica] = failure
            finally:
                # What a supervisor and the kernel do when a process ends.
                self.rendezvous(replica).mark_dead(replica, "it has ended")
                if comm is not None:
                    comm.close()

        thread = threading.Thread(target=main, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _end(self) -> None:
        """End the replicas that wait to join a job that is over."""
        self._is_over = True
        for replica, beat in self._beats.items():
            if self.rendezvous(replica).welcomed() is None and replica >= self.num_replicas:
                beat.failure = "the job is over"

    def await_end(self, replica: int) -> None:
        """Wait until a replica has ended."""
        until = time.monotonic() + WAIT
        while self.rendezvous(replica).dead_reason(replica) is None:
            assert time.monotonic() < until, f"replica {replica} goes on"
            time.sleep(0.01)

    def found(self, epoch: int, replica: int) -> None:
        """Let a replica that has loaded be the first of a new mesh."""
        rendezvous = self.rendezvous(replica)
        rendezvous.decide(epoch, Decision([replica]))
        rendezvous.welcome(epoch, replica)

    def join(self) -> None:
        """Wait for all ranks; raises what went wrong in one that a test did not end."""
        for thread in self._threads:
            thread.join(timeout=2 * WAIT)
            assert not thread.is_alive(), "a rank hangs"
        for failure in self.failures.values():
            raise failure
