"""Drafts shared live between replicas: within seconds, each replica drafts from the finished outputs of all.

The step loop of a replica's rank 0 hands over finished outputs and takes batches to learn; both take microseconds.
Three threads do the rest: one sends, one reads, one keeps snapshots. The step loop never waits for them. While the
store is unreachable, slow or hostile, drafts come from the outputs of this replica alone.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from lpr.fleet.counts import DraftCounts
from lpr.fleet.entries import Batch, Inbox
from lpr.fleet.options import FleetOptions
from lpr.fleet.snapshots import SnapshotKeeper, place_of
from lpr.fleet.store import Worker, connect, stream_of
from lpr.fleet.streams import Reader, Sender

MARK_SECONDS = 1.0  # seconds between two batches that only record how far a stream was read
FLUSH_SECONDS = 1.0  # time at the end to send queued outputs
JOIN_SECONDS = 2.0  # Time for the threads to end. One that hangs in a call of the store ends with the process.
REPORT_SECONDS = 60.0  # seconds between two lines on stderr about the same failure
_NOTHING = np.empty(0, np.int32)


class SharedDrafts:
    """One replica's end of the shared drafts."""

    def __init__(
        self, options: FleetOptions, *, fingerprint: str, model: str, vocab_size: int, origin: bytes,
        positions: Mapping[str, str], wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Begin to share. `fingerprint` is the tokenizer's, `model` the fleet's name of the model.

        `origin` (8 bytes) identifies this start of this replica, `positions` is the last entry read by tenant, and
        `wake` is called from another thread when there is something to learn.
        """
        assert options.draft_store is not None
        self.counts = DraftCounts()
        self._key_of = partial(stream_of, fingerprint, model)
        self._inbox = Inbox(wake)
        self._marks: dict[str, str] = {}
        self._next_mark = 0.0
        self._stores = [connect(options.draft_store) for _ in range(3)]
        self._sender = Sender(self._stores[0], origin, options.draft_store_length, self.counts)
        self._keeper: SnapshotKeeper | None = None
        common = self._stores[1], origin, vocab_size, self._inbox, self.counts, self._key_of
        self._reader = Reader(*common, lambda tenant: self._keeper.read(tenant) if self._keeper else None, positions)
        self._workers = [
            Worker("draft-sender", self._sender.work, self._failed("cannot send", "write_errors")),
            Worker("draft-reader", self._reader.work, self._failed("cannot read", "read_errors")),
        ]
        if options.draft_snapshots is not None:
            unreadable = self._failed("cannot read a snapshot", "snapshot_errors")
            self._keeper = SnapshotKeeper(
                self._stores[2], place_of(options.draft_snapshots), options.draft_snapshot_every, self.counts,
                self._key_of, lambda: self._reader.tenants, wake, unreadable=unreadable,
            )  # fmt: skip
            unkept = self._failed("cannot keep a snapshot", "snapshot_errors")
            self._workers.append(Worker("draft-snapshots", self._keeper.work, unkept))
        for worker in self._workers:
            worker.start()

    def finished(self, tenant: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Share a finished output with the other replicas, for requests of the same tenant."""
        if token_ids:
            self._sender.put(self._key_of(tenant), prompt_ids, token_ids)

    def follow(self, tenant: str) -> None:
        """Learn the outputs of other replicas for a tenant."""
        self._reader.follow(tenant)

    @property
    def is_waiting(self) -> bool:
        """True if the step loop should not sleep: there is a batch to learn or a history to offer."""
        return not self._inbox.is_empty or self.wanted is not None

    def take(self) -> Batch | None:
        """The batch of one tenant to learn before the next step, at most `entries.AT_ONCE` tokens, or None."""
        batch = self._inbox.take()
        now = time.monotonic()
        if batch is not None and len(batch.history):
            self._marks.pop(batch.tenant, None)
            self.counts.learnt += batch.num_outputs
            self.counts.learnt_tokens += len(batch.history)
            self.counts.lag = max(0.0, time.time() - batch.came) if batch.came else self.counts.lag
            self.counts.learn_queue = len(self._inbox)
            return batch
        if batch is not None and batch.read_to:
            self._marks[batch.tenant] = batch.read_to
        if self._marks and now >= self._next_mark:
            self._next_mark = now + MARK_SECONDS
            tenant, read_to = self._marks.popitem()
            return Batch(tenant, _NOTHING, read_to)
        return None

    @property
    def wanted(self) -> str | None:
        """The tenant of which a snapshot is due (`offer`)."""
        return self._keeper.wanted if self._keeper is not None else None

    def offer(self, tenant: str, history: np.ndarray, read_to: str) -> None:
        """Hand over a tenant's history (int32 [num_tokens]) and the last entry of its stream in it, for a snapshot."""
        if self._keeper is not None:
            self._keeper.offer(tenant, history, read_to)

    def close(self) -> None:
        """Send queued outputs for up to `FLUSH_SECONDS`, then end the threads."""
        until = time.monotonic() + FLUSH_SECONDS
        while self.counts.send_queue and time.monotonic() < until:
            time.sleep(0.01)
        for worker in self._workers:
            worker.stopping.set()
        until = time.monotonic() + JOIN_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
        for each in self._stores:
            each.connection_pool.disconnect()

    def _failed(self, what: str, name: str) -> Callable[[Exception], None]:
        """A function that counts failures under `name` and reports the first one, then one a minute, on stderr."""
        reported = -REPORT_SECONDS

        def note(failure: Exception) -> None:
            nonlocal reported
            setattr(self.counts, name, getattr(self.counts, name) + 1)
            if time.monotonic() - reported >= REPORT_SECONDS:
                reported = time.monotonic()
                why = (str(failure).splitlines() or [""])[0][:200]
                line = f"lpr.serve: shared drafts: {what}: {type(failure).__name__}: {why}; requests go on without\n"
                sys.stderr.write(line)  # in one piece, as several threads write
                sys.stderr.flush()

        return note
