"""The front's end of the socket. One driver at a time connects, and the latest one counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from lpr.protocol import ProtocolError
from lpr.serve.messages import PROTOCOL, FrameReader, Hello, ToDriver, ToFront, frame, is_ours

_FAREWELL = 1.0
"""Seconds for what was sent last to leave."""


class Link:
    """Messages to and from the driver."""

    def __init__(self, receive: Callable[[ToFront], None], lost: Callable[[], None]) -> None:
        """`receive` is called with every message, Hello included, and `lost` when a driver's connection ends."""
        self._receive = receive
        self._lost = lost
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._epoch = -1
        self._path: Path | None = None

    async def listen(self, path: Path) -> None:
        """Listen at a Unix socket for the drivers of one start of the ranks. Only the owner may connect.

        Each start has its own socket, so that no process of an earlier start can reach the front.
        """
        await self.close()
        self._path, self._epoch = path, -1
        self._server = await asyncio.start_unix_server(self._serve, path)
        path.chmod(0o600)

    def send(self, message: ToDriver) -> None:
        """Send a message, if a driver is connected."""
        if self._writer is not None:
            self._writer.write(frame(message))

    def hang_up(self) -> None:
        """Drop the driver and ignore its further messages."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
            self._lost()

    async def close(self) -> None:
        """Stop listening, and close connections once what was sent has left."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.hang_up()
        for writer in self._serving.values():
            writer.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_FAREWELL)
        for writer in self._serving.values():  # a stopped process reads nothing
            writer.transport.abort()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        frames = FrameReader(ToFront)
        greeted = False
        try:
            if not is_ours(writer.get_extra_info("socket")):
                raise ProtocolError("a process of another user")
            while data := await reader.read(1 << 16):
                for message in frames.feed(data):
                    if not greeted:
                        self._greet(message, writer)
                        greeted = True
                    elif self._writer is writer:
                        self._receive(message)
        except (ProtocolError, ConnectionError):
            pass  # as if it had hung up
        finally:
            if self._writer is writer:
                self.hang_up()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self._serving.pop(task, None)

    def _greet(self, message: ToFront, writer: asyncio.StreamWriter) -> None:
        """Replace the driver by one of a later epoch; raises ProtocolError if it is not."""
        if not isinstance(message, Hello) or message.protocol != PROTOCOL:
            raise ProtocolError("a driver of another version of lpr")
        if message.epoch < self._epoch or (message.epoch == self._epoch and self._writer is not None):
            raise ProtocolError("a driver of an earlier epoch, or a stranger")
        self.hang_up()
        self._writer, self._epoch = writer, message.epoch
        self._receive(message)
