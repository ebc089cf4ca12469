"""The front's end of the socket: it listens, one driver at a time connects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from lpr.serve.messages import (
    PROTOCOL,
    FrameReader,
    Hello,
    ProtocolError,
    ToDriver,
    ToFront,
    frame,
    read_to_front,
)


class Link:
    """Messages to and from the driver."""

    def __init__(self, receive: Callable[[ToFront], None], lost: Callable[[], None]) -> None:
        """`receive` gets every message after the greeting, `lost` is called when a driver's connection ends."""
        self._receive = receive
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._path: Path | None = None

    @property
    def connected(self) -> bool:
        """Is there a driver?"""
        return self._writer is not None

    async def listen(self, path: Path) -> None:
        """Wait for drivers at a Unix socket; only its owner may connect."""
        self._path = path
        self._server = await asyncio.start_unix_server(self._serve, path)
        path.chmod(0o600)

    def send(self, message: ToDriver) -> None:
        """Send a message, or nothing if no driver is there."""
        if self._writer is not None:
            self._writer.write(frame(message))

    async def close(self) -> None:
        """Hang up and stop listening."""
        if self._writer is not None:
            self._writer.close()
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._writer is not None:  # a driver that was given up on, or a stranger
            writer.close()
            return
        self._writer = writer
        frames = FrameReader()
        greeted = False
        try:
            while data := await reader.read(1 << 16):
                for body in frames.feed(data):
                    message = read_to_front(body)
                    if isinstance(message, Hello):
                        greeted = message.protocol == PROTOCOL
                    elif greeted:
                        self._receive(message)
                    if not greeted:
                        raise ProtocolError("a driver of another version of lpr")
        except (ProtocolError, ConnectionError):
            pass  # as if it had hung up; what it means is up to `lost`
        finally:
            self._writer = None
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._lost()
