"""The driver's side of an engine: commands in order, the steps between them, and the mesh.

World rank 0 is the *driver*: it puts commands in order, and every rank, the driver included, applies them after the
same step. With one rank they are applied between two steps, without encoding.

An exception in a step (from a hook, a tokenizer or Ctrl-C) may leave the replica's state incomplete. With one rank, the
engine then ends the requests of the step, drops all K/V and continues. With several ranks the others may have completed
the step: this rank leaves the job, and its engine refuses further calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lpr.dist.comm import Comm, is_alone, is_driver
from lpr.dist.errors import CommError, MeshChangedError, first_line
from lpr.engine.commands import Command, CommandLog, Compile, Costs, Drain, TakeIn
from lpr.engine.replica import Replica
from lpr.engine.request import Request
from lpr.engine.step import StepResult
from lpr.model.modes import in_own_modes
from lpr.protocol import Abort, MeshError, Stop, Submit
from lpr.sched.scheduler import Schedule


class Driver:
    """Runs one rank's replica: its steps and the commands between them; on world rank 0 it also issues the commands."""

    def __init__(self, replica: Replica, comm: Comm) -> None:
        self.replica, self.comm = replica, comm
        self.log = CommandLog(comm)
        self._invited: set[int] = set()  # on the driver: replicas with a TakeIn command that is not applied yet
        self._is_busy = False
        """True in a step and while commands are applied: what a hook or the garbage collector posts then waits."""

    def post(self, *commands: Command) -> None:
        """On the driver: post commands, which all ranks apply after the running step. No-op on other ranks."""
        self.replica.check_open()
        if not is_driver(self.comm):
            return
        for command in commands:
            self.log.post(command)
        if is_alone(self.comm) and not self._is_busy:
            self._guard(self._apply_waiting)

    def post_and_wait(self, command: Command) -> None:
        """Called by all ranks while idle: apply the driver's `command` and all before it."""
        self.post(command)
        waits = not is_driver(self.comm)
        while waits or not self.log.is_empty:
            received = self.log.receive_idle()
            self._apply(received)
            waits = waits and not any(type(each) is type(command) for each in received)

    def submit(self, request: Request) -> None:
        """Submit a request that was created on all ranks, or on the driver alone."""
        self.replica.check_open()
        announced = self.replica.requests.announced
        try:
            announced[request.id] = request
            self.post(request.submit)
        except BaseException:
            announced.pop(request.id, None)
            raise

    @in_own_modes
    def step(self) -> None:
        """Take a step if there is work, and apply the commands after it. Else wait for commands, unless driver."""
        self.replica.check_open()
        self._guard(self._step)

    def _guard(self, action: Callable[[], None]) -> None:
        """Run an action that changes the replica; after an exception the replica is restored or closed."""
        try:
            self._is_busy = True
            if not self.replica.is_whole:  # the recovery from an earlier exception was interrupted
                self._fail(KeyboardInterrupt())
            self.replica.model.follow_stream()
            action()
        except MeshError:
            raise
        except BaseException as failure:
            self._fail(failure)
            raise
        finally:
            self._is_busy = False

    def _fail(self, failure: BaseException) -> None:
        if is_alone(self.comm):
            if not self.replica.is_whole:
                self.replica.recover(failure)
            return
        rank = self.comm.rank * self.comm.tp_size + self.comm.tp_rank
        reason = f"rank {rank} failed in a step: {type(failure).__name__}: {first_line(failure)}"
        self.replica.closed = CommError(reason)
        self.comm.leave(reason)
        self.replica.abandon_all(failure)

    def _step(self) -> None:
        if self.replica.scheduler.is_idle:
            self._apply_idle()
        schedule = self.replica.schedule()
        if not schedule.is_empty:
            self._advance(schedule)
        self._invite()

    def _apply_idle(self) -> None:
        if is_alone(self.comm):
            self.comm.check()
            self._follow_mesh()
            self._apply_waiting()
        else:
            received = self.log.receive_idle()
            self._follow_mesh()
            self._apply(received)

    def _advance(self, schedule: Schedule[Request]) -> None:
        """Take a step and apply the commands after it; if a rank is lost, drop the step and continue without it."""
        alone = is_alone(self.comm)
        try:
            result = self._complete(schedule, 0 if alone else self.log.announce())
        except MeshChangedError:
            self._follow_mesh()
            return
        if alone:
            self.replica.hooks.between_steps()
            self._apply_waiting()
            if self.log.is_empty and self.replica.closed is None:
                self.replica.go_on()
            return
        received = self.log.receive(result.gathered.num_command_bytes)
        self._follow_mesh()
        self._apply(received)

    def _complete(self, schedule: Schedule[Request], num_command_bytes: int) -> StepResult:
        result = self.replica.run(schedule, num_command_bytes)
        self.replica.update(schedule, result.outcomes)
        if self.replica.new_times is not None:
            self.post(Costs(self.replica.new_times.to_json()))
        return result

    def _complete_begun(self) -> None:
        if self.replica.begun is not None:
            self._complete(self.replica.begun[0], 0)

    def _apply_waiting(self) -> None:
        """With one rank: apply the waiting commands, up to one that adds other ranks.

        A step that is begun already is completed before a command that may change what it works on.
        """
        while is_alone(self.comm) and (command := self.log.pop()) is not None:
            try:
                if not isinstance(command, Submit | Compile | Drain):
                    self._complete_begun()
                self.replica.apply(command)
            except BaseException:
                if isinstance(command, Abort | Stop):  # idempotent, and still wanted
                    self.log.put_back(command)
                raise

    def _apply(self, received: Sequence[Command]) -> None:
        newcomers, beside = list[int](), 0
        for command in received:
            if isinstance(command, TakeIn):
                newcomers, beside = newcomers + command.replicas, command.beside
            else:
                self.replica.apply(command)
        # Last, because newcomers did not receive the other commands of this message. If one of these ended the job,
        # no newcomer is added.
        if newcomers and self.replica.closed is None:
            self.replica.apply(TakeIn(newcomers, beside))

    def _follow_mesh(self) -> None:
        """After a loss, continue with the remaining ranks; the first of them becomes the driver."""
        if self.comm.membership is None or not self.comm.membership.has_changed:
            return
        was_driver = is_driver(self.comm)
        self.replica.adopt_mesh()
        if not was_driver:
            for request in list(self.replica.requests.announced.values()):  # the lost driver did not submit them
                self.post(request.submit)

    def _invite(self) -> None:
        """On the driver: invite loaded replicas to join after this step, once they are connected."""
        membership, requests = self.comm.membership, self.replica.requests.open.values()
        if membership is None or self.replica.closed is not None or not is_driver(self.comm):
            return
        newcomers = [each for each in membership.newcomers if each not in self._invited]
        if newcomers and all(request.is_portable for request in requests):
            found, beside = membership.invite(newcomers, self.comm.only_drafts) or ((), 0)
            if found and self._invited.isdisjoint(found):
                self._invited.update(found)
                self.post(TakeIn(list(found), beside))
