"""Connections of the service: read limits and wait states. lpr.serve.port counts connections."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import weakref
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lpr.serve import limits
from lpr.serve.errors import error_body

if TYPE_CHECKING:
    from lpr.serve.port import Port

_READ, _READ_LITTLE = 16 << 10, 1 << 10
"""Most bytes read per connection and turn of the event loop: of a body, and of data that may be many small chunks."""
GONE = "lpr.gone"  # extension of a request's scope: a function that returns True if its client has gone
_END_OF_HEAD = re.compile(rb"[^\r\n]\r?\n\r?\n")


class Waits(Enum):
    HEAD = auto()
    IDLE = auto()
    BODY = auto()
    UNREAD = auto()
    LINGER = auto()  # waits for the client to read an early answer, which an immediate close would discard


SECONDS = {
    Waits.HEAD: float(limits.HEAD_SECONDS.most),
    Waits.IDLE: float(limits.IDLE_SECONDS.most),
    Waits.BODY: limits.BODY_SECONDS.most + 1.0,  # the application has its own limit, with an answer for it
    Waits.UNREAD: float(limits.UNREAD_SECONDS.most),
    Waits.LINGER: 3.0,
}
"""Time limits of the wait states in seconds."""


class Connection(asyncio.BufferedProtocol, HttpToolsProtocol):  # type: ignore[misc]
    """One connection. It reads little at a time, limits bytes outside of bodies, and tells its port when it waits."""

    _buffer = bytearray(_READ)  # of all connections: its bytes are copied before the next one reads

    def __init__(self, *args: Any, port: Port, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._port = port
        self._head = bytearray()  # the incomplete head, and what came with its end
        self._head_size = 0
        self._besides = 0  # bytes since the head outside of the body: a pipelined request, or chunk headers
        self._body = self._framing = 0  # bytes of the body so far, and of what surrounds its pieces
        self._is_ahead = False  # True if the client has sent too many requests ahead of their answers
        self.socket: socket.socket | None = None
        self.waits: Waits | None = None

    def get_buffer(self, sizehint: int) -> memoryview:
        """The buffer of the next read; small, so that one client cannot block the event loop."""
        is_little = self._is_between_requests or self._besides or self._is_in_pieces
        return memoryview(self._buffer)[: _READ_LITTLE if is_little else _READ]

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        self._port.lost(self)
        super().connection_lost(exc)
        # Break reference cycles: collecting thousands of them at once would block the event loop.
        self._unset_keepalive_if_required()
        self.cycle = self.scope = None  # type: ignore[assignment]
        self.transport.forget()  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        """Pass `data` to uvicorn, unless a limit is exceeded or the data is unwanted."""
        if self.transport.is_closing():
            return
        if self._is_between_requests:
            if not self._fits(data):
                most = f"{limits.HEAD.most} bytes and {limits.HEADERS.most} headers"
                self.transport.write(answer(431, f"the head of the request is larger than {most}"))
                self.transport.close()
                return
            super().data_received(data)
            if not self._is_between_requests and self.cycle.more_body:
                self._body = len(self.cycle.body)
                self._framing = max(0, len(self._head) - self._head_size - self._body)
        else:
            before, is_body = len(self.cycle.body), self.cycle.more_body
            super().data_received(data)
            grown = len(self.cycle.body) - before
            self._besides = 0 if grown else self._besides + len(data)
            if is_body:
                self._body, self._framing = self._body + grown, self._framing + len(data) - grown
            if self._besides > limits.HEAD.most:
                self.transport.abort()
            elif self._is_in_pieces and self._framing > limits.FRAMING.most:
                if not self.cycle.response_started:
                    self.transport.write(answer(400, "the pieces of the body are too small"))
                self.transport.close()
        if not self._is_between_requests:  # lets the application detect a closed connection before it starts work
            scope: Any = self.cycle.scope
            scope["extensions"] = {GONE: self.is_gone}
        self.note()

    def is_gone(self) -> bool:
        """True if the client has closed the connection, even if the event loop has not noticed yet."""
        try:
            return self.socket is not None and self.socket.recv(1, socket.MSG_PEEK) == b""
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def on_message_begin(self) -> None:
        """Begin a request, before the previous one is answered if the client has sent it already."""
        if len(self.pipeline) >= limits.AHEAD.most:
            self._is_ahead = True
            raise ValueError("too many requests ahead of their answers")  # uvicorn answers 400
        super().on_message_begin()

    def on_response_complete(self) -> None:
        """Wait for the next request. A body that was not read ends the connection."""
        self._besides = self._body = self._framing = 0
        super().on_response_complete()
        if self.cycle is not None and self._is_between_requests and self.cycle.more_body:
            self.transport.close()
        self.note()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.note()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.note()

    def end(self) -> None:
        """End now, with a 408 for an incomplete head."""
        if self._head and not self.transport.is_closing():
            self.transport.write(answer(408, "the head of the request did not arrive in time"))
        self.transport.abort()

    @property
    def _is_in_pieces(self) -> bool:
        """True if a body arrives in chunks of less than about 40 bytes, which cost the event loop too much."""
        return self._framing > self._body // 8

    @property
    def may_linger(self) -> bool:
        """True if the connection should stay open after an answer that came early, amid a request."""
        is_sending = self._is_ahead or bool(self._head) or (self.cycle is not None and self.cycle.more_body)
        return is_sending and self._port.may_linger

    def note(self) -> None:
        """Report the current wait state to the port."""
        if not self._is_between_requests:
            self._head.clear()
        before, self.waits = self.waits, self._waits_for()
        if self.waits is None and before is not None:
            self._port.work(self)
        elif self.waits is not None and self.waits is not before:
            self._port.wait(self, self.waits)

    @property
    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _waits_for(self) -> Waits | None:
        """What the connection waits for; None while it is being answered."""
        if self.transport.is_closing():
            return Waits.UNREAD if self.transport.get_write_buffer_size() else Waits.LINGER
        if self.flow.write_paused:
            return Waits.UNREAD
        if self._is_between_requests:
            return Waits.HEAD if self._head or self.cycle is None else Waits.IDLE
        return Waits.BODY if self.cycle.more_body else None

    def _fits(self, data: bytes) -> bool:
        """Add `data` to the head; returns False if it is too large."""
        begin = max(0, len(self._head) - 4)
        self._head += data
        found = _END_OF_HEAD.search(self._head, begin)
        size = self._head_size = found.end() if found else len(self._head)
        return size <= limits.HEAD.most and self._head.count(b"\n", 0, size) <= limits.HEADERS.most + 2


class _Transport:
    """A transport with a lingering close: it shuts down its writing side, and waits for the client to close."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = weakref.proxy(connection)
        self._is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def forget(self) -> None:
        """Break asyncio's reference cycle of a transport when the connection is lost."""
        vars(self._transport).pop("_read_ready_cb", None)

    def write(self, data: bytes) -> None:
        if not self._is_lingering:
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if self._connection.may_linger:
            self._is_lingering = True
            self._connection.flow.resume_reading()
            if self._transport.can_write_eof():
                self._transport.write_eof()
        else:
            self._transport.close()
        self._connection.note()


def answer(status: int, message: str, retry_after: int | None = None) -> bytes:
    """An error response as bytes, written without the application; closes the connection."""
    body = json.dumps(error_body(status, message)).encode()
    retry = f"Retry-After: {retry_after}\r\n" if retry_after is not None else ""
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n".encode() + body
