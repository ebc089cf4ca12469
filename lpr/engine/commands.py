"""The commands: everything that changes what the ranks do, in one totally ordered log.

The driver (world rank 0) puts commands in order, one codec carries them, and every rank, the driver included, applies
them by the same `Replica.apply` after the same step. There is no second way in: the command line, `generate`, `stream`,
a service, learned outputs, tries and measured step times all become commands.

While there is work, the header of a step's gather announces the length of the waiting commands; without work,
`Comm.announce` does. One broadcast follows, and every rank decodes and applies the commands at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lpr.config import DecodeConfig
from lpr.dist.comm import Comm, is_driver
from lpr.protocol import Abort, Stop, Submit


class Learn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Draft from documents, as if they had just been decoded."""

    history: bytes
    """int32 tokens, documents separated by END: there can be millions."""
    replace: bool = False
    """Forget everything that all share before."""
    tenant: str = ""
    """Whose requests may draft from them."""
    read_to: str = ""
    """How far this goes in what other replicas of a fleet have written (see lpr.fleet); "" says nothing."""


class Costs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Decide by a table of step times from now on."""

    table: dict[str, Any]
    """As StepTimes.to_json makes it."""
    given: bool = False
    """True if the user gave it: the times that steps really take then change nothing."""


class Configure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Decode further requests with other settings."""

    decode: DecodeConfig
    keep_drafts: bool = False
    """Keep the learned outputs, unless `trie_capacity` changes; else they are forgotten."""


class TakeIn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Go on together with replicas that have loaded, after all other commands that came with this one."""

    replicas: list[int]
    """Their numbers (see lpr.dist.rendezvous)."""


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take no further requests; those submitted are completed."""


Command = Submit | Abort | Learn | Costs | Configure | TakeIn | Drain | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Command])


def encode(commands: Sequence[Command]) -> bytes:
    """Commands as bytes (MessagePack)."""
    return _encoder.encode(commands)


def decode(message: bytes) -> list[Command]:
    """The commands of `encode`; raises msgspec.MsgspecError for anything else."""
    return _decoder.decode(message)


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
