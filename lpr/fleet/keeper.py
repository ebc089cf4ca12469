"""Writes snapshots now and then: one replica of the fleet each time, which of them the store decides."""

from __future__ import annotations

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
"""How long the step loop is waited for, which says what was learnt."""
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
        """Keep snapshots in `place`, each tenant's `every` so many seconds.

        `wake` makes the step loop look here, and `unreadable` is told why a snapshot could not be read.
        """
        self.wanted: str | None = None
        """The tenant of whom the step loop should say what was learnt (`offer`)."""
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
        """By tenant, a hash of what this replica wrote last."""
        self._due = time.monotonic() + every * random.uniform(0.5, 1.0)

    def offer(self, tenant: str, history: np.ndarray, read_to: str) -> None:
        """From the step loop: what the `wanted` tenant's drafts come from by now, and how far its stream is in it."""
        self.wanted = None
        self._offers.put((tenant, history, read_to))

    def read(self, tenant: str) -> Batch | None:
        """A tenant's snapshot; None where there is none that can be used."""
        stream = self._key_of(tenant)
        try:
            data = self._place.read(name_of(stream))
            if data is None:
                return None
            history, read_to = from_bytes(stream, data)
        except Exception as failure:  # a cold start, no more: whatever an object store's library may raise
            self._unreadable(failure)
            return None
        self._counts.snapshots_loaded += 1
        return Batch(tenant, history, read_to)

    def work(self) -> None:
        """Write what is due, or wait a little; raises what the place does."""
        if time.monotonic() < self._due:
            time.sleep(_LOOK_EVERY)
            return
        self._due = time.monotonic() + self._every
        for tenant in self._tenants():
            self._write(tenant)

    def _write(self, tenant: str) -> None:
        stream = self._key_of(tenant)
        # The next one may be written a little earlier than `every`, so that a replica which is late does not skip it.
        if not self._store.set(f"{stream}:snapshot", b"1", nx=True, px=int(900 * self._every)):
            return
        self.wanted = tenant
        self._wake()
        until = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < until:
            try:
                named, history, read_to = self._offers.get(timeout=_LOOK_EVERY)
            except queue.Empty:
                continue
            if named == tenant:
                break
        else:
            self.wanted = None
            return
        digest = hash((read_to, history.tobytes()))
        if not len(history) or self._written.get(tenant) == digest:
            return
        self._place.write(name_of(stream), to_bytes(stream, history, read_to))
        self._written[tenant] = digest
        self._counts.snapshots_written += 1
