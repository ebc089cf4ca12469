"""Reads what other replicas have finished, and lets nothing of it through that the engine could not learn.

A stream is only a hint. What is lost, late, doubled or in another order changes what drafts are made of, never what
they are checked against, so the reader drops what it does not understand and reads on.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from redis import Redis

from lpr.core.suffix_index import END
from lpr.fleet.counts import DraftCounts
from lpr.fleet.entries import FIELD, Entry, decode, within_vocabulary
from lpr.fleet.inbox import Batch, Inbox
from lpr.fleet.store import BLOCK_SECONDS, TooLongError

START = "0-0"
"""Before a stream's first entry."""
MOST_TENANTS = 64
"""Streams followed at a time; of more, the one whose tenant asked least recently is left."""
AT_ONCE = 32
"""Entries read together, of all streams: parsing more would hold up the step loop's thread."""
PAUSE_SECONDS = 0.01
"""Between two reads that brought something, for the same reason."""
LOOK_EVERY = 20
"""Reads without news after which it is looked whether a stream has begun anew."""
MOST_SEEN = 16384
"""Outputs remembered by their numbers, so that none is learnt twice."""
_ID = re.compile(r"\d{1,20}-\d{1,20}")


@dataclass
class _Stream:
    """A tenant's stream, as far as it was read."""

    tenant: str
    key: str
    position: str | None = None
    """The last entry read; None before the snapshot was looked for."""


class Reader:
    """One replica's view of the streams of its tenants."""

    def __init__(
        self,
        store: Redis,
        origin: bytes,
        vocab_size: int,
        inbox: Inbox,
        counts: DraftCounts,
        key_of: Callable[[str], str],
        snapshot_of: Callable[[str], Batch | None],
        positions: Mapping[str, str],
    ) -> None:
        """Read streams by `key_of(tenant)`, each behind its entry in `positions`, or else behind its snapshot.

        Entries of `origin` are this replica's own.
        """
        self._store = store
        self._origin = origin
        self._vocab_size = vocab_size
        self._inbox = inbox
        self._counts = counts
        self._key_of = key_of
        self._snapshot_of = snapshot_of
        self._streams = {tenant: _Stream(tenant, key_of(tenant), at) for tenant, at in positions.items() if is_id(at)}
        """By tenant, the least recently asked for first."""
        self._lock = threading.Lock()
        self._unsure = True
        """Was the store away, and may have lost its streams?"""
        self._careful = False
        """Was an answer too long? Then entries are read one by one, until it is known where."""
        self._num_empty = 0
        self._seen: set[bytes] = set()
        self._seen_order: deque[bytes] = deque()

    @property
    def tenants(self) -> list[str]:
        """Whose streams are followed."""
        with self._lock:
            return list(self._streams)

    def follow(self, tenant: str) -> None:
        """Read a tenant's stream too, from the next round on."""
        with self._lock:
            stream = self._streams.pop(tenant, None)
            self._streams[tenant] = stream if stream is not None else _Stream(tenant, self._key_of(tenant))
            if len(self._streams) > MOST_TENANTS:
                self._streams.pop(next(iter(self._streams)))

    def work(self) -> None:
        """One round: read what is new, or wait a little for it; raises what the store does."""
        with self._lock:
            streams = list(self._streams.values())
        if not streams or self._inbox.is_full:
            time.sleep(0.05)
            return
        for stream in streams:
            if stream.position is None:
                self._begin(stream)
        try:
            self._read(streams)
            self._counts.read_up = True
        except TooLongError:
            self._careful, self._unsure, self._num_empty = True, False, 0
            raise
        except Exception:
            self._counts.read_up, self._unsure = False, True
            raise

    def _begin(self, stream: _Stream) -> None:
        """Start with a snapshot, if there is one, and read on from where it ends."""
        stream.position = START
        snapshot = self._snapshot_of(stream.tenant)
        if snapshot is not None:
            history, outside = within_vocabulary(snapshot.history, self._vocab_size)
            self._counts.outside_vocabulary += outside
            stream.position = snapshot.read_to if is_id(snapshot.read_to) else START
            self._inbox.put(snapshot._replace(history=history, read_to=stream.position))

    def _read(self, streams: Sequence[_Stream]) -> None:
        if self._unsure or self._num_empty >= LOOK_EVERY:
            self._find_lost(streams)
            self._unsure, self._num_empty = False, 0
        if self._careful:
            self._read_one_by_one(streams)
            return
        count = max(1, AT_ONCE // len(streams))
        asked: dict[Any, Any] = {stream.key: stream.position for stream in streams}
        answer = self._store.xread(asked, count=count, block=int(1000 * BLOCK_SECONDS))
        if self._take_in(streams, answer):
            self._num_empty = 0
            time.sleep(PAUSE_SECONDS)
        else:
            self._num_empty += 1

    def _find_lost(self, streams: Sequence[_Stream]) -> None:
        """Begin again with streams that end before where they were read to: the store has lost them."""
        for stream in streams:
            assert stream.position is not None
            newest: Any = self._store.xrevrange(stream.key, count=1)
            if not newest or order_of(_text(newest[0][0])) < order_of(stream.position):
                stream.position = START

    def _read_one_by_one(self, streams: Sequence[_Stream]) -> None:
        """Read one entry of each stream, and go on behind one that is too long."""
        is_found = num_read = 0
        for stream in streams:
            asked: dict[Any, Any] = {stream.key: stream.position}
            try:
                num_read += self._take_in([stream], self._store.xread(asked, count=1))
            except TooLongError:
                seconds, microseconds = self._store.time()
                stream.position = f"{1000 * int(seconds) + int(microseconds) // 1000}-0"
                self._counts.passed_over += 1
                is_found = True
        self._careful = bool(num_read) and not is_found

    def _take_in(self, streams: Sequence[_Stream], answer: Any) -> int:
        """Hand on what an answer brings; returns how many entries it has."""
        by_key = {stream.key: stream for stream in streams}
        num_entries = 0
        for key, entries in answer or ():
            stream = by_key.get(_text(key))
            if stream is None:
                continue
            num_entries += len(entries)
            self._take_entries(stream, entries)
        return num_entries

    def _take_entries(self, stream: _Stream, entries: Any) -> None:
        assert stream.position is not None
        documents: list[np.ndarray] = []
        began = stream.position
        for found, fields in entries:
            id = _text(found)
            if not is_id(id) or order_of(id) <= order_of(stream.position):
                self._counts.malformed += 1
                continue
            stream.position = id
            entry = decode(fields.get(FIELD)) if isinstance(fields, dict) else None
            if self._is_news(entry):
                assert entry is not None
                tokens, outside = within_vocabulary(entry.token_ids(), self._vocab_size)
                self._counts.outside_vocabulary += outside
                documents += [tokens, np.array([END], np.int32)]
        if stream.position == began:
            return
        history = np.concatenate(documents) if documents else np.empty(0, np.int32)
        came = order_of(stream.position)[0] / 1e3 if documents else 0.0
        self._inbox.put(Batch(stream.tenant, history, stream.position, len(documents) // 2, came))
        self._counts.learn_queue = len(self._inbox)

    def _is_news(self, entry: Entry | None) -> bool:
        """Is this an output of another replica that was not read before?"""
        if entry is None:
            self._counts.malformed += 1
            return False
        if entry.origin == self._origin:
            self._counts.own += 1
            return False
        number = entry.origin + entry.number
        if number in self._seen:
            self._counts.duplicate += 1
            return False
        self._seen.add(number)
        self._seen_order.append(number)
        if len(self._seen_order) > MOST_SEEN:
            self._seen.discard(self._seen_order.popleft())
        return True


def is_id(text: str) -> bool:
    """Is this the id of a stream's entry?"""
    return _ID.fullmatch(text) is not None


def order_of(id: str) -> tuple[int, int]:
    """What ids of entries are ordered by; the first number is when the entry came, in milliseconds."""
    milliseconds, _, number = id.partition("-")
    return int(milliseconds), int(number)


def _text(data: Any) -> str:
    return data.decode("ascii", "replace") if isinstance(data, bytes) else str(data)
