"""Sends finished outputs to the store, and reads those of other replicas that the engine can learn.

Lost, late, duplicate or reordered entries change drafts, never outputs. So the reader skips entries that it cannot
parse.
"""

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from redis import Redis
from redis.exceptions import ResponseError

from lpr.core.suffix_index import END
from lpr.fleet.counts import DraftCounts
from lpr.fleet.entries import FIELD, ID_BYTES, Batch, Entry, Inbox, decode, encode, within_vocabulary
from lpr.fleet.store import BLOCK_SECONDS, TooLongError

QUEUE = 1024  # Longest queue, in outputs. Above it, the oldest are dropped.
SEND_AT_ONCE = 64  # outputs per request to the store
KEPT_SECONDS = 7 * 24 * 3600  # the store forgets a stream to which nothing was added for so long
_WAIT = 0.5  # seconds after which an idle thread checks if it should end


class _Waiting(NamedTuple):
    key: str
    data: bytes
    num_tokens: int


class Sender:
    """The queue of one replica's outputs."""

    def __init__(self, store: Redis, origin: bytes, length: int, counts: DraftCounts) -> None:
        """Send to `store` as `origin`. Each stream keeps about `length` entries."""
        self._store, self._origin, self._length, self._counts = store, origin, length, counts
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
            taken = [self._queue.popleft() for _ in range(min(SEND_AT_ONCE, len(self._queue)))]
        if not taken:
            return
        try:
            pipeline = self._store.pipeline(transaction=False)
            for each in taken:
                pipeline.xadd(each.key, {FIELD: each.data}, maxlen=self._length, approximate=True)
            for key in {each.key for each in taken}:  # any number of distinct keys
                pipeline.expire(key, KEPT_SECONDS)
            answers = list(pipeline.execute(raise_on_error=False))[: len(taken)]
        except Exception:
            # They are sent again even if the store may have them: readers drop duplicates by number.
            with self._news:
                self._queue.extendleft(reversed(taken))
                self._trim()
            self._counts.write_up = False
            raise
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        accepted = [each for each, answer in zip(taken, answers, strict=True) if not isinstance(answer, Exception)]
        self._counts.sent += len(accepted)
        self._counts.sent_tokens += sum(each.num_tokens for each in accepted)
        with self._news:
            self._counts.unsent += len(refused)
            self._trim()
        self._counts.write_up = not refused
        if refused:  # a key of another type, no memory, no permission: a retry would not help
            raise ResponseError(str(refused[0]))

    def _trim(self) -> None:
        while len(self._queue) > QUEUE:
            self._queue.popleft()
            self._counts.unsent += 1
        self._counts.send_queue = len(self._queue)


START = "0-0"  # before a stream's first entry
MOST_TENANTS = 64  # Streams followed at a time. Of more, the one whose tenant asked least recently is dropped.
READ_AT_ONCE = 32  # entries per read, of all streams: parsing more would hold up the step loop's thread
PAUSE_SECONDS = 0.01  # seconds between two reads that brought entries, for the same reason
LOOK_EVERY = 20  # empty reads after which the reader checks if the store has lost a stream
MOST_SEEN = 16384  # outputs remembered by their numbers, so that none is learned twice
_ID = re.compile(r"\d{1,20}-\d{1,20}")


@dataclass
class _Stream:
    """A tenant's stream and its read position."""

    tenant: str
    key: str
    position: str | None = None  # the last entry read; None before the snapshot was read


class Reader:
    """One replica's view of the streams of its tenants."""

    def __init__(
        self, store: Redis, origin: bytes, vocab_size: int, inbox: Inbox, counts: DraftCounts,
        key_of: Callable[[str], str], snapshot_of: Callable[[str], Batch | None], positions: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Read the streams `key_of(tenant)` from their entries in `positions` on, or else from their snapshots on.

        Entries of `origin` are this replica's own.
        """
        self._store, self._origin, self._inbox, self._counts = store, origin, inbox, counts
        self._vocab_size = vocab_size
        self._key_of, self._snapshot_of = key_of, snapshot_of
        self._streams = {tenant: _Stream(tenant, key_of(tenant), at) for tenant, at in positions.items() if is_id(at)}
        """By tenant, the least recently asked for first."""
        self._lock = threading.Lock()
        self._careful = False
        """True after an answer that was too long: entries are read one by one until the long one is found."""
        self._num_empty = LOOK_EVERY
        """Empty reads in a row. A store that was unreachable may have lost streams, and counts as `LOOK_EVERY`."""
        self._seen: dict[bytes, None] = {}  # numbers of the outputs read, the oldest first

    @property
    def tenants(self) -> list[str]:
        with self._lock:
            return list(self._streams)

    def follow(self, tenant: str) -> None:
        """Follow a tenant's stream from the next round on."""
        with self._lock:
            stream = self._streams.pop(tenant, None)
            self._streams[tenant] = stream or _Stream(tenant, self._key_of(tenant))
            if len(self._streams) > MOST_TENANTS:
                self._streams.pop(next(iter(self._streams)))

    def work(self) -> None:
        """One round: read new entries, or wait briefly for some; raises the store's errors."""
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
            self._careful, self._num_empty = True, 0
            raise
        except Exception:
            self._counts.read_up, self._num_empty = False, LOOK_EVERY
            raise

    def _begin(self, stream: _Stream) -> None:
        """Start with the stream's snapshot, if there is one."""
        stream.position = START
        snapshot = self._snapshot_of(stream.tenant)
        if snapshot is not None:
            history, outside = within_vocabulary(snapshot.history, self._vocab_size)
            self._counts.outside_vocabulary += outside
            stream.position = snapshot.read_to if is_id(snapshot.read_to) else START
            self._inbox.put(snapshot._replace(history=history, read_to=stream.position))

    def _read(self, streams: Sequence[_Stream]) -> None:
        if self._num_empty >= LOOK_EVERY:
            self._find_lost(streams)
            self._num_empty = 0
        if self._careful:
            self._read_one_by_one(streams)
            return
        count = max(1, READ_AT_ONCE // len(streams))
        asked: dict[Any, Any] = {stream.key: stream.position for stream in streams}
        answer = self._store.xread(asked, count=count, block=int(1000 * BLOCK_SECONDS))
        if self._take_in(streams, answer):
            self._num_empty = 0
            time.sleep(PAUSE_SECONDS)
        else:
            self._num_empty += 1

    def _find_lost(self, streams: Sequence[_Stream]) -> None:
        """Restart streams that end before the last entry read: the store has lost them."""
        for stream in streams:
            assert stream.position is not None
            newest: Any = self._store.xrevrange(stream.key, count=1)
            if not newest or order_of(_text(newest[0][0])) < order_of(stream.position):
                stream.position = START

    def _read_one_by_one(self, streams: Sequence[_Stream]) -> None:
        """Read one entry of each stream, and skip one that is too long."""
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
        """Queue the entries of an answer; returns their number."""
        by_key = {stream.key: stream for stream in streams}
        found = [(by_key[_text(key)], entries) for key, entries in answer or () if _text(key) in by_key]
        for stream, entries in found:
            self._take_entries(stream, entries)
        return sum(len(entries) for _, entries in found)

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
            if entry is None:
                self._counts.malformed += 1
            elif self.is_new(entry):
                tokens, outside = within_vocabulary(entry.token_ids(), self._vocab_size)
                self._counts.outside_vocabulary += outside
                documents += [tokens, np.array([END], np.int32)]
        if stream.position == began:
            return
        history = np.concatenate(documents) if documents else np.empty(0, np.int32)
        came = order_of(stream.position)[0] / 1e3 if documents else 0.0
        self._inbox.put(Batch(stream.tenant, history, stream.position, len(documents) // 2, came))
        self._counts.learn_queue = len(self._inbox)

    def is_new(self, entry: Entry) -> bool:
        """True for an output of another replica that was not read before."""
        if entry.origin == self._origin:
            self._counts.own += 1
            return False
        number = entry.origin + entry.number
        if number in self._seen:
            self._counts.duplicate += 1
            return False
        self._seen[number] = None
        if len(self._seen) > MOST_SEEN:
            self._seen.pop(next(iter(self._seen)))
        return True


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def order_of(id: str) -> tuple[int, int]:
    """Sort key of an entry's id; the first number is its arrival in milliseconds since 1970."""
    milliseconds, _, number = id.partition("-")
    return int(milliseconds), int(number)


def _text(data: Any) -> str:
    return data.decode("ascii", "replace") if isinstance(data, bytes) else str(data)
