"""The driver's side of an engine: commands in order, the steps between them, and the mesh.

World rank 0 is the *driver*: it puts commands in order, and every rank, the driver included, applies them after the
same step. A world of one applies a command at once, without encoding it.
"""

from __future__ import annotations

from collections.abc import Sequence

from lpr.dist.comm import Comm, is_alone, is_driver
from lpr.dist.errors import MeshChangedError
from lpr.engine.commands import Command, CommandLog, Costs, TakeIn
from lpr.engine.replica import Replica
from lpr.engine.request import Request
from lpr.engine.scheduler import Schedule
from lpr.model.modes import in_own_modes


class Driver:
    """The steps of one rank's replica and the commands between them; on the driver, also who gives them."""

    def __init__(self, replica: Replica, comm: Comm) -> None:
        self.replica, self.comm = replica, comm
        self.log = CommandLog(comm)
        self._invited: set[int] = set()
        """Replicas that this rank, as the driver, has asked all to take in."""

    def post(self, command: Command) -> None:
        """On the driver: let all ranks apply a command after the running step. Other ranks' calls do nothing."""
        if not is_driver(self.comm):
            return
        if is_alone(self.comm) and self.log.is_empty:
            self._apply([command])
        else:
            self.log.post(command)

    def post_and_wait(self, command: Command) -> None:
        """On idle ranks that all come here: apply the driver's `command` and all before it."""
        self.post(command)
        waits = not is_driver(self.comm)
        while waits or not self.log.is_empty:
            received = self.log.receive_idle()
            self._apply(received)
            waits = waits and not any(type(each) is type(command) for each in received)

    def submit(self, request: Request) -> None:
        """Submit a request that all ranks, or the driver alone, have made."""
        self.replica.requests.announced[request.id] = request
        self.post(request.submit)

    @in_own_modes
    def step(self) -> None:
        """Take a step if there is work, and apply the commands after it. Else wait for commands on other ranks."""
        if self.replica.scheduler.is_idle:
            received = self.log.receive_idle()
            self._follow_mesh()
            self._apply(received)
        schedule = self.replica.schedule()
        if not schedule.is_empty:
            self._advance(schedule)
        self._invite()

    def _advance(self, schedule: Schedule[Request]) -> None:
        """Take a step and apply the commands after it; if a rank is lost in it, drop it and go on without."""
        try:
            result = self.replica.run(schedule, self.log.announce())
        except MeshChangedError:
            self._follow_mesh()
            return
        self.replica.update(schedule, result.outcomes)
        if self.replica.new_times is not None:
            self.post(Costs(self.replica.new_times.to_json()))
        received = self.log.receive(result.num_command_bytes)
        self._follow_mesh()
        self._apply(received)

    def _apply(self, received: Sequence[Command]) -> None:
        newcomers: list[int] = []
        for command in received:
            if isinstance(command, TakeIn):
                newcomers += command.replicas
            else:
                self.replica.apply(command)
        if newcomers:  # last, as they do not know the commands that came with theirs
            self.replica.apply(TakeIn(newcomers))

    def _follow_mesh(self) -> None:
        """After a loss, go on with the ranks that are left; as the driver if this is the first of them."""
        if self.comm.membership is None or not self.comm.membership.has_changed:
            return
        was_driver = is_driver(self.comm)
        self.replica.adopt_mesh()
        if not was_driver:
            for request in list(self.replica.requests.announced.values()):  # the lost driver has not submitted them
                self.post(request.submit)

    def _invite(self) -> None:
        """On the driver: let replicas that have loaded join after this step."""
        membership, requests = self.comm.membership, self.replica.requests.open.values()
        if membership is None or self.replica.is_stopped or not is_driver(self.comm):
            return
        newcomers = [each for each in membership.newcomers if each not in self._invited]
        if newcomers and all(request.is_portable for request in requests):
            self._invited.update(newcomers)
            self.post(TakeIn(newcomers))
