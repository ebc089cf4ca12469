"""A stderr that never blocks, even if its reader has stopped or the disk is full."""

import contextlib
import queue
import threading
from typing import Any, TextIO

from lpr.serve import limits


class Unblocking:
    """A text stream written by a thread. Text beyond its queue is dropped and counted."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._queue: queue.Queue[str | None] = queue.Queue(limits.LOG.most)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._work, name="lpr-stderr", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._num_dropped += 1
        return len(text)

    def flush(self) -> None:
        """Do nothing: the thread flushes."""

    def close(self, seconds: float = 1.0) -> None:
        """Let the thread write what is queued, for at most so long."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=seconds)
            self._thread.join(seconds)

    def _work(self) -> None:
        while (text := self._queue.get()) is not None:
            dropped, self._num_dropped = self._num_dropped, 0
            if dropped:
                text += f"lpr.serve: {dropped} writes to stderr were dropped, as nobody read them\n"
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()
