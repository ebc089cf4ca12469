"""What the front and the driver say to each other, over a local socket.

The front listens, the driver (rank 0) connects: so a front outlives its ranks, and the next driver finds it where it
was. What the front has got of each output is told by positions, in tokens and in characters: so a driver that takes
over sends what is beyond, and what comes twice is cut. Each message is a tagged struct in msgpack behind its length (4
bytes, big-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from lpr.config import SamplingParams
from lpr.fleet.counts import DraftCounts

PROTOCOL = 4
"""Version of these messages; a driver of another one is turned away."""
MAX_MESSAGE = 1 << 30
"""Longest message, in bytes: a length above this is noise, not a message."""


class Submit(msgspec.Struct, tag="submit", frozen=True, kw_only=True):
    """Front to driver: complete a prompt, or go on with one of a driver that was lost."""

    id: int
    prompt_ids: list[int]
    """The prompt, and behind it the tokens that were delivered already."""
    params: SamplingParams
    num_prompt: int | None = None
    """How many of `prompt_ids` are the prompt; None: all of them."""
    num_characters: int = 0
    """Characters of text that were delivered already: less than the delivered tokens show, if some were held back."""
    tenant: str = ""
    """Whose outputs this request may draft from and add to; "" is everybody's."""
    details: bool = False
    """Say of each token which draft source named it."""


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Front to driver: forget a request; nothing more is said about it."""

    id: int


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """Front to driver: a request's text is complete by rules that the engine does not know.

    The driver ends it as stopped, with a last chunk that says what it took.
    """

    id: int


class Resume(msgspec.Struct, tag="resume", frozen=True):
    """Front to driver: the first message to each; requests of an earlier driver go on, and are submitted next."""

    ids: list[int]
    """All that go on; what the ranks hold besides is not wanted any more."""
    tenants: list[str] = []
    """Whose outputs other replicas may have written already: those of the keys, or "" for everybody's."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Front to driver: end all ranks."""


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """Driver to front: the first message of a connection."""

    protocol: int
    pid: int
    epoch: int = 0
    """How often the ranks have re-formed since they were started; the driver of the latest epoch is the driver."""
    loaded: bool = False
    """Does it take over from a driver that was lost? Else the ranks start, and hold no request."""


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Driver to front: what start-up is doing."""

    stage: str
    done: int
    total: int


class Facts(msgspec.Struct, tag="ready", frozen=True, kw_only=True):
    """Driver to front: the ranks are ready, and this is what they serve."""

    model: str
    """Folder or hub id."""
    vocab_size: int
    max_length: int
    """Longest prompt plus output, in tokens."""
    max_batch_size: int
    """Requests that can run at once on these ranks; with others it changes (`Load.num_slots`)."""
    lp: int
    tp: int
    device: str
    dtype: str
    eos_token_ids: list[int]
    tokenizer: str
    """The fast tokenizer as JSON, exactly as the driver uses it; "" if the model has none that can be handed over."""
    special_tokens: dict[str, str] = {}
    """bos_token, eos_token and so on, for chat templates."""
    chat_templates: dict[str, str] = {}
    """Jinja source by name; "default" is the one without a name."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one emitted token, and of the most likely ones at its place."""

    logprob: float
    top: list[tuple[int, float]] = []


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """What a finished request took."""

    num_steps: int = 0
    num_fill_steps: int = 0
    num_cached: int = 0
    """Prompt tokens whose K/V an earlier request had left."""
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = []
    """Accepted drafted tokens by depth in the tree; the first is depth 1."""
    by_source: dict[str, tuple[int, int]] = {}
    """Drafted and accepted nodes by draft source."""
    num_tokens: int = 0
    """Tokens that these steps emitted: after a restart of the ranks only those that came since."""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to a request."""

    id: int
    token_ids: list[int]
    text: str
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    sources: list[str] | None = None
    usage: Usage | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id of `stop_token_ids`, that ended it; None for any other end."""
    start: int = 0
    """Tokens of the output before these."""
    start_character: int = 0
    """Characters of the output before this text."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy the engine is."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    """Share of the cache's positions in use, from 0 to 1."""
    num_steps: int = 0
    """Steps since the ranks started."""
    last_step: float = 0.0
    """Seconds since the last step ended; meaningful while requests run."""
    num_ranks: int = 0
    """Ranks at the last gather; 0 while there was none."""
    epoch: int = 0
    """How often the ranks have re-formed since they were started."""
    num_cached_prefixes: int = 0
    """Slots that retain the prefix of a finished request."""
    num_cached_tokens: int = 0
    """Tokens of these prefixes."""
    drafts: DraftCounts | None = None
    """What sharing drafts with other replicas has come to; None if none are shared."""
    num_slots: int = 0
    """Requests that can run at once on the ranks that there are now; 0 while unknown."""


class Stepped(msgspec.Struct, tag="step", frozen=True):
    """Driver to front: what one step added, to all requests."""

    chunks: list[Chunk]
    load: Load


class Pulse(msgspec.Struct, tag="pulse", frozen=True):
    """Driver to front, once a second: alive."""

    load: Load


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """Driver to front: the ranks cannot start, and why in one line; they end with code 2."""

    reason: str


ToDriver = Resume | Submit | Abort | Finish | Stop
ToFront = Hello | Loading | Facts | Stepped | Pulse | Refused

_encoder = msgspec.msgpack.Encoder()
_to_driver = msgspec.msgpack.Decoder(ToDriver)
_to_front = msgspec.msgpack.Decoder(ToFront)


class ProtocolError(RuntimeError):
    """The other end of the socket said something that is no message."""


def beyond(chunk: Chunk, num_tokens: int, num_characters: int) -> Chunk:
    """What of a chunk is behind the tokens and characters that were delivered already.

    Raises ProtocolError if something between them is missing.
    """
    cut, cut_text = num_tokens - chunk.start, num_characters - chunk.start_character
    if (chunk.token_ids and cut < 0) or (chunk.text and cut_text < 0):
        raise ProtocolError(f"request {chunk.id} goes on at token {chunk.start}, and {num_tokens} were delivered")
    if cut <= 0 and cut_text <= 0:
        return chunk
    return msgspec.structs.replace(
        chunk,
        token_ids=chunk.token_ids[max(0, cut) :],
        text=chunk.text[max(0, cut_text) :],
        logprobs=None if chunk.logprobs is None else chunk.logprobs[max(0, cut) :],
        sources=None if chunk.sources is None else chunk.sources[max(0, cut) :],
        start=num_tokens,
        start_character=num_characters,
    )


def frame(message: Any) -> bytes:
    """A message as bytes, its length in front."""
    body = _encoder.encode(message)
    return struct.pack(">I", len(body)) + body


def length_of(head: bytes) -> int:
    """The length that the 4 bytes before a message say; raises ProtocolError."""
    (length,) = struct.unpack(">I", head)
    if length > MAX_MESSAGE:
        raise ProtocolError(f"a message of {length} bytes")
    return int(length)


def read_to_driver(body: bytes) -> ToDriver:
    """A message of the front; raises ProtocolError."""
    return _read(_to_driver, body)


def read_to_front(body: bytes) -> ToFront:
    """A message of the driver; raises ProtocolError."""
    return _read(_to_front, body)


def _read(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, ValueError) as failure:
        raise ProtocolError(f"not a message: {failure}") from failure


class FrameReader:
    """Splits a stream of bytes into message bodies."""

    def __init__(self) -> None:
        """Start at a message's border."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that are complete with `data`; raises ProtocolError."""
        self._rest += data
        while len(self._rest) >= 4:
            end = 4 + length_of(bytes(self._rest[:4]))
            if len(self._rest) < end:
                return
            body = bytes(self._rest[4:end])
            del self._rest[:end]
            yield body
