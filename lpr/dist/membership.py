"""The replicas that work together, epoch by epoch, and the numbered collectives of each.

A mesh either ends with the first lost rank (`survives` is false), or continues with the remaining replicas and accepts
new ones. When a group breaks, survivors may have completed different numbers of collectives: every survivor has begun
the last gather whose result any rank has, but the broadcasts after it may have completed on some ranks only. In the
next epoch the ranks ahead hand their results to the ranks behind, which finish their step with the shards of the old
mesh. At the first collective that completed on *no* rank, all survivors are at the same point with the same state:

* A gather of the old mesh can never complete: the engine drops the step, changes to the mesh of the survivors (`adopt`)
  and schedules again.
* A broadcast is repeated by the new group if the driver lives, and is empty otherwise.

The engine's view of the mesh (`rank`, `size`) changes in `adopt` only, never in the middle of a step.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from lpr.config import InputError
from lpr.dist.errors import CommError
from lpr.dist.group import Connecting, FindLoss, Group
from lpr.dist.heartbeat import Heartbeat
from lpr.dist.rendezvous import MOST_BROADCASTS, Arrival, Decision, Plan, Rendezvous, Result, Results

log = logging.getLogger(__name__)

MOST_RECOVERIES = 20  # consecutive meshes without a completed collective after which a rank gives up
WELCOME_POLL = 0.25  # seconds between two looks of a newcomer that waits for its welcome at its heartbeat

Connect = Callable[[str, int, int, FindLoss, bool], Group]
"""Makes a group from: a name unique to its ranks, rank, size, a function that detects a loss, and True for a group of
the start, which has long time-outs."""


class Membership:
    """One rank's part in the mesh."""

    def __init__(
        self, rendezvous: Rendezvous, heartbeat: Heartbeat, connect: Connect, num_replicas: int, *,
        survives: bool = True, joins: bool = False, timeout: float = 300.0, connects_beside: bool = False,
    ) -> None:  # fmt: skip
        """The rank of `rendezvous`'s member, among the first `num_replicas` or, if it `joins`, as a newcomer.

        A mesh that `survives` goes on when a rank is lost; waits end after `timeout` seconds. If it `connects_beside`,
        the group with newcomers is connected while the mesh works, else when they are taken in. Raises CommError if the
        ranks do not find each other.
        """
        self.num_replicas = num_replicas
        """Replicas of the full mesh."""
        self.survives = survives
        self.replica = rendezvous.member.replica  # this rank's replica, by its number in the job
        self.epoch = -1 if joins else 0
        """Number of the current mesh among all meshes of the job."""
        self.replicas = [self.replica] if joins else list(range(num_replicas))
        """The replicas of the current epoch; the engine may not have adopted them yet."""
        self.has_changed = False
        """True if the engine must `adopt` another mesh; set at the same point of the program on all survivors."""
        self.is_newcomer = joins
        """True until a newcomer is welcomed (`await_welcome`) by a mesh that may be running."""
        self._view = list(self.replicas)  # the replicas that the engine knows of
        self._rendezvous, self._heartbeat, self._connect, self._timeout = rendezvous, heartbeat, connect, timeout
        self.evaluated, self._is_loaded = rendezvous.evaluated, False
        self._results = Results(rendezvous)
        self._num_recoveries = 0  # since the last collective that ended
        self._repeated = 0, 0
        """Number and bytes of a broadcast that the driver repeats for ranks that missed its announcement."""
        self._expected: list[int] = []
        """Newcomers that may not have arrived yet; survivors do not wait for them if the mesh breaks."""
        self._group: Group | None = None
        self._old_group: Group | None = None
        self._connects_beside = connects_beside
        self._plan = Plan(0, [])  # the latest one whose group this rank has begun to connect
        self._beside: Connecting | None = None  # that group, until it is taken or dropped
        self._join_group(f"load/{self.replica}" if joins else "epoch/0")

    @property
    def rank(self) -> int:
        """This rank's replica among those that the engine knows of."""
        return self._view.index(self.replica)

    @property
    def size(self) -> int:
        return len(self._view)

    @property
    def view(self) -> Sequence[int]:
        """The replicas that the engine knows of, by rank."""
        return self._view

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Replicas that have loaded and wait to be taken in."""
        return tuple(each for each in self._heartbeat.newcomers if each not in self.replicas)

    @property
    def set_up(self) -> bytes:
        """The driver's message to replicas that will join (lpr.engine.handover); empty without one."""
        return self._rendezvous.store.read("set-up")

    @set_up.setter
    def set_up(self, message: bytes) -> None:
        self._rendezvous.store.set("set-up", message)

    # Collectives.

    def run(self, collective: Callable[[Group], Result], num_bytes: int = 0) -> Result | None:
        """The result of the next collective, from the group or from ranks that have it; None if it can never complete.

        `collective` is a gather, which needs the mesh that began it, or a broadcast of `num_bytes` bytes, which needs
        its driver. Raises CommError if this rank cannot continue.
        """
        self._follow(self._heartbeat.plan)
        while self._results.next is None:
            self.has_changed = self._is_stale
            if self._is_stale and not (num_bytes and self._view[0] == self.replicas[0]):
                return None
            try:
                self._results.add(collective(self._live_group()))
            except CommError as failure:
                self._recover(failure, num_bytes)
        self._num_recoveries = 0
        if not num_bytes:  # all ranks have begun it: they are in the mesh, and need no earlier group
            self._expected = []
            self._leave_old_group()
        result = self._results.end()
        if self._results.num_broadcasts >= MOST_BROADCASTS:  # a gather bounds what a rank can miss
            self.run(lambda group: group.gather(torch.zeros(1, dtype=torch.int32)))
        return result

    def announce(self, num_bytes: int) -> None:
        """On the driver: wake the ranks that wait in `await_announcement`. Raises CommError."""
        self._rendezvous.announce(self.epoch, num_bytes)

    def await_announcement(self) -> int:
        """Bytes of the next broadcast, however long it takes; 0 when the mesh has changed. Raises CommError."""
        while True:
            found = self._results.next
            if isinstance(found, bytes):
                return len(found)
            if self._repeated[0] == self._results.completed + 1:
                return self._repeated[1]
            if self._is_stale:
                self.has_changed = True
                return 0
            self._follow(self._heartbeat.plan)
            try:
                self._live_group()
                self._check_heartbeat()
                if loss := self._find_loss():
                    raise CommError(loss)
            except CommError as failure:
                self._recover(failure)
                continue
            if (announced := self._rendezvous.await_announcement(self.epoch)) is not None:
                return announced

    def check(self) -> None:
        """Form a new mesh if a rank is lost; raises CommError where this rank cannot go on."""
        self._check_heartbeat()
        if self._heartbeat.loss is not None and not self._is_stale:
            self._recover(CommError(self._heartbeat.loss))
            self.has_changed = self._is_stale

    def loaded(self, serves: bool = True) -> None:
        """Mark the end of loading: from now on waits have the time-out of a step, and losses are detected.

        `serves` as for `Rendezvous.mark_ready`.
        """
        if self._is_loaded:
            return
        self._is_loaded = True
        self._live_group().limit(self._timeout)
        self._rendezvous.decide(self.epoch, Decision(self.replicas))
        self._heartbeat.watch(self.epoch, self.replicas)
        self._rendezvous.mark_ready(serves)
        self._heartbeat.start()

    def stop(self, reason: str | None = None) -> None:
        """Stop the heartbeat; with a `reason`, as a lost rank: the others notice at once."""
        if reason is not None:
            with contextlib.suppress(CommError):
                self._rendezvous.mark_dead(self.replica, reason)
        self._heartbeat.close()

    def close(self) -> None:
        self._heartbeat.close()
        self._drop_beside()
        self._leave_group()

    # How the mesh changes.

    def compare(self, facts: Mapping[str, int]) -> None:
        """Raise InputError if this rank differs from the mesh in one of `facts`, digests by name.

        Ranks that start a mesh compare them in `agree`; a newcomer loads alone, and compares before it is ready.
        """
        theirs = self._rendezvous.facts(facts)
        different = [name for name, value in facts.items() if theirs.get(name) != value]
        if different:
            what = " and another ".join(different)
            raise InputError(f"replica {self.replica} cannot join: it has another {what} than the mesh")

    def adopt(self) -> list[int | None]:
        """Change the engine's view to the current mesh; returns each replica's former rank, None for a newcomer."""
        before, self._view = self._view, list(self.replicas)
        self.has_changed = False
        return [before.index(each) if each in before else None for each in self._view]

    def invite(self, newcomers: Sequence[int], only_drafts: Callable[[int], bool]) -> tuple[list[int], int] | None:
        """On the driver: those of `newcomers` to take in now, and the number of the plan whose group has connected.

        None while it connects; 0: no group is connected beforehand. Call it again after each step.
        """
        if not self._connects_beside:
            return list(newcomers), 0
        if self._beside is None:
            self._rendezvous.plan = Plan(self._rendezvous.plan.number + 1, self._with(newcomers, only_drafts))
            self._follow(self._rendezvous.plan)
        found = [each for each in self._plan.replicas if each not in self.replicas]
        alive = [each for each in found if each in self.newcomers]
        if self._beside is None or alive != found or self._beside.failure is not None:
            self._drop_beside()
            return alive, 0
        return (found, self._plan.number) if self._beside.is_over else None

    def _with(self, newcomers: Sequence[int], only_drafts: Callable[[int], bool]) -> list[int]:
        """The replicas of the mesh with `newcomers`, by rank."""
        return sorted(dict.fromkeys([*self.replicas, *newcomers]), key=only_drafts)

    def take_in(
        self, newcomers: Sequence[int], only_drafts: Callable[[int], bool] = lambda replica: False, beside: int = 0
    ) -> None:
        """Plan a mesh with `newcomers` appended, on all ranks after the same command; `adopt` follows.

        Replicas that `only_drafts` names are the last ones: the first replica drives, which one of those cannot.
        `beside` is as returned by `invite`.
        """
        epoch = self.epoch + 1
        # A rank that lost its group before it received the command finds the decision and the missed results.
        self._results.leave(epoch)
        planned = Decision(self._with(newcomers, only_drafts), planned=True, beside=beside)
        decision = self._rendezvous.decide(epoch, planned)
        self._check_member(decision)
        self._expected = [each for each in decision.replicas if each not in self.replicas]
        self._old_group, self._group = self._group, None
        self._results.forget()
        self._enter(epoch, decision.replicas)

    def meet(self, state: bytes) -> None:
        """Form the group of the planned mesh; the driver hands `state` to the newcomers."""
        if state:
            message = msgspec.msgpack.encode((self._results.completed, state))
            self._rendezvous.store.put(f"epoch/{self.epoch}/state", message)
            for replica in self._expected:
                self._rendezvous.welcome(self.epoch, replica)
        try:
            if self._take_beside():  # not all ranks may have received the command: the first gather shows that
                return
            self._join_group(f"epoch/{self.epoch}")
            self._expected = []
        except CommError as failure:
            log.info("a newcomer did not come: %s", failure)
        # Only now, because other ranks may still have been receiving the command through the old group.
        self._leave_old_group()

    def await_welcome(self, serves: bool = True) -> bytes | None:
        """On a loaded newcomer: wait for its welcome; returns the state of the mesh that it joins, None if it is alone.

        One that does not serve is never alone. Waits as long as the job lives; raises CommError.
        """
        self._rendezvous.mark_ready(serves)
        self._heartbeat.start()
        while (epoch := self._rendezvous.await_welcome(WELCOME_POLL)) is None:
            self._check_heartbeat()
            self._follow(self._heartbeat.plan)
        decision = self._rendezvous.decision(epoch)
        assert decision is not None
        self._leave_group()
        self._enter(epoch, decision.replicas)
        self.adopt()
        self.is_newcomer, self._is_loaded, state = False, True, None
        if decision.replicas != [self.replica]:
            found = self._rendezvous.store.get(f"epoch/{epoch}/state", self._timeout, self._find_loss)
            self._results.completed, state = msgspec.msgpack.decode(found, type=tuple[int, bytes])
        if not self._take_beside():
            self._join_group(f"epoch/{epoch}")
        return state

    @property
    def _is_stale(self) -> bool:
        """True if the engine has to adopt another mesh."""
        return self._view != self.replicas

    def _live_group(self) -> Group:
        if self._group is None:
            raise CommError("this rank has left its group")
        return self._group

    def _find_loss(self) -> str | None:
        self._rendezvous.check_rows()
        return self._rendezvous.loss(self.epoch, self.replicas)

    def _check_heartbeat(self) -> None:
        if self._heartbeat.failure is not None:
            raise CommError(self._heartbeat.failure)

    def _check_member(self, decision: Decision) -> None:
        if self.replica not in decision.replicas:
            raise CommError(f"the others have gone on without replica {self.replica}")

    def _join_group(self, name: str) -> None:
        self._group = self._make_group(name, self.replicas, self._find_loss, not self._is_loaded)

    def _make_group(self, name: str, replicas: Sequence[int], find_loss: FindLoss, is_start: bool) -> Group:
        members = self._rendezvous.members(replicas)
        return self._connect(name, members.index(self._rendezvous.member), len(members), find_loss, is_start)

    def _leave_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
        self._leave_old_group()

    def _leave_old_group(self) -> None:
        if self._old_group is not None:
            self._old_group.close()
            self._old_group = None

    def _follow(self, plan: Plan) -> None:
        """Begin to connect the group of `plan`, if it is new and of this rank's mesh."""
        if plan.number <= self._plan.number:
            return
        self._drop_beside()
        self._plan = plan
        if set(self.replicas) <= set(plan.replicas):
            self._beside = Connecting(
                lambda find_loss: self._make_group(f"beside/{plan.number}", plan.replicas, find_loss, False),
                *(lambda: self._heartbeat.loss or self._heartbeat.failure, self._find_loss),
            )

    def _take_beside(self) -> bool:
        """Take the group that the replicas of the new mesh have connected; False if there is none.

        Raises CommError if this rank has no part in it.
        """
        decision = self._rendezvous.decision(self.epoch)
        assert decision is not None
        if decision.beside > self._plan.number:
            self._follow(self._rendezvous.plan)
        if self._plan != Plan(decision.beside, decision.replicas):
            return False
        if self._beside is None:
            raise CommError("this rank has dropped the group of its mesh")
        self._group, self._beside = self._beside.take(), None
        return True

    def _drop_beside(self) -> None:
        if self._beside is not None:
            self._beside.drop()
            self._beside = None

    def _enter(self, epoch: int, replicas: Sequence[int]) -> None:
        self.epoch, self.replicas = epoch, list(replicas)
        self._heartbeat.watch(epoch, self.replicas)
        if self.replicas != self._plan.replicas:
            self._drop_beside()

    def _recover(self, failure: CommError, num_bytes: int = 0) -> None:
        """Form a mesh of the survivors: agree on their list and on the last collective.

        `num_bytes` is the length of the next collective if it is a broadcast that this rank has begun. Raises
        CommError if this rank cannot continue.
        """
        self._num_recoveries += 1
        if not self.survives or not self._is_loaded or self._num_recoveries > MOST_RECOVERIES:
            raise failure
        self._check_heartbeat()
        began = time.monotonic()
        # Newcomers whose group was connected beforehand come once they are welcomed; others have come with their group.
        late = [each for each in self._expected if self._old_group is None or self._rendezvous.welcomed(each) is None]
        log.info("replica %d leaves epoch %d: %s", self.replica, self.epoch, failure)
        self._leave_group()
        self._rendezvous.leave(self.epoch)
        before = [each for each in self.replicas if each not in late]
        epoch = self.epoch + 1
        decision = self._rendezvous.meet(epoch, before, Arrival(self._results.known, num_bytes), self._timeout)
        if decision.planned:
            # Other ranks have the command that leads to this epoch; this rank fetches it as a missed result.
            members = self._rendezvous.members(decision.replicas)
            self._results.take(epoch, members, self._timeout, self._find_loss)
            return
        self._check_member(decision)
        self._enter(epoch, decision.replicas)
        try:
            self._level(epoch)
        except CommError as again:
            self._recover(again, num_bytes)
            return
        with contextlib.suppress(CommError):  # the next collective tries again in the next epoch
            self._join_group(f"epoch/{epoch}")
        log.info("replica %d goes on with %s after %.3f s", self.replica, self.replicas, time.monotonic() - began)

    def _level(self, epoch: int) -> None:
        """Give every survivor the results of all collectives that any survivor has; raises CommError."""
        arrivals = self._rendezvous.arrivals(epoch, self.replicas)
        known = [arrival.known for arrival in arrivals.values()]
        ahead = [member for member, arrival in arrivals.items() if arrival.known == max(known)]
        if min(known) < max(known) and ahead[0] == self._rendezvous.member:
            self._results.leave(epoch)
        if self._results.known < max(known):
            self._results.take(epoch, ahead[:1], self._timeout, self._find_loss)
        driver = arrivals.get(self._rendezvous.members(self.replicas)[0])
        self._repeated = 0, 0
        if driver is not None and driver.broadcast and self._view[0] == self.replicas[0]:
            self._repeated = driver.known + 1, driver.broadcast
