"""The command log of one rank: where the driver's commands wait for their step, and how they reach all ranks.

While there is work, the header of a step's gather announces how long the waiting commands are; without work,
`Comm.announce` does. Either way they follow in one broadcast, and every rank applies them at the same place.
"""

from __future__ import annotations

from lpr.dist.comm import Comm, is_driver
from lpr.engine.commands import Command, decode, encode


class CommandLog:
    """The commands that have not been applied yet."""

    def __init__(self, comm: Comm) -> None:
        """The log of the ranks of `comm`."""
        self._comm = comm
        self._waiting: list[Command] = []
        self._message = b""

    @property
    def is_empty(self) -> bool:
        """Does no command wait to reach the ranks?"""
        return not self._waiting and not self._message

    def post(self, command: Command) -> None:
        """On the driver: put a command at the end of the log."""
        if not is_driver(self._comm):
            raise RuntimeError("only rank 0 puts commands in order")
        self._waiting.append(command)

    def announce(self) -> int:
        """Bytes that the running step's header announces; what is posted later waits for the next step."""
        if not self._message and self._waiting:
            self._message = encode(self._waiting)
            self._waiting = []
        return len(self._message)

    def receive(self, num_bytes: int) -> list[Command]:
        """On every rank, the commands that the driver announced with `num_bytes`; none for 0."""
        if not num_bytes:
            return []
        message, self._message = self._message, b""
        received = self._comm.broadcast(message, num_bytes)
        return decode(received) if received else []  # lost with the driver that had announced them

    def receive_idle(self) -> list[Command]:
        """On every rank without work, the next commands: the driver's by now, the others wait for them."""
        if not is_driver(self._comm):
            return self.receive(self._comm.await_announcement())
        num_bytes = self.announce()
        if num_bytes:
            self._comm.announce(num_bytes)
        else:
            self._comm.check()
        return self.receive(num_bytes)
