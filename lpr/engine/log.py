"""The command log of one rank: how the driver's commands reach all ranks.

While there is work, the header of a step's gather announces the length of the waiting commands; without work,
`Comm.announce` does. One broadcast follows, and every rank decodes and applies the commands at the same place.
"""

from __future__ import annotations

from lpr.dist.comm import Comm, is_driver
from lpr.engine.commands import Command, decode, encode


class CommandLog:
    """The commands that no rank has applied yet."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._waiting: list[Command] = []
        self._message = b""

    @property
    def is_empty(self) -> bool:
        """True if no command waits to reach the ranks."""
        return not self._waiting and not self._message

    def post(self, command: Command) -> None:
        """On the driver: put a command at the end of the log."""
        self._waiting.append(command)

    def announce(self) -> int:
        """Bytes of the commands that the running step's header announces; later ones wait for the next step."""
        if not self._message and self._waiting:
            self._message = encode(self._waiting)
            self._waiting = []
        return len(self._message)

    def receive(self, num_bytes: int) -> list[Command]:
        """On every rank: the commands that the driver announced with `num_bytes`; none for 0."""
        if not num_bytes:
            return []
        message, self._message = self._message, b""
        received = self._comm.broadcast(message, num_bytes)
        return decode(received) if received else []  # lost with the driver that had announced them

    def receive_idle(self) -> list[Command]:
        """On every rank without work: the next commands. Ranks other than the driver wait for them."""
        if not is_driver(self._comm):
            return self.receive(self._comm.await_announcement())
        num_bytes = self.announce()
        if num_bytes:
            self._comm.announce(num_bytes)
        else:
            self._comm.check()
        return self.receive(num_bytes)
