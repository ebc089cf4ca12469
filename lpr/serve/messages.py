"""The messages between the front and the driver, over a local socket.

The front listens and the driver (rank 0) connects, so a front outlives its ranks and finds the next driver. Each
message is a tagged struct in msgpack, preceded by its length (4 bytes, big-endian). Requests and chunks are those of
lpr.protocol. A chunk carries its offsets in the output: after a change of drivers the front cuts off what it has.
"""

import ctypes
import os
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from lpr.fleet.counts import DraftCounts
from lpr.protocol import Abort, Chunk, ProtocolError, Stop, Submit

PROTOCOL = 10  # Version of these messages. A driver of another version is refused.
MAX_MESSAGE = 1 << 30  # Longest message in bytes. A greater length is noise.


class Message(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Base of the messages."""


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that requests may name."""

    name: str
    path: str  # its folder, on the machines of the ranks
    digest: str  # of its files


class LoadAdapter(Message, frozen=True):
    """Front to driver: load an adapter, in the place of one of that name."""

    name: str
    path: str


class UnloadAdapter(Message, frozen=True):
    """Front to driver: take no further requests for an adapter."""

    name: str


class Adapters(Message, frozen=True):
    """Driver to front: all adapters that there are, after a change of the one of a `name`, or its `failure`."""

    adapters: list[Adapter]
    name: str
    failure: str | None = None


class Finish(Message, frozen=True):
    """Front to driver: end a request as stopped, by rules that the engine does not know. A last chunk has its usage."""

    id: int


class Resume(Message, frozen=True):
    """Front to driver: the first message. The requests of an earlier driver go on, and are submitted next."""

    ids: list[int]  # all that go on. The driver aborts all others.
    adapters: list[Adapter] | None = None  # all that requests may name; None: those of the driver
    tenants: list[str] = []  # tenants whose outputs other replicas may have written already


class Hello(Message, frozen=True):
    """Driver to front: the first message of a connection."""

    protocol: int
    pid: int
    epoch: int = 0  # how often the ranks have re-formed since they were started. The driver of the latest epoch counts.
    loaded: bool = False  # true if it takes over from a lost driver. Otherwise the ranks start and hold no request.


class Loading(Message, frozen=True):
    """Driver to front: the stage of start-up."""

    stage: str
    done: int
    total: int


class Facts(Message, frozen=True, kw_only=True):
    """Driver to front: the ranks are ready; describes what they serve."""

    model: str  # folder or hub id
    vocab_size: int
    max_length: int  # longest prompt plus output, in tokens
    max_batch_size: int  # requests that can run at once on these ranks. It changes with the ranks (`Load.num_slots`).
    page_size: int  # tokens of a page of the KV cache
    num_pages: int  # of each rank, or of all together where each serves requests of its own
    lp: int
    tp: int
    device: str
    dtype: str
    eos_token_ids: list[int]
    tokenizer: str  # JSON of the fast tokenizer that the driver uses
    special_tokens: dict[str, str] = {}  # bos_token, eos_token and so on, for chat templates
    chat_templates: dict[str, str] = {}  # Jinja source by name; "default" is the one without a name
    adapters: list[Adapter] = []
    generation: dict[str, int | float] = {}
    """Numbers of the model's generation_config.json, such as temperature and top_p."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """The state of the engine."""

    running: list[int] = []  # ids of the requests in slots
    kv_usage: float = 0.0  # share of the KV cache's pages that running requests hold, from 0 to 1
    num_steps: int = 0  # steps since the ranks started
    last_step: float = 0.0  # seconds since the last step ended; meaningful while requests run
    num_ranks: int = 0  # ranks at the last gather; 0 before the first
    epoch: int = 0  # how often the ranks have re-formed since they were started
    num_cached_pages: int = 0  # pages that only the prefix cache holds
    num_cached_tokens: int = 0  # tokens in the prefix cache
    drafts: DraftCounts | None = None  # counts of draft sharing with other replicas; None if it is off
    num_slots: int = 0  # requests that can run at once on the present ranks; 0 while unknown
    num_preemptions: int = 0  # times that a request gave its pages to others, since the ranks started
    num_recomputed: int = 0  # tokens of these requests whose K/V was computed again
    num_swapped_pages: int = 0  # pages of the KV cache in host memory
    num_swapped: tuple[int, int] = (0, 0)  # pages that have gone to host memory and come back


class Stepped(Message, frozen=True):
    """Driver to front: the result of one step for all requests."""

    chunks: list[Chunk]
    load: Load


class Pulse(Message, frozen=True):
    """Driver to front: alive. Sent every second, and before the first step of a request."""

    load: Load


class Refused(Message, frozen=True):
    """Driver to front: the ranks cannot start, for a `reason` of one line. They end with code 2."""

    reason: str


ToDriver = Resume | Submit | Abort | Finish | LoadAdapter | UnloadAdapter | Stop
ToFront = Hello | Loading | Facts | Stepped | Pulse | Adapters | Refused


def is_ours(connected: socket.socket) -> bool:
    """True if the process at the other end of a Unix socket is one of this user."""
    if sys.platform == "linux":
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        user: int = struct.unpack("3i", credentials)[1]  # process, user, group
        return user == os.geteuid()
    users = ctypes.c_uint32(), ctypes.c_uint32()  # macOS and the BSDs
    found = ctypes.CDLL(None).getpeereid(connected.fileno(), *map(ctypes.byref, users))
    return found == 0 and users[0].value == os.geteuid()


def frame(message: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack(">I", len(body)) + body


class FrameReader:
    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that are complete with `data`; raises ProtocolError."""
        self._rest += data
        while len(self._rest) >= 4:
            (length,) = struct.unpack_from(">I", self._rest)
            if length > MAX_MESSAGE:
                raise ProtocolError(f"a message of {length} bytes")
            if len(self._rest) < 4 + length:
                return
            body = bytes(self._rest[4 : 4 + length])
            del self._rest[: 4 + length]
            try:
                message = self._decoder.decode(body)
            except (msgspec.DecodeError, ValueError) as failure:
                raise ProtocolError(f"not a message: {failure}") from failure
            yield message
