"""The commands: every change of the ranks' work, in one totally ordered log.

The driver (world rank 0) orders the commands, and every rank applies them after the same step. The command line,
`generate`, `stream`, a service, learned outputs and measured step times all become commands.

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
    """Add documents to a suffix index, like finished outputs."""

    history: bytes
    """int32 tokens (possibly millions), documents separated by END."""
    replace: bool = False
    """Clear the shared suffix index first."""
    tenant: str = ""
    """The tenant whose requests may draft from the documents; "": all tenants."""
    read_to: str = ""
    """Position of the last document in the stream of other replicas (see lpr.fleet); "" if there is none."""


class Compile(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compile a grammar while steps run, for a request that follows."""

    grammar: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load an adapter on all ranks, or on none if one of them cannot."""

    name: str
    path: str
    """Its folder, which all ranks read."""
    digest: str
    """The expected digest of its files."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Refuse further requests for an adapter."""

    name: str


class Costs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Use other step times from now on."""

    table: dict[str, Any]
    """From StepTimes.to_json."""
    given: bool = False
    """True if the user gave the table; measured times then do not change it."""


class Configure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Decode further requests with other settings."""

    decode: DecodeConfig
    keep_drafts: bool = False
    """Keep the learned outputs, unless `trie_capacity` changes; else drop them."""


class TakeIn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Add loaded replicas to the mesh, after all other commands of the same message."""

    replicas: list[int]
    """Their numbers (see lpr.dist.rendezvous)."""
    beside: int = 0
    """The plan whose group they have connected with the mesh (Membership.invite)."""


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Refuse further requests. Those submitted are completed."""


Command = Submit | Abort | Learn | Compile | LoadAdapter | UnloadAdapter | Costs | Configure | TakeIn | Drain | Stop

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

    def pop(self) -> Command | None:
        """With one rank: remove and return the next command; None if there is none."""
        if self._message:  # left from a mesh with more ranks
            self._waiting[:0], self._message = decode(self._message), b""
        return self._waiting.pop(0) if self._waiting else None

    def put_back(self, command: Command) -> None:
        """Put a command of `pop` that could not be applied back at the front."""
        self._waiting.insert(0, command)

    def announce(self) -> int:
        """Bytes of the commands that the running step's header announces; later ones wait for the next step."""
        if not self._message and self._waiting:
            waiting, self._waiting = self._waiting, []  # Python's collector may post more meanwhile
            self._message = encode(waiting)
        return len(self._message)

    def receive(self, num_bytes: int) -> list[Command]:
        """On every rank: the commands that the driver announced with `num_bytes`; none for 0."""
        if not num_bytes:
            return []
        message, self._message = self._message, b""
        received = self._comm.broadcast(message, num_bytes)
        return decode(received) if received else []  # empty if the driver was lost after its announcement

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
