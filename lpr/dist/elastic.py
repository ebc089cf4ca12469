"""A mesh that goes on when replicas are lost, and takes new ones in.

Every collective of the control path has a number. When a group breaks, survivors have not all come equally far: a
gather ends somewhere only when all have begun it, so nobody is further behind than the last gather that anybody has
the result of; broadcasts behind it may have ended on some ranks too. Each rank therefore keeps the results since its
last gather, and in the next epoch those ahead hand them to those behind, who finish their step as if nothing had
happened, with the shards of the old mesh. At the first collective that *nobody* has a result of, all survivors are at
the same point with the same state, whoever was ahead:

* A gather of the old mesh can never end any more: it raises MeshChangedError, the engine drops the step, takes on the
  mesh of the survivors (`adopt`), and schedules again.
* A broadcast is done by the new group if the driver lives, and else brings nothing.

The view that the engine has of the mesh (`rank`, `size`) changes in `adopt` only, never in the middle of a step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from lpr.config import InputError
from lpr.dist.channel import CommError, HostChannel
from lpr.dist.comm import Membership, MeshChangedError
from lpr.dist.group import Group
from lpr.dist.heart import Heart
from lpr.dist.register import Arrival, Decision, Register
from lpr.dist.results import Result, Results

log = logging.getLogger(__name__)

FIRST_EPOCH = "epoch/0"
"""Name of the group that loads together; those of later epochs are named likewise."""
MOST_RESULTS = 16
"""Results that a rank keeps: idle ranks broadcast without gathers, and after so many they gather once."""
MOST_RECOVERIES = 20
"""Meshes in a row in which no collective ends, after which a rank gives up."""
WELCOME_POLL = 0.05
"""Seconds between two looks of a newcomer at whether it is welcome."""

Connect = Callable[[str, int, int, Callable[[], bool]], Group]
"""Makes a group: its name (the same on all its ranks and on no others), rank, size, and whether one is lost."""


class ElasticComm:
    """The ranks of a mesh that may change; it is its own host channel."""

    tp_mesh: DeviceMesh | None = None
    num_sharing = 1

    def __init__(
        self,
        register: Register,
        heart: Heart,
        connect: Connect,
        num_replicas: int,
        *,
        joins: bool = False,
        tp_group: Group | None = None,
        timeout: float = 300.0,
    ) -> None:
        """The rank of `register`'s member, among the first `num_replicas` or, if it `joins`, behind those that run.

        `tp_group` is the group of this replica's ranks where these are several; waits end after `timeout` seconds.
        Raises CommError if the ranks do not find each other.
        """
        self.num_replicas = num_replicas
        self._register = register
        self._heart = heart
        self._connect = connect
        self._tp_group = tp_group
        self._timeout = timeout
        self._replica, self.tp_rank = register.member.replica, register.member.tp_rank
        self.tp_size = register.tp_size
        self.is_newcomer = joins
        self._is_loaded = False
        self._epoch = -1 if joins else 0
        self._replicas = [self._replica] if joins else list(range(num_replicas))
        self._view = list(self._replicas)
        """The replicas that the engine knows of: what `rank` and `size` speak of."""
        self.rank, self.size = self._view.index(self._replica), len(self._view)
        self._is_due = False
        """Has this rank come to where the engine takes on another mesh, the same place on all survivors?"""
        self.channel: HostChannel = self
        self.membership: Membership | None = self
        self._results = Results(register)
        self._num_broadcasts = 0
        """Since the last gather."""
        self._num_recoveries = 0
        """Since the last collective that ended."""
        self._num_announced = 0
        self._repeated = (0, 0)
        """Number and bytes of a broadcast that the driver repeats, for ranks that have not seen it announced."""
        self._unsettled: list[int] = []
        """Newcomers that may not have come yet: nobody waits for them when the mesh breaks."""
        self._group: Group | None = None
        self._old_group: Group | None = None
        self._join_group(f"load/{self._replica}" if joins else FIRST_EPOCH)

    # As the engine sees it.

    @property
    def epoch(self) -> int:
        """Number of the mesh among all that the job has had: a later driver has a higher one."""
        return self._epoch

    @property
    def newcomers(self) -> tuple[int, ...]:
        """As Membership.newcomers."""
        if not self._heart.newcomers:
            return ()
        return tuple(each for each in self._heart.newcomers if each not in self._replicas)

    @property
    def has_changed(self) -> bool:
        """As Membership.has_changed."""
        return self._is_due

    # Collectives.

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """As Comm.gather; raises MeshChangedError where the mesh is no more and nobody has the result."""
        while self._results.next is None:
            if self._is_stale:
                self._is_due = True
                raise MeshChangedError(f"the mesh of replicas {self._view} is now one of {self._replicas}")
            try:
                rows = self._live_group().gather(payload)
            except CommError as failure:
                self._recover(failure)
                continue
            self._results.add(rows)
            self._unsettled = []
        found = self._end()
        assert isinstance(found, torch.Tensor)
        self._results.forget_earlier()
        self._num_broadcasts = 0
        return found

    def begin_gather_replica(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As Comm.begin_gather_replica; a lost rank of this replica is the loss of this replica."""
        if self._tp_group is None:
            return lambda: payload[None]
        return partial(self._tp_group.gather, payload)

    def broadcast(self, message: bytes, length: int) -> bytes:
        """As Comm.broadcast; b"" if the driver of the mesh was lost and nobody has the message."""
        while self._results.next is None:
            self._is_due = self._is_stale
            if self._view[0] != self._replicas[0]:
                return b""
            try:
                self._results.add(self._live_group().broadcast(message, length))
            except CommError as failure:
                self._recover(failure, length)
        found = self._end()
        assert isinstance(found, bytes)
        self._num_broadcasts += 1
        if self._num_broadcasts >= MOST_RESULTS:
            with contextlib.suppress(MeshChangedError):  # all are alike then, which is what the gather is for
                self.gather(torch.zeros(1, dtype=torch.int32))
        return found

    # The host channel.

    def announce(self, num_bytes: int) -> None:
        """As HostChannel.announce."""
        self.check()
        if self.size * self.tp_size > 1:
            self._register.announce(self._epoch, self._num_announced, num_bytes)
            if self._num_announced >= MOST_RESULTS:  # a gather came between, so all have read this one
                self._register.drop_announcement(self._epoch, self._num_announced - MOST_RESULTS)
            self._num_announced += 1

    def wait(self) -> int:
        """As HostChannel.wait; 0 when the mesh has changed."""
        while True:
            found = self._results.next
            if isinstance(found, bytes):
                return len(found)
            if self._repeated[0] == self._results.completed + 1:
                return self._repeated[1]
            if self._is_stale:
                self._is_due = True
                return 0
            try:
                self._live_group()
                self._check_alive()
                announced = self._register.await_announcement(self._epoch, self._num_announced)
            except _BrokenError as failure:
                self._recover(failure)
                continue
            if announced is not None:
                self._num_announced += 1
                return announced

    def check(self) -> None:
        """Look whether all are there, and form a new mesh if not."""
        if self._heart.failure is not None:
            raise CommError(self._heart.failure)
        if self._heart.is_broken and not self._is_stale:
            self._recover(CommError("another rank was lost"))
            self._is_due = self._is_stale

    def loaded(self) -> None:
        """From now on a lost rank does not end the others."""
        if self._is_loaded:
            return
        self._is_loaded = True
        self._live_group().limit(self._timeout)
        self._register.decide(self._epoch, Decision(self._replicas))
        self._heart.watch(self._epoch, self._replicas)
        if not self.is_newcomer:
            self._register.mark_ready()
            self._heart.start()

    def close(self, reason: str | None = None) -> None:
        """Leave the mesh; with a `reason`, as a lost rank: the others go on at once, without waiting for its end."""
        if reason is not None:
            with contextlib.suppress(CommError):
                self._register.mark_dead(self._replica, reason)
        self._leave_group()
        if self._tp_group is not None:
            self._tp_group.close()
        self._heart.close()

    def finish(self) -> None:
        """After the last command: wait until all have it, as the others would go on without those that leave."""
        if self.size * self.tp_size > 1 and self._is_loaded:
            try:
                self.gather(torch.zeros(1, dtype=torch.int32))
            except CommError:
                return

    # Membership.

    def compare(self, facts: Mapping[str, int]) -> None:
        """As Membership.compare."""
        theirs = self._register.facts(facts)
        different = [name for name, value in facts.items() if theirs.get(name) != value]
        if different:
            raise InputError(
                f"replica {self._replica} cannot join: it has another {' and another '.join(different)} than the mesh"
            )

    def adopt(self) -> list[int | None]:
        """As Membership.adopt."""
        before, self._view = self._view, list(self._replicas)
        self.rank, self.size = self._view.index(self._replica), len(self._view)
        self._is_due = False
        return [before.index(each) if each in before else None for each in self._view]

    def take_in(self, newcomers: Sequence[int]) -> None:
        """As Membership.take_in."""
        epoch = self._epoch + 1
        # Ranks that lost their group before they had the command find here that it is decided, and what they missed.
        self._results.leave(epoch)
        planned = [*self._replicas, *(each for each in newcomers if each not in self._replicas)]
        decision = self._register.decide(epoch, Decision(planned, planned=True))
        if self._replica not in decision.replicas:
            raise CommError(f"the others have gone on without replica {self._replica}")
        self._unsettled = [each for each in decision.replicas if each not in self._replicas]
        self._old_group, self._group = self._group, None
        self._results.forget()  # who takes part has them all
        self._num_broadcasts = 0
        self._enter(epoch, decision.replicas)

    def meet(self, state: bytes) -> None:
        """As Membership.meet."""
        if state:
            said = msgspec.msgpack.encode((self._results.completed, state))
            self._register.leave_behind(f"epoch/{self._epoch}/state", said)
            for replica in self._unsettled:
                self._register.welcome(self._epoch, replica)
        try:
            self._join_group(f"epoch/{self._epoch}")
            self._unsettled = []
        except CommError as failure:
            log.info("a newcomer did not come: %s", failure)
        # Only now: others may still wait for the command that brought this rank here.
        if self._old_group is not None:
            self._old_group.close()
            self._old_group = None

    def await_welcome(self) -> bytes | None:
        """As Membership.await_welcome; waits as long as the job lives."""
        self._register.mark_ready()
        self._heart.start()
        while (epoch := self._register.welcomed()) is None:
            if self._heart.failure is not None:
                raise CommError(self._heart.failure)
            time.sleep(WELCOME_POLL)
        decision = self._register.decision(epoch)
        assert decision is not None
        self._leave_group()
        self._enter(epoch, decision.replicas)
        self.adopt()
        self.is_newcomer = False
        self._is_loaded = True
        state = None
        if decision.replicas != [self._replica]:
            found = self._register.get(f"epoch/{epoch}/state", self._timeout, self._is_broken)
            self._results.completed, state = msgspec.msgpack.decode(found, type=tuple[int, bytes])
        self._join_group(f"epoch/{epoch}")
        return state

    # Within.

    @property
    def _is_stale(self) -> bool:
        return self._view != self._replicas

    def _live_group(self) -> Group:
        if self._group is None:
            raise _BrokenError("this rank has no group any more")
        return self._group

    def _is_broken(self) -> bool:
        return self._register.is_broken(self._epoch, self._replicas)

    def _check_alive(self) -> None:
        if self._heart.failure is not None:
            raise CommError(self._heart.failure)
        if self._is_broken():
            raise _BrokenError("another rank was lost")

    def _join_group(self, name: str) -> None:
        place = self._replicas.index(self._replica) * self.tp_size + self.tp_rank
        self._group = self._connect(name, place, len(self._replicas) * self.tp_size, self._is_broken)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    def _enter(self, epoch: int, replicas: Sequence[int]) -> None:
        self._epoch, self._replicas = epoch, list(replicas)
        self._num_announced = 0
        self._heart.watch(epoch, self._replicas)

    def _end(self) -> Result:
        """Count the next collective as ended; its result."""
        self._num_recoveries = 0
        return self._results.end()

    def _recover(self, failure: CommError, num_bytes: int = 0) -> None:
        """Go on with the survivors: agree on who they are, and on the last collective.

        `num_bytes` is the length of the next collective if that is a broadcast that this rank has begun. Raises
        CommError where this rank cannot go on.
        """
        self._num_recoveries += 1
        if not self._is_loaded or self._num_recoveries > MOST_RECOVERIES:
            raise failure
        if self._heart.failure is not None:
            raise CommError(self._heart.failure)
        began = time.monotonic()
        log.info("replica %d leaves epoch %d: %s", self._replica, self._epoch, failure)
        self._leave_group()
        self._register.leave(self._epoch)
        before = [each for each in self._replicas if each not in self._unsettled]
        epoch = self._epoch + 1
        decision = self._register.meet(epoch, before, Arrival(self._results.known, num_bytes), self._timeout)
        if decision.planned:
            # Others have the command by which all go to this epoch; this rank gets it as a result that it missed.
            members = self._register.members(decision.replicas)
            self._results.take(epoch, self._results.holders(epoch, members), self._timeout, self._is_broken)
            return
        if self._replica not in decision.replicas:
            raise CommError(f"the others have gone on without replica {self._replica}")
        self._enter(epoch, decision.replicas)
        try:
            self._level(epoch)
        except CommError as again:
            self._recover(again, num_bytes)
            return
        with contextlib.suppress(CommError):  # then the next collective tries again, one epoch on
            self._join_group(f"epoch/{epoch}")
        log.info("replica %d goes on with %s after %.3f s", self._replica, self._replicas, time.monotonic() - began)

    def _level(self, epoch: int) -> None:
        """See that all survivors have the results of the collectives that any of them has; raises CommError."""
        arrivals = self._register.arrivals(epoch, self._replicas)
        known = [arrival.known for arrival in arrivals.values()]
        ahead = [member for member, arrival in arrivals.items() if arrival.known == max(known)]
        if min(known) < max(known) and ahead[0] == self._register.member:
            self._results.leave(epoch)
        if self._results.known < max(known):
            self._results.take(epoch, ahead[:1], self._timeout, self._is_broken)
        driver = arrivals.get(self._register.members(self._replicas)[0])
        self._repeated = (0, 0)
        if driver is not None and driver.broadcast and self._view[0] == self._replicas[0]:
            self._repeated = (driver.known + 1, driver.broadcast)


class _BrokenError(CommError):
    """A lost rank, rather than a lost job."""
