"""Connections of the service: how many there are, and how long each may wait for its client.

A connection waits for its client while the head or the body of a request is incomplete, between requests, and while the
client does not take the answer. Beyond the limit, a new connection takes the place of the one that has waited longest.
So idle clients keep nobody out. Only if all connections are being answered, a new one gets a 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from lpr.serve import limits
from lpr.serve.errors import RETRY_AFTER, error_body

if TYPE_CHECKING:
    _Base = H11Protocol
else:
    _Base = asyncio.BufferedProtocol

RESERVED_FILES = 128
"""File descriptors for the link to the ranks, child processes, files, refused connections and --metrics-port."""
FEWEST = 8
"""Connections that are accepted even if files are scarce."""
_READ = 16 << 10
"""Bytes that one connection may bring in one turn of the event loop."""
_ACCEPTS = 16
"""Connections that are accepted in one turn of the event loop."""
_MOST_REFUSED = 16
"""Refused connections that stay open until their client has read why."""
SWEEP_SECONDS = 0.5
"""How often connections that have waited too long are ended."""
_END_OF_HEAD = re.compile(rb"[^\r\n]\r?\n\r?\n")


class Waits(Enum):
    """What a connection waits for."""

    HEAD = auto()
    IDLE = auto()
    BODY = auto()
    UNREAD = auto()
    LINGER = auto()
    """For the client to read an answer that came before the end of its body. A close at once would discard it."""


SECONDS = {
    Waits.HEAD: float(limits.HEAD_SECONDS.most),
    Waits.IDLE: float(limits.IDLE_SECONDS.most),
    Waits.BODY: limits.BODY_SECONDS.most + 1.0,  # the application has its own limit, with an answer for it
    Waits.UNREAD: float(limits.UNREAD_SECONDS.most),
    Waits.LINGER: 3.0,
}
"""How long a connection waits."""


class Port:
    """A listening socket and its connections."""

    def __init__(self, listening: socket.socket, most: int, tls: ssl.SSLContext | None = None) -> None:
        """Accept up to `most` connections at `listening`."""
        self.most = most
        self.number: int = listening.getsockname()[1]
        self._socket = listening
        self._tls = tls
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, float] = {}  # until when; the first has waited longest
        self._handshakes: dict[Connection, asyncio.Task[None] | None] = {}
        self._refused: deque[socket.socket] = deque()
        self._sweeping: asyncio.TimerHandle | None = None
        self.is_closed = False
        self.on_end: Callable[[str], None] = lambda reason: None
        """Called when a connection is "refused", "replaced" by a new one, or "late"."""

    @property
    def num_waiting(self) -> int:
        """Connections that wait for their client."""
        return len(self._waiting)

    @property
    def num_answered(self) -> int:
        """Connections that are being answered."""
        return len(self._open) - len(self._waiting)

    def open(self, make: Callable[[], Connection]) -> None:
        """Begin to accept connections; `make` returns the protocol of each."""
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._accept)
        self._sweep()

    def close(self) -> None:
        """Accept no more connections, and end those that are in a TLS handshake."""
        self.is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._loop.remove_reader(self._socket)
        self._socket.close()
        for connection in list(self._handshakes):
            self._end(connection)
        while self._refused:
            self._refused.popleft().close()

    # Called by connections.

    def wait(self, connection: Connection, waits: Waits) -> None:
        """The connection waits for its client from now on."""
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = self._loop.time() + SECONDS[waits]

    def work(self, connection: Connection) -> None:
        """The connection is being answered."""
        self._waiting.pop(connection, None)

    def lost(self, connection: Connection) -> None:
        """The connection has ended."""
        self._waiting.pop(connection, None)
        self._open.discard(connection)

    # Within.

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as failure:
                self._exhausted(failure)
                return
            accepted.setblocking(False)
            if len(self._open) < self.most or self._end_longest_waiting():
                connection = self._make()
                self._open.add(connection)
                self._loop.create_task(self._connect(connection, accepted))
            else:
                self._refuse(accepted)

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        """Make the connection's transport; with TLS this takes as long as the handshake."""
        self.wait(connection, Waits.HEAD)
        self._handshakes[connection] = asyncio.current_task()
        seconds = SECONDS[Waits.HEAD] if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except (OSError, asyncio.CancelledError):  # the client left, is too slow, or speaks no TLS
            self.lost(connection)
        finally:
            self._handshakes.pop(connection, None)

    def _end_longest_waiting(self) -> bool:
        """Make room for a connection; returns False if all are being answered."""
        connection = next(iter(self._waiting), None)
        if connection is not None:
            self.on_end("replaced")
            self._end(connection)
        return connection is not None

    def _end(self, connection: Connection) -> None:
        self.lost(connection)
        task = self._handshakes.get(connection)
        if task is not None:
            task.cancel()
        else:
            connection.end()

    def _refuse(self, accepted: socket.socket) -> None:
        """Answer 503, without a protocol. The socket stays open for a second, so that the client can read it."""
        self.on_end("refused")
        with contextlib.suppress(OSError):
            if self._tls is None:
                accepted.send(answer(503, "all connections of this service are in use", RETRY_AFTER))
                accepted.shutdown(socket.SHUT_WR)
                self._refused.append(accepted)
                self._loop.call_later(1.0, accepted.close)
                if len(self._refused) > _MOST_REFUSED:
                    self._refused.popleft().close()
                return
        accepted.close()

    def _exhausted(self, failure: OSError) -> None:
        """There are no file descriptors left: allow fewer connections. Without a pause the event loop would spin."""
        self.most = max(FEWEST, len(self._open) - 1)
        self._end_longest_waiting()
        message = f"{failure.strerror}; from now on at most {self.most} connections"
        print(f"lpr.serve: port {self.number}: {message}", file=sys.stderr, flush=True)
        self._loop.remove_reader(self._socket)
        self._loop.call_later(SWEEP_SECONDS, self._resume)

    def _resume(self) -> None:
        if not self.is_closed:
            self._loop.add_reader(self._socket, self._accept)

    def _sweep(self) -> None:
        """End connections that have waited too long."""
        now = self._loop.time()
        for connection in [each for each, until in self._waiting.items() if until < now]:
            self.on_end("late")
            self._end(connection)
        self._sweeping = self._loop.call_later(SWEEP_SECONDS, self._sweep)


class Connection(_Base):
    """One connection; a class of uvicorn follows it in the order of bases.

    It reads little at a time, counts what comes besides bodies, and tells its port when it waits for the client.
    """

    _buffer = bytearray(_READ)  # of all connections: its bytes are copied before the next one reads

    def __init__(self, *args: Any, port: Port, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._port = port
        self._head = bytearray()
        """The incomplete head."""
        self._besides = 0
        """Bytes since the head that were no body: a next request, or what surrounds the pieces of a body."""
        self._waits: Waits | None = Waits.HEAD

    def get_buffer(self, sizehint: int) -> bytearray:
        """Where the next bytes go; small, so that one client cannot hold up the event loop."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` were read."""
        self.data_received(bytes(memoryview(self._buffer)[:nbytes]))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin."""
        super().connection_made(_Transport(transport, self))  # type: ignore[arg-type]

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._port.lost(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Give `data` to uvicorn, unless it is too much or unwanted."""
        if self.transport.is_closing():
            return
        if self._is_between_requests:
            if not self._fits(data):
                most = f"{limits.HEAD.most} bytes and {limits.HEADERS.most} headers"
                self.transport.write(answer(431, f"the head of the request is larger than {most}"))
                self.transport.close()
                return
            super().data_received(data)
        else:
            before = len(self.cycle.body)
            super().data_received(data)
            self._besides = 0 if len(self.cycle.body) > before else self._besides + len(data)
            if self._besides > limits.HEAD.most:
                self.transport.abort()
        self.note()

    def on_response_complete(self) -> None:
        """Wait for the next request. A body that was not read ends the connection."""
        self._besides = 0
        super().on_response_complete()
        if self._is_between_requests and self.cycle.more_body:
            self.transport.close()
        self.note()

    def pause_writing(self) -> None:
        """The client takes less than it is sent."""
        super().pause_writing()
        self.note()

    def resume_writing(self) -> None:
        """The client has taken what it was sent."""
        super().resume_writing()
        self.note()

    def end(self) -> None:
        """End now, with a 408 for an incomplete head."""
        if self._head and not self.transport.is_closing():
            self.transport.write(answer(408, "the head of the request did not arrive in time"))
        self.transport.abort()

    @property
    def is_sending(self) -> bool:
        """True if the client is in the middle of a request, unless the service ends."""
        return not self._port.is_closed and (bool(self._head) or (self.cycle is not None and self.cycle.more_body))

    def note(self) -> None:
        """Tell the port what the connection waits for now."""
        if not self._is_between_requests:
            self._head.clear()
        waits = self._waits_for()
        if waits is self._waits:
            return
        self._waits = waits
        if waits is None:
            self._port.work(self)
        else:
            self._port.wait(self, waits)

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
        size = found.end() if found else len(self._head)
        return size <= limits.HEAD.most and self._head.count(b"\n", 0, size) <= limits.HEADERS.most + 2


class _Transport:
    """A transport that closes as HTTP asks: first it says that it sends no more, then the client closes."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport = transport
        self._connection = connection
        self._is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._is_lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing():
            return
        if self._connection.is_sending:
            self._is_lingering = True
            self._connection.flow.resume_reading()
            if self._transport.can_write_eof():
                self._transport.write_eof()
        else:
            self._transport.close()
        self._connection.note()


class H11Connection(Connection, H11Protocol):
    """A connection whose requests h11 reads."""


KINDS: dict[str, type[Connection]] = {"h11": H11Connection}
"""Classes of connections by the name of their parser."""
with contextlib.suppress(ImportError):
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    class HttpToolsConnection(Connection, HttpToolsProtocol):  # type: ignore[misc]
        """A connection whose requests httptools reads."""

    KINDS["httptools"] = HttpToolsConnection


def answer(status: int, message: str, retry_after: int | None = None) -> bytes:
    """An error as bytes that no application has to write. The connection ends after it."""
    body = json.dumps(error_body(status, message)).encode()
    retry = f"Retry-After: {retry_after}\r\n" if retry_after is not None else ""
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{retry}Connection: close\r\n\r\n".encode() + body


def room(wanted: int) -> int:
    """How many of the wanted connections this process can have. Raises its limit of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = RESERVED_FILES
    need = wanted + used + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return max(FEWEST, min(wanted, soft - used - RESERVED_FILES))
    return wanted
