"""Server-sent events: an answer that grows while it is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lpr.serve.errors import ApiError

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
_encoder = msgspec.json.Encoder()


def event(data: Any) -> bytes:
    """One event of one line, as this JSON has no line breaks."""
    return b"data: " + _encoder.encode(data) + b"\n\n"


def error_event(failure: ApiError) -> bytes:
    """An error in place of the next event."""
    return event(failure.body())


class EventStream(Response):
    """Sends events as they are made."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], stall: float, end: Callable[[], None]) -> None:
        """Send `events`. A reader that takes none for `stall` seconds is dropped. `end` is called at the end."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._stall = stall
        self._end = end  # closing a generator that never began does not run its clean-up

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        # The answer does not end then, which closes the connection.
        with contextlib.suppress(TimeoutError):
            await self._send(send)

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in self._events:
                async with asyncio.timeout(self._stall):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._end()  # first, as what follows may be interrupted
            await self._events.aclose()
