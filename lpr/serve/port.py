"""Ports of the service: limits on the number of connections and on their idle time.

A connection waits for its client while the head or the body of a request is incomplete, between requests, and while the
client does not read the answer. Beyond the limit, a new connection replaces the one that has waited longest, so idle
clients exclude no one. A new connection gets a 503 only if all connections are being answered.

Set-up is deferred until a connection is readable (as with TCP_DEFER_ACCEPT): before, it is a socket and a reader. The
rest takes 0.25 ms or more, and is done for a few connections per turn of the event loop.

asyncio's own servers have no connection limit, do not expose unfinished TLS handshakes, and busy-loop without free file
descriptors.
"""

import asyncio
import contextlib
import os
import resource
import select
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable

from lpr.serve.connections import SECONDS, Connection, Waits, answer
from lpr.serve.errors import RETRY_AFTER

RESERVED_FILES = 128
"""File descriptors for the link to the ranks, child processes, files, refused connections and --metrics-port."""
FEWEST = 8  # connections that are accepted even if files are scarce
_ACCEPTS = 64  # connections that are accepted in one turn of the event loop
_SET_UPS = 8  # connections that are set up in one turn of the event loop
_HUNG_UP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
_MOST_REFUSED = 16  # most refused connections kept open until their client has read the answer
MOST_LINGERING = 32
"""Most connections that stay open after an early answer, because reading the rest of their bodies takes time."""
SWEEP_SECONDS = 0.5  # how often connections that have waited too long are ended


class Deferred:
    """A connection whose set-up waits for its first bytes."""

    __slots__ = ("fd", "loop", "socket")

    def __init__(self, accepted: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.socket, self.loop = accepted, loop
        self.fd = accepted.fileno()

    def poll(self) -> int:
        """POLLIN if bytes have come, and _HUNG_UP if the client has closed its side, where the system tells that.

        As everywhere in the service, a client that sends no more is taken for one that has gone.
        """
        events = select.poll()
        events.register(self.fd, select.POLLIN | _HUNG_UP)
        return sum(seen for _, seen in events.poll(0))

    def end(self) -> None:
        self.loop.remove_reader(self.fd)
        self.socket.close()


AnyConnection = Connection | Deferred


class Port:
    def __init__(self, listening: socket.socket, most: int, tls: ssl.SSLContext | None = None) -> None:
        self.most = most
        self.number: int = listening.getsockname()[1]
        self._socket = listening
        self._tls = tls
        self._open: set[AnyConnection] = set()
        self._waiting: dict[AnyConnection, float] = {}  # deadline by connection; the first has waited longest
        self._readable: deque[Deferred] = deque()  # connections ready for set-up
        self._most_readable = max(1, most // 2)  # accepting pauses at this number of them
        self._is_paused = False
        self._lingering: set[AnyConnection] = set()
        self._handshakes: dict[AnyConnection, asyncio.Task[None]] = {}
        self._refused: deque[socket.socket] = deque()
        self._sweeping: asyncio.TimerHandle | None = None
        self.is_closed = False
        self.on_end: Callable[[str], None] = lambda reason: None
        """Called when a connection is "refused", "replaced" by a new one, or "late"."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def may_linger(self) -> bool:
        """True if a connection may stay open after an early answer, so that its client can read it."""
        return not self.is_closed and len(self._lingering) < MOST_LINGERING

    @property
    def num_answered(self) -> int:
        return len(self._open) - len(self._waiting)

    def open(self, make: Callable[[], Connection]) -> None:
        """Begin to accept connections; `make` returns the protocol of each."""
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._accept)
        self._sweep()

    def close(self) -> None:
        """Accept no more connections, and end those that are in a TLS handshake or are not set up."""
        self.is_closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._loop.remove_reader(self._socket)
        self._socket.close()
        for connection in [each for each in self._open if each in self._handshakes or isinstance(each, Deferred)]:
            self._end(connection)
        self._readable.clear()
        while self._refused:
            self._refused.popleft().close()

    # Called by connections.

    def wait(self, connection: AnyConnection, waits: Waits) -> None:
        if connection in self._open:
            self._waiting.pop(connection, None)
            self._waiting[connection] = self._loop.time() + SECONDS[waits]
            if waits is Waits.LINGER:
                self._lingering.add(connection)

    def work(self, connection: AnyConnection) -> None:
        self._waiting.pop(connection, None)

    def lost(self, connection: AnyConnection) -> None:
        self._waiting.pop(connection, None)
        self._open.discard(connection)
        self._lingering.discard(connection)

    # Within.

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            if self._is_paused:
                return
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as failure:
                self._exhausted(failure)
                return
            accepted.setblocking(False)
            if len(self._open) < self.most or self._end_longest_waiting():
                self._defer(accepted)
            else:
                self._refuse(accepted)

    def _defer(self, accepted: socket.socket) -> None:
        """Wait for a connection's first bytes; with TLS set it up at once, for the handshake."""
        if self._tls is not None:
            self._set_up(accepted)
            return
        deferred = Deferred(accepted, self._loop)
        self._open.add(deferred)
        self.wait(deferred, Waits.HEAD)
        if not self._on_readable(deferred):  # most clients have sent their request already
            self._loop.add_reader(deferred.fd, self._on_readable, deferred)

    def _on_readable(self, deferred: Deferred) -> bool:
        """Queue a readable connection for set-up, or close one whose client has gone; False if it is neither."""
        events = deferred.poll()
        if events & _HUNG_UP:
            self._end(deferred)
        elif events:
            self._loop.remove_reader(deferred.fd)
            self.work(deferred)
            self._readable.append(deferred)
            if len(self._readable) == 1:
                self._loop.call_soon(self._set_up_some)
            if len(self._readable) >= self._most_readable and not self._is_paused:
                self._is_paused = True
                self._loop.remove_reader(self._socket)
        return events != 0

    def _set_up_some(self) -> None:
        """Set up readable connections: three of the newest, then the oldest.

        So a client waits neither for hundreds of connections opened at once before it, nor for all later ones.
        """
        count = min(_SET_UPS, len(self._readable))
        if len(self._readable) > count:  # first, so that an error below does not stop the others
            self._loop.call_soon(self._set_up_some)
        for number in range(count):
            deferred = self._readable.popleft() if number % 4 == 3 else self._readable.pop()
            self.lost(deferred)
            self._set_up(deferred.socket)
        if self._is_paused and len(self._readable) < self._most_readable:
            self._is_paused = False
            self._resume()

    def _set_up(self, accepted: socket.socket) -> None:
        """Set up a connection. With TLS it waits for its client at once; else its client waits for it."""
        connection = self._make()
        connection.socket = accepted
        self._open.add(connection)
        if self._tls is not None:
            connection.waits = Waits.HEAD
            self.wait(connection, Waits.HEAD)
        task = self._handshakes[connection] = self._loop.create_task(self._connect(connection, accepted))

        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled():  # before it ran
                self._handshakes.pop(connection, None)
                accepted.close()

        task.add_done_callback(ended)

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        """Make the connection's transport; with TLS this takes as long as the handshake."""
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

    def _end(self, connection: AnyConnection) -> None:
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
        """Out of file descriptors: lower the limit, and pause accepting, or the event loop would spin."""
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
        now = self._loop.time()
        for connection in [each for each, until in self._waiting.items() if until < now]:
            self.on_end("late")
            self._end(connection)
        self._sweeping = self._loop.call_later(SWEEP_SECONDS, self._sweep)


def room(wanted: int) -> int:
    """The possible number of connections, up to `wanted`; raises the process's limit of open files if allowed."""
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
