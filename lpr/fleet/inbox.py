"""The queue of other replicas' outputs, between the thread that reads them and the steps that learn them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lpr.core.suffix_index import END

AT_ONCE = 4096
"""Tokens learned between two steps: 0.4 ms of the native core, 5 ms of the Python one."""
FULL = 1 << 18
"""Tokens in the queue above which the reader pauses. What the store drops meanwhile is lost."""


class Batch(NamedTuple):
    """Outputs of one tenant, learned together."""

    tenant: str
    history: np.ndarray
    """int32 [num_tokens]: documents that END separates."""
    read_to: str
    """The last entry of the stream that this batch or an earlier one covers; "" if unknown."""
    num_outputs: int = 0
    came: float = 0.0
    """Arrival of the newest of them in the store, in seconds since 1970; 0 if unknown."""


class Inbox:
    """Batches in their order."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """An empty queue; the reader's thread calls `wake` when it adds a batch."""
        self._wake = wake
        self._lock = threading.Lock()
        self._batches: deque[Batch] = deque()
        self._num_tokens = 0
        self._num_outputs = 0

    def __len__(self) -> int:
        """Outputs in the queue."""
        return self._num_outputs

    @property
    def is_full(self) -> bool:
        """True if reading should pause."""
        return self._num_tokens > FULL

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to learn."""
        return not self._batches

    def put(self, batch: Batch) -> None:
        """Add a batch, in pieces of at most `AT_ONCE` tokens."""
        *pieces, last = _pieces(batch.history)
        with self._lock:
            self._batches += [batch._replace(history=piece, read_to="", num_outputs=0) for piece in pieces]
            self._batches.append(batch._replace(history=last))
            self._num_tokens += len(batch.history)
            self._num_outputs += batch.num_outputs
        self._wake()

    def take(self) -> Batch | None:
        """The next batches of one tenant, joined to at most `AT_ONCE` tokens; None if there is none."""
        with self._lock:
            if not self._batches:
                return None
            taken = [self._batches.popleft()]
            tenant, num_tokens = taken[0].tenant, len(taken[0].history)
            while self._batches and self._batches[0].tenant == tenant:
                num_tokens += len(self._batches[0].history)
                if num_tokens > AT_ONCE:
                    break
                taken.append(self._batches.popleft())
            history = np.concatenate([batch.history for batch in taken])
            self._num_tokens -= len(history)
            num_outputs = sum(batch.num_outputs for batch in taken)
            self._num_outputs -= num_outputs
        read_to = next((batch.read_to for batch in reversed(taken) if batch.read_to), "")
        return Batch(tenant, history, read_to, num_outputs, max(batch.came for batch in taken))


def _pieces(history: np.ndarray) -> Iterator[np.ndarray]:
    """A history in pieces of at most `AT_ONCE` tokens, cut at ends of documents where there are any."""
    while len(history) > AT_ONCE:
        ends = np.flatnonzero(history[:AT_ONCE] == END)
        cut = int(ends[-1]) + 1 if len(ends) else AT_ONCE
        yield history[:cut]
        history = history[cut:]
    yield history
