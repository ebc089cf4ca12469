"""The host channel: how ranks without work wait for the driver, and how they know that the others still live.

A rank that waits in a collective of the device times out in it, and on a GPU it burns a core meanwhile. So ranks without
work wait here, on the rendezvous store, where a wait costs nothing and may last for days. A thread of each rank writes
a *heartbeat* to the store every second and reads those of the others: a rank that has died, hangs or is stopped is
noticed within `DEAD_AFTER` seconds, idle or not. Long work on one rank never reads as death, as its thread goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from lpr.protocol import MeshError

BEAT_EVERY = 1.0
"""Seconds between two heartbeats of a rank."""
DEAD_AFTER = 4.0
"""Seconds without a new heartbeat after which a rank counts as lost."""
_LEFT = b"left"
_KEPT_ANNOUNCEMENTS = 64
"""Announcements that stay in the store for ranks that read late."""


class CommError(MeshError):
    """A rank did not answer, or answered something else: the job cannot go on."""


class HostChannel(Protocol):
    """How the driver wakes ranks that wait without work."""

    def announce(self, num_bytes: int) -> None:
        """On the driver: tell the waiting ranks that a broadcast of `num_bytes` bytes follows. Raises CommError."""
        ...

    def wait(self) -> int:
        """On the other ranks: the bytes of the next announced broadcast, as long as it takes. Raises CommError."""
        ...

    def check(self) -> None:
        """Raise CommError if some rank is lost."""
        ...


class Silence:
    """Who has not been heard for too long."""

    def __init__(self) -> None:
        """Nobody is known yet."""
        self._heard: dict[str, tuple[bytes, float]] = {}
        self._last = time.monotonic()

    def of(self, beats: Mapping[str, bytes]) -> dict[str, float]:
        """Whose beat has been the same for more than `DEAD_AFTER` seconds by now, and for how many seconds."""
        now = time.monotonic()
        if now - self._last > 2 * BEAT_EVERY:  # this process stood still, and may not blame the others
            self._heard.clear()
        self._last = now
        for name, beat in beats.items():
            if beat != self._heard.get(name, (None, now))[0]:
                self._heard[name] = beat, now
        since = {name: now - self._heard[name][1] for name in beats}
        return {name: seconds for name, seconds in since.items() if seconds > DEAD_AFTER}


class StoreChannel:
    """A host channel over a torch.distributed store."""

    def __init__(self, connect: Callable[[], dist.Store], rank: int, num_ranks: int) -> None:
        """Rank `rank` of `num_ranks`; `connect` makes a connection to the store, of which each thread needs its own."""
        self._store = connect()
        self._rank = rank
        self._num_announced = 0
        self._failure: str | None = None
        self._closed = threading.Event()
        # Before any rank watches: a missing heartbeat would be waited for.
        self._store.set(_beat_key(rank), "0")
        self._thread = threading.Thread(target=self._watch, args=(connect(), num_ranks), daemon=True, name="heartbeat")
        self._thread.start()

    def announce(self, num_bytes: int) -> None:
        """As HostChannel.announce."""
        self.check()
        try:
            self._store.set(_announcement_key(self._num_announced), str(num_bytes))
            if self._num_announced >= _KEPT_ANNOUNCEMENTS:
                self._store.delete_key(_announcement_key(self._num_announced - _KEPT_ANNOUNCEMENTS))
        except RuntimeError as failure:
            raise CommError(gone(failure)) from failure
        self._num_announced += 1

    def wait(self) -> int:
        """As HostChannel.wait."""
        key = _announcement_key(self._num_announced)
        while True:
            self.check()
            try:
                self._store.wait([key], timedelta(seconds=BEAT_EVERY))
                num_bytes = int(self._store.get(key))
            except dist.DistStoreError:
                continue  # nothing yet
            except RuntimeError as failure:
                raise CommError(gone(failure)) from failure
            self._num_announced += 1
            return num_bytes

    def check(self) -> None:
        """As HostChannel.check."""
        if self._failure is not None:
            raise CommError(self._failure)

    def close(self) -> None:
        """Leave: the others learn at their next look that this rank has ended, and need not wait for it to be missed."""
        self._closed.set()
        self._thread.join(timeout=2 * BEAT_EVERY)

    def _watch(self, store: dist.Store, num_ranks: int) -> None:
        """Write this rank's heartbeat and read the others', until `close`."""
        others = [rank for rank in range(num_ranks) if rank != self._rank]
        silence, number = Silence(), 0
        try:
            while not self._closed.wait(BEAT_EVERY):
                number += 1
                store.set(_beat_key(self._rank), str(number))
                keys = {str(rank): _beat_key(rank) for rank in others}
                beats = {rank: store.get(key) if store.check([key]) else b"" for rank, key in keys.items()}
                for rank, seconds in silence.of(beats).items():
                    self._failure = f"rank {rank} has ended or hangs: no heartbeat for {seconds:.0f} s"
                for rank in [rank for rank, beat in beats.items() if beat == _LEFT]:
                    self._failure = f"rank {rank} has left the job"
            store.set(_beat_key(self._rank), _LEFT.decode())
        except RuntimeError as failure:
            if not self._closed.is_set():
                self._failure = gone(failure)


class SoloChannel:
    """The channel of a world of one: nobody waits."""

    def announce(self, num_bytes: int) -> None:
        """Nobody to tell."""

    def wait(self) -> int:
        """A single rank is the driver, which never waits."""
        raise RuntimeError("a single rank has no driver to wait for")

    def check(self) -> None:
        """Nobody can be lost."""


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _announcement_key(number: int) -> str:
    return f"announcement/{number}"


def gone(failure: RuntimeError) -> str:
    """What an error of the store means, in one line."""
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    return f"the rendezvous store does not answer, so the job that holds it has ended: {lines[0][:200]}"
