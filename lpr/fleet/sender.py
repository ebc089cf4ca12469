"""Sends finished outputs to the store, from a queue that never blocks the step loop."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from redis import Redis
from redis.exceptions import ResponseError

from lpr.fleet.counts import DraftCounts
from lpr.fleet.entries import FIELD, ID_BYTES, encode

QUEUE = 1024
"""Longest queue, in outputs. Above it, the oldest are dropped."""
AT_ONCE = 64
"""Outputs per request to the store."""
_WAIT = 0.5
"""Seconds after which an idle thread checks if it should end."""


class _Waiting(NamedTuple):
    key: str
    data: bytes
    num_tokens: int


class Sender:
    """The queue of one replica's outputs."""

    def __init__(self, store: Redis, origin: bytes, length: int, counts: DraftCounts) -> None:
        """Send to `store` as `origin`. Each stream keeps about `length` entries."""
        self._store = store
        self._origin = origin
        self._length = length
        self._counts = counts
        self._queue: deque[_Waiting] = deque()
        self._news = threading.Condition()

    def put(self, key: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Queue an output for the stream `key`; returns at once."""
        data, num_tokens = encode(self._origin, os.urandom(ID_BYTES), prompt_ids, token_ids)
        with self._news:
            self._queue.append(_Waiting(key, data, num_tokens))
            self._trim()
            self._news.notify()

    def work(self) -> None:
        """Send queued outputs, or wait briefly for some; raises the store's errors."""
        with self._news:
            if not self._queue:
                self._news.wait(_WAIT)
            taken = [self._queue.popleft() for _ in range(min(AT_ONCE, len(self._queue)))]
        if not taken:
            return
        try:
            answers = self._send(taken)
        except Exception:
            # The store may have them already: they are sent again, and readers drop doubles by their number.
            with self._news:
                self._queue.extendleft(reversed(taken))
                self._trim()
            self._counts.write_up = False
            raise
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        for waiting, answer in zip(taken, answers, strict=True):
            if not isinstance(answer, Exception):
                self._counts.sent += 1
                self._counts.sent_tokens += waiting.num_tokens
        with self._news:
            self._counts.unsent += len(refused)
            self._trim()
        self._counts.write_up = not refused
        if refused:  # a key of another type, no memory, no permission: a retry would not help
            raise ResponseError(str(refused[0]))

    def _send(self, taken: Sequence[_Waiting]) -> list[object]:
        pipeline = self._store.pipeline(transaction=False)
        for waiting in taken:
            pipeline.xadd(waiting.key, {FIELD: waiting.data}, maxlen=self._length, approximate=True)
        return list(pipeline.execute(raise_on_error=False))

    def _trim(self) -> None:
        while len(self._queue) > QUEUE:
            self._queue.popleft()
            self._counts.unsent += 1
        self._counts.send_queue = len(self._queue)
