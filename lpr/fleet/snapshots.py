"""Snapshots: a tenant's learned outputs with the position in its stream, kept outside the store.

A snapshot is a safetensors file with one int32 tensor, `tokens`: documents that END (-1) separates. Its metadata has
one entry, `lpr_drafts`, a JSON object: version, stream (tokenizer, model and tenant), read_to (the stream's last entry
that it covers), num_tokens, and a checksum of all that. A new replica learns the tokens and reads the stream from
`read_to` on. A damaged snapshot, or one of another stream, costs a cold start.
"""

import contextlib
import json
import queue
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from redis import Redis
from safetensors.numpy import load, save

from lpr.core.digest import digest_of
from lpr.files import checksum_of, replace_file
from lpr.fleet.counts import DraftCounts
from lpr.fleet.entries import Batch
from lpr.fleet.options import scheme_of

VERSION = 1
MOST_BYTES = 256 << 20  # largest snapshot that is read: a suffix index holds a few million tokens
_KEY = "lpr_drafts"


class SnapshotError(RuntimeError):
    """The data is not a snapshot, damaged, or of another stream."""


class Folder:
    """Snapshots in a folder, which replicas of one user on several machines may share.

    They hold users' outputs: only their owner can read them (0600, a new folder 0700).
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> bytes | None:
        """The content of a name, None if there is none; raises OSError or SnapshotError."""
        path = self._path / name
        try:
            if path.stat().st_size > MOST_BYTES:
                raise SnapshotError(f"{name} is larger than {MOST_BYTES} bytes")
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Replace the content of a name, as a whole or not at all; raises OSError."""
        replace_file(self._path / name, data, private=True)


class Objects:
    """Snapshots in an object store: S3 or compatible, Google Cloud Storage, Azure."""

    def __init__(self, url: str) -> None:
        import obstore
        import obstore.store

        self._obstore: Any = obstore
        self._store: Any = obstore.store.from_url(
            url,
            # For endpoints that are given as http://.
            client_options={"timeout": "30s", "connect_timeout": "5s", "allow_http": True},
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=30)},
        )

    def read(self, name: str) -> bytes | None:
        """As Folder.read; raises also what the store's library raises."""
        try:
            found = self._obstore.get(self._store, name)
            if found.meta["size"] > MOST_BYTES:
                raise SnapshotError(f"{name} is larger than {MOST_BYTES} bytes")
            return bytes(found.bytes())
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        self._obstore.put(self._store, name, data)


Place = Folder | Objects  # where snapshots are kept


def place_of(where: str) -> Place:
    return Objects(where) if scheme_of(where) else Folder(Path(where))


def name_of(stream: str) -> str:
    return f"drafts-{digest_of(stream):016x}.safetensors"


def to_bytes(stream: str, history: np.ndarray, read_to: str) -> bytes:
    """A snapshot of `history` (int32 [num_tokens]), which covers the stream up to its entry `read_to`."""
    tokens = history.astype("<i4", copy=False)
    facts = {"version": VERSION, "stream": stream, "read_to": read_to, "num_tokens": len(tokens)}
    return save({"tokens": tokens}, {_KEY: json.dumps({**facts, "checksum": checksum_of(facts, tokens.tobytes())})})


def from_bytes(stream: str, data: bytes) -> tuple[np.ndarray, str]:
    """History and `read_to` of a snapshot that `to_bytes` made of `stream`; raises SnapshotError."""
    try:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        facts = json.loads(header["__metadata__"][_KEY])
        tokens = load(data)["tokens"]
        checksum = facts.pop("checksum")
        is_whole = tokens.dtype == np.int32 and tokens.ndim == 1 and checksum == checksum_of(facts, tokens.tobytes())
        found = facts["version"], facts["stream"]
        read_to = str(facts["read_to"])
    except Exception as failure:  # parsers of damaged files may raise any type
        raise SnapshotError(f"{name_of(stream)} is no snapshot, or damaged: {failure}") from failure
    if not is_whole:
        raise SnapshotError(f"{name_of(stream)} is damaged: its checksum does not fit its content")
    if found != (VERSION, stream):
        raise SnapshotError(f"{name_of(stream)} is version {found[0]!r} of {found[1]!r}, not of {stream!r}")
    return tokens, read_to


ANSWER_SECONDS = 10.0  # time for the step loop to `offer` what it has learned
_LOOK_EVERY = 0.2


class SnapshotKeeper:
    def __init__(
        self, store: Redis, place: Place, every: float, counts: DraftCounts, key_of: Callable[[str], str],
        tenants: Callable[[], Sequence[str]], wake: Callable[[], None], *, unreadable: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """Keep snapshots in `place`, one per tenant every `every` seconds.

        `wake` makes the step loop check `wanted`; `unreadable` is called with the exception of a failed read.
        """
        self.wanted: str | None = None  # the tenant of which the step loop should `offer` the history
        self._store, self._place, self._every, self._counts = store, place, every, counts
        self._key_of, self._tenants, self._wake, self._unreadable = key_of, tenants, wake, unreadable
        self._offers: queue.SimpleQueue[tuple[str, np.ndarray, str]] = queue.SimpleQueue()
        self._written: dict[str, int] = {}  # by tenant, a hash of the last snapshot that this replica wrote
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
        # Slightly shorter than `every`, so that a late replica does not skip the next snapshot.
        if not self._store.set(f"{stream}:snapshot", b"1", nx=True, px=int(900 * self._every)):
            return
        history, read_to = self._ask(tenant)
        digest = hash((read_to, history.tobytes()))
        if not len(history) or self._written.get(tenant) == digest:
            return
        self._place.write(name_of(stream), to_bytes(stream, history, read_to))
        self._written[tenant] = digest
        self._counts.snapshots_written += 1

    def _ask(self, tenant: str) -> tuple[np.ndarray, str]:
        """The step loop's history and position for a tenant; an empty history if it does not answer in time."""
        self.wanted = tenant
        self._wake()
        until = time.monotonic() + ANSWER_SECONDS
        with contextlib.suppress(queue.Empty):
            while True:
                named, history, read_to = self._offers.get(timeout=max(0.0, until - time.monotonic()))
                if named == tenant:
                    return history, read_to
        self.wanted = None
        return np.empty(0, np.int32), ""
