"""The commands: everything that changes the work of the ranks, in one totally ordered log.

The driver (world rank 0) orders the commands, and every rank applies them after the same step. The command line,
`generate`, `stream`, a service, learned outputs and measured step times all become commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from lpr.config import DecodeConfig
from lpr.core.suffix_index import END
from lpr.protocol import Abort, Stop, Submit


class Learn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Add documents to a suffix index, as if they had just been decoded."""

    history: bytes
    """int32 tokens, documents separated by END. There can be millions."""
    replace: bool = False
    """Clear the shared suffix index first."""
    tenant: str = ""
    """The tenant whose requests may draft from them; "": all."""
    read_to: str = ""
    """Position of the last document in the stream of other replicas (see lpr.fleet); "" if there is none."""


class Costs(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Use other step times from now on."""

    table: dict[str, Any]
    """From StepTimes.to_json."""
    given: bool = False
    """True if the user gave it. Then measured times do not change it."""


class Configure(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Decode further requests with other settings."""

    decode: DecodeConfig
    keep_drafts: bool = False
    """Keep the learned outputs, unless `trie_capacity` changes; else they are forgotten."""


class TakeIn(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take replicas that have loaded into the mesh, after all other commands of the same message."""

    replicas: list[int]
    """Their numbers (see lpr.dist.rendezvous)."""


class Drain(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Refuse further requests. Those submitted are completed."""


Command = Submit | Abort | Learn | Costs | Configure | TakeIn | Drain | Stop

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Command])


def encode(commands: Sequence[Command]) -> bytes:
    """Commands as bytes (MessagePack)."""
    return _encoder.encode(commands)


def decode(message: bytes) -> list[Command]:
    """The commands of `encode`; raises msgspec.MsgspecError for anything else."""
    return _decoder.decode(message)


def learn(documents: Sequence[Sequence[int]]) -> Learn:
    """The command to let all requests draft from `documents` too."""
    return Learn(b"".join([np.array([*document, END], np.int32).tobytes() for document in documents if len(document)]))
