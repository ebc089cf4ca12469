"""Writes snapshots at intervals. The store decides which replica of the fleet writes the next one."""

from __future__ import annotations

import contextlib
import queue
import random
import time
from collections.abc import Callable, Sequence

import numpy as np
from redis import Redis

from lpr.fleet.counts import DraftCounts
from lpr.fleet.inbox import Batch
from lpr.fleet.snapshots import Place, from_bytes, name_of, to_bytes

ANSWER_SECONDS = 10.0
"""Time for the step loop to `offer` what it has learned."""
_LOOK_EVERY = 0.2


class SnapshotKeeper:
    """The snapshots of one replica's tenants."""

    def __init__(
        self,
        store: Redis,
        place: Place,
        every: float,
        counts: DraftCounts,
        key_of: Callable[[str], str],
        tenants: Callable[[], Sequence[str]],
        wake: Callable[[], None],
        *,
        unreadable: Callable[[Exception], None],
    ) -> None:
        """Keep snapshots in `place`, one per tenant every `every` seconds.

        `wake` makes the step loop look at `wanted`; `unreadable` is called with what a failed read raised.
        """
        self.wanted: str | None = None
        """The tenant of which the step loop should `offer` the history."""
        self._store = store
        self._place = place
        self._every = every
        self._counts = counts
        self._key_of = key_of
        self._tenants = tenants
        self._wake = wake
        self._unreadable = unreadable
        self._offers: queue.SimpleQueue[tuple[str, np.ndarray, str]] = queue.SimpleQueue()
        self._written: dict[str, int] = {}
        """By tenant, a hash of the last snapshot that this replica wrote."""
        self._due = time.monotonic() + every * random.uniform(0.5, 1.0)

    def offer(self, tenant: str, history: np.ndarray, read_to: str) -> None:
        """From the step loop: the history that drafts of a tenant use, and the last entry of its stream in it."""
        self.wanted = None
        self._offers.put((tenant, history, read_to))

    def read(self, tenant: str) -> Batch | None:
        """A tenant's snapshot; None if there is none that can be used."""
        stream = self._key_of(tenant)
        try:
            data = self._place.read(name_of(stream))
            if data is None:
                return None
            history, read_to = from_bytes(stream, data)
        except Exception as failure:  # no more than a cold start, whatever an object store's library raises
            self._unreadable(failure)
            return None
        self._counts.snapshots_loaded += 1
        return Batch(tenant, history, read_to)

    def work(self) -> None:
        """Write the snapshots that are due, or wait briefly; raises the errors of store and place."""
        if time.monotonic() < self._due:
            time.sleep(_LOOK_EVERY)
            return
        self._due = time.monotonic() + self._every
        for tenant in self._tenants():
            self._write(tenant)

    def _write(self, tenant: str) -> None:
        stream = self._key_of(tenant)
        # The next snapshot may come a little earlier than `every`, so that a replica which is late does not skip it.
        if not self._store.set(f"{stream}:snapshot", b"1", nx=True, px=int(900 * self._every)):
            return
        found = self._ask(tenant)
        if found is None:
            return
        history, read_to = found
        digest = hash((read_to, history.tobytes()))
        if not len(history) or self._written.get(tenant) == digest:
            return
        self._place.write(name_of(stream), to_bytes(stream, history, read_to))
        self._written[tenant] = digest
        self._counts.snapshots_written += 1

    def _ask(self, tenant: str) -> tuple[np.ndarray, str] | None:
        """What the step loop offers for a tenant; None if it does not answer in time."""
        self.wanted = tenant
        self._wake()
        until = time.monotonic() + ANSWER_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                named, history, read_to = self._offers.get(timeout=max(0.0, until - time.monotonic()))
                if named == tenant:
                    return history, read_to
        self.wanted = None
        return None
