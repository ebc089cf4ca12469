"""The front's end of the socket to the driver; the latest connected driver is used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from lpr.protocol import ProtocolError
from lpr.serve.messages import PROTOCOL, FrameReader, Hello, ToDriver, ToFront, frame, is_ours

_FAREWELL = 1.0  # seconds for what was sent last to leave


class Link:
    def __init__(self, receive: Callable[[ToFront], None], lost: Callable[[], None]) -> None:
        """`receive` is called with every message, Hello included, and `lost` when a driver's connection ends."""
        self._receive = receive
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._driver: _Connection | None = None
        self._open: set[_Connection] = set()
        self._epoch = -1
        self._path: Path | None = None

    async def listen(self, path: Path) -> None:
        """Listen at a Unix socket for the drivers of one start of the ranks. Only the owner may connect.

        Each start has its own socket, so that no process of an earlier start can reach the front.
        """
        await self.close()
        self._path, self._epoch = path, -1
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _Connection(self), path)
        path.chmod(0o600)

    def send(self, message: ToDriver) -> None:
        if self._driver is not None:
            self._driver.transport.write(frame(message))

    def hang_up(self) -> None:
        """Drop the driver and ignore its further messages."""
        if self._driver is not None:
            self._driver.transport.close()
            self._driver = None
            self._lost()

    async def close(self) -> None:
        """Stop listening, and close connections once what was sent has left."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.hang_up()
        for connection in self._open:
            connection.transport.close()
        if self._open:
            await asyncio.wait([each.closed for each in self._open], timeout=_FAREWELL)
        for connection in self._open:  # a stopped process reads nothing: abort
            connection.transport.abort()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def take(self, message: ToFront, connection: _Connection) -> None:
        """Take a message of a connection; raises ProtocolError."""
        if connection is self._driver:
            self._receive(message)
        elif not connection.greeted:
            self._greet(message, connection)

    def _greet(self, message: ToFront, connection: _Connection) -> None:
        """Replace the driver by one of a later epoch; raises ProtocolError if it is not."""
        if not isinstance(message, Hello) or message.protocol != PROTOCOL:
            raise ProtocolError("a driver of another version of lpr")
        if message.epoch < self._epoch or (message.epoch == self._epoch and self._driver is not None):
            raise ProtocolError("a driver of an earlier epoch, or a stranger")
        connection.greeted = True
        self.hang_up()
        self._driver, self._epoch = connection, message.epoch
        self._receive(message)

    def opened(self, connection: _Connection) -> None:
        self._open.add(connection)

    def ended(self, connection: _Connection) -> None:
        if self._driver is connection:
            self.hang_up()
        self._open.discard(connection)


class _Connection(asyncio.Protocol):
    """A connection of a driver. A protocol instead of a stream and its task, which would cost two more event-loop turns
    per token.
    """

    transport: asyncio.WriteTransport

    def __init__(self, link: Link) -> None:
        self._link = link
        self._frames = FrameReader(ToFront)
        self.greeted = False  # True once its Hello was taken
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._link.opened(self)
        if not is_ours(transport.get_extra_info("socket")):
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        with contextlib.suppress(ProtocolError):
            for message in self._frames.feed(data):
                if self.transport.is_closing():
                    return
                self._link.take(message, self)
            return
        self.transport.close()  # as if it had hung up

    def connection_lost(self, exc: Exception | None) -> None:
        self._link.ended(self)
        self.closed.set_result(None)
