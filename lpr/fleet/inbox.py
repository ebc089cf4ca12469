"""What other replicas have written: between the thread that reads it and the steps that learn it, piece by piece."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lpr.core.suffix_index import END

AT_ONCE = 4096
"""Tokens learnt between two steps: 0.4 ms of the native core, 5 ms of the Python one."""
FULL = 1 << 18
"""Tokens that may wait; the reader pauses above that, and what the store drops meanwhile is lost."""


class Batch(NamedTuple):
    """Outputs of one tenant, to be learnt together."""

    tenant: str
    history: np.ndarray
    """int32 [num_tokens]: documents that END separates."""
    read_to: str
    """The stream's entry up to which everything is in this batch or an earlier one; "" says nothing."""
    num_outputs: int = 0
    came: float = 0.0
    """When the newest of them came into the store, in seconds since 1970; 0 where that is not known."""


class Inbox:
    """Batches in their order."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Nothing yet; `wake` is called, from the reader's thread, when there is something."""
        self._wake = wake
        self._lock = threading.Lock()
        self._batches: deque[Batch] = deque()
        self._num_tokens = 0
        self._num_outputs = 0

    def __len__(self) -> int:
        """Outputs that wait."""
        return self._num_outputs

    @property
    def is_full(self) -> bool:
        """Should nothing more be read for now?"""
        return self._num_tokens > FULL

    @property
    def is_empty(self) -> bool:
        """Is there nothing to learn?"""
        return not self._batches

    def put(self, batch: Batch) -> None:
        """Add a batch, in pieces that are learnt between two steps each."""
        pieces = list(_pieces(batch.history))
        with self._lock:
            for index, piece in enumerate(pieces):
                is_last = index == len(pieces) - 1
                part = batch if len(pieces) == 1 else batch._replace(
                    history=piece,
                    read_to=batch.read_to if is_last else "",
                    num_outputs=batch.num_outputs if is_last else 0,
                )  # fmt: skip
                self._batches.append(part)
            self._num_tokens += len(batch.history)
            self._num_outputs += batch.num_outputs
        self._wake()

    def take(self) -> Batch | None:
        """The next batches of one tenant as one of at most `AT_ONCE` tokens; None if there is none."""
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
    """A history cut into pieces of at most `AT_ONCE` tokens, behind ends of documents where there are any."""
    while len(history) > AT_ONCE:
        ends = np.flatnonzero(history[:AT_ONCE] == END)
        cut = int(ends[-1]) + 1 if len(ends) else AT_ONCE
        yield history[:cut]
        history = history[cut:]
    yield history
