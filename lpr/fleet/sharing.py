"""Drafts shared live between replicas: what one has finished, every other drafts from within seconds.

The step loop of a replica's rank 0 says what was finished and asks what to learn; both take microseconds. Three threads
do the rest: one sends, one reads, one keeps snapshots. None of them is ever waited for, and the store may be away, slow
or hostile: then drafts are what this replica alone has learnt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from lpr.fleet.counts import DraftCounts
from lpr.fleet.inbox import Batch, Inbox
from lpr.fleet.keeper import SnapshotKeeper
from lpr.fleet.options import FleetOptions
from lpr.fleet.reader import Reader
from lpr.fleet.sender import Sender
from lpr.fleet.snapshots import place_of
from lpr.fleet.store import Worker, connect, stream_of

MARK_SECONDS = 1.0
"""Between two notes of how far a stream was read that brought nothing to learn."""
FLUSH_SECONDS = 1.0
"""Time at the end for outputs to leave."""
JOIN_SECONDS = 2.0
"""Time for the threads to end; one that hangs in a call of the store ends with the process."""
SAY_SECONDS = 60.0
"""Between two lines on stderr about the same trouble."""
_NOTHING = np.empty(0, np.int32)


class SharedDrafts:
    """One replica's part in what a fleet shares."""

    def __init__(
        self,
        options: FleetOptions,
        *,
        fingerprint: str,
        model: str,
        vocab_size: int,
        origin: bytes,
        positions: Mapping[str, str],
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to share. `fingerprint` is the tokenizer's and `model` what the fleet calls the model.

        `origin` (8 bytes) names this start of this replica, `positions` say by tenant how far streams were read before,
        and `wake` is called from another thread when there is something to learn.
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
        self._reader = Reader(
            *(self._stores[1], origin, vocab_size, self._inbox, self.counts),
            *(self._key_of, self._snapshot_of, positions),
        )
        self._workers = [
            Worker("draft-sender", self._sender.work, self._failed("cannot send", "write_errors")),
            Worker("draft-reader", self._reader.work, self._failed("cannot read", "read_errors")),
        ]
        if options.draft_snapshots is not None:
            place = place_of(options.draft_snapshots)
            every = options.draft_snapshot_every
            self._keeper = SnapshotKeeper(
                *(self._stores[2], place, every, self.counts, self._key_of, lambda: self._reader.tenants, wake),
                unreadable=self._failed("cannot read a snapshot", "snapshot_errors"),
            )
            self._workers.append(
                Worker("draft-snapshots", self._keeper.work, self._failed("cannot keep a snapshot", "snapshot_errors"))
            )
        for worker in self._workers:
            worker.start()

    def finished(self, tenant: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Let the other replicas draft from a finished output, for requests of the same tenant."""
        if token_ids:
            self._sender.put(self._key_of(tenant), prompt_ids, token_ids)

    def follow(self, tenant: str) -> None:
        """Learn what other replicas finish for a tenant."""
        self._reader.follow(tenant)

    @property
    def is_waiting(self) -> bool:
        """Is there something to learn, or to offer, so that the step loop should not sleep?"""
        return not self._inbox.is_empty or self.wanted is not None

    def take(self) -> Batch | None:
        """What to learn before the next step, at most `lpr.fleet.inbox.AT_ONCE` tokens of one tenant, or None."""
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
        """The tenant of whom a snapshot is due (`offer`)."""
        return self._keeper.wanted if self._keeper is not None else None

    def offer(self, tenant: str, history: np.ndarray, read_to: str) -> None:
        """Say what a tenant's drafts come from by now, int32 [num_tokens], and how far its stream is in it."""
        if self._keeper is not None:
            self._keeper.offer(tenant, history, read_to)

    def close(self) -> None:
        """End the threads, after `FLUSH_SECONDS` for what waits to be sent."""
        until = time.monotonic() + FLUSH_SECONDS
        while self.counts.send_queue and time.monotonic() < until:
            time.sleep(0.01)
        for worker in self._workers:
            worker.stop()
        until = time.monotonic() + JOIN_SECONDS
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))
        for each in self._stores:
            each.connection_pool.disconnect()

    def _snapshot_of(self, tenant: str) -> Batch | None:
        return self._keeper.read(tenant) if self._keeper is not None else None

    def _failed(self, what: str, name: str) -> Callable[[Exception], None]:
        """What counts failures of a thread under `name`, and says the first of them and then one a minute."""
        said = -SAY_SECONDS

        def note(failure: Exception) -> None:
            nonlocal said
            setattr(self.counts, name, getattr(self.counts, name) + 1)
            if time.monotonic() - said >= SAY_SECONDS:
                said = time.monotonic()
                why = (str(failure).splitlines() or [""])[0][:200]
                line = f"lpr.serve: shared drafts: {what}: {type(failure).__name__}: {why}; requests go on without\n"
                sys.stderr.write(line)  # in one piece, as several threads say such things
                sys.stderr.flush()

        return note
