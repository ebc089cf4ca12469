"""A queue of chunks that wakes one waiting task, without a task or timer per token.

Every token of every stream passes through it, on a core that may also compute. asyncio.Queue with asyncio.wait would
take two tasks and three more event-loop turns per token.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from lpr.protocol import Chunk


class Alarm:
    """Calls a function at a given time. Moving the time is cheap: the timer checks it when it fires."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.at: float | None = None  # by the clock of the event loop; None: never
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """Fire after `seconds`, instead of at the previously set time."""
        loop = asyncio.get_running_loop()
        self.at = loop.time() + seconds
        if self._timer is None or self.at < self._timer.when():
            self.close()
            self._timer = loop.call_at(self.at, self._look)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        if self.at is None:
            return
        if loop.time() < self.at:
            self._timer = loop.call_at(self.at, self._look)
        else:
            self.at = None
            self._ring()


class Inbox:
    """The chunks of one HTTP request's texts, for one task that takes them."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self.size = 0  # bytes of these, about
        self._waiting: asyncio.Future[None] | None = None
        self._alarm = Alarm(self.wake)

    def __len__(self) -> int:
        return len(self._chunks)

    def put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.size += _size(chunk)
        self.wake()

    def take(self) -> Chunk:
        """The oldest chunk; raises IndexError if there is none."""
        chunk = self._chunks.popleft()
        self.size -= _size(chunk)
        return chunk

    def clear(self) -> None:
        self._chunks.clear()
        self.size = 0

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Return once there is a chunk, after `wake`, or after `seconds`."""
        if self._chunks:
            return
        self._waiting = asyncio.get_running_loop().create_future()
        self._alarm.set(seconds)
        try:
            await self._waiting
        finally:
            self._waiting = self._alarm.at = None

    def close(self) -> None:
        self._alarm.close()


def _size(chunk: Chunk) -> int:
    """Approximate bytes of memory of a chunk, with the overhead of Python objects."""
    num_values = sum(1 + len(each.top) for each in chunk.logprobs or ())
    return 512 + len(chunk.text) + 40 * len(chunk.token_ids) + 120 * num_values
