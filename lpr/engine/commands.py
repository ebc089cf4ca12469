"""The commands: everything that changes what the ranks do, in one totally ordered log.

The driver (world rank 0) puts commands in order, one codec carries them, and every rank, the driver included, applies
them by the same `Replica.apply` after the same step. There is no second way in: the command line, `generate`, `stream`,
a service, learnt outputs, tries and measured step times all become commands.
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
    """Did the user give it? Then the times that steps really take change nothing."""


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


def learn(documents: Sequence[Sequence[int]]) -> Learn:
    """The command to draft from `documents` too, for all."""
    return Learn(b"".join([np.array([*document, END], np.int32).tobytes() for document in documents if len(document)]))
