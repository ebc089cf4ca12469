"""The heartbeat: a thread of each rank that shows that the rank lives, and watches the others.

A rank that has died, hangs or is stopped is detected within `DEAD_AFTER` seconds, idle or not. A long computation does
not count as death, because the thread keeps running.
"""

import threading
import time
from collections.abc import Callable, Sequence

from lpr.dist.errors import first_line
from lpr.dist.rendezvous import BEAT_EVERY, Member, Plan, Rendezvous

DEAD_AFTER = 4.0  # seconds without a new heartbeat after which a rank counts as lost
STUCK_AFTER = 30.0
"""Seconds after which a rank with a failure counts as stuck in a wait for its device or a communicator."""


class Watch:
    """Finds replicas whose heartbeats have stopped."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._changed: dict[Member, tuple[bytes, float]] = {}
        """By member, the latest heartbeat and when it was first seen."""
        self._last = time.monotonic()

    def silent(self, replicas: Sequence[int]) -> list[int]:
        """Those of `replicas` with a rank without a heartbeat for `DEAD_AFTER` seconds; raises CommError."""
        now = time.monotonic()
        if now - self._last > 2 * BEAT_EVERY:  # this process was suspended, so the ages of heartbeats are unknown
            self._changed.clear()
        self._last = now
        late = []
        for member in self._rendezvous.members(replicas):
            beat = self._rendezvous.heard(member)
            if member not in self._changed or self._changed[member][0] != beat:
                self._changed[member] = beat, now
            elif now - self._changed[member][1] > DEAD_AFTER:
                late.append(member.replica)
        return list(dict.fromkeys(late))


class Heartbeat:
    def __init__(self, connect: Callable[[], Rendezvous], stuck: Callable[[str], None] = lambda failure: None) -> None:
        """Beat through a connection of `connect`; `stuck` is called with `failure` if it is not handled in time."""
        self.loss: str | None = None  # why the group of the watched epoch is broken; None if it is whole
        self.failure: str | None = None  # the reason why this rank cannot continue
        self.newcomers: tuple[int, ...] = ()  # replicas that have loaded and wait to join
        self.plan = Plan(0, [])  # the driver's latest plan
        self._connect, self._stuck = connect, stuck
        self._watched: tuple[int, Sequence[int]] = -1, ()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def start(self) -> None:
        self._thread.start()

    def watch(self, epoch: int, replicas: Sequence[int]) -> None:
        """Watch the members of an epoch, and no others."""
        self._watched, self.loss = (epoch, replicas), None

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * BEAT_EVERY)

    def _run(self) -> None:
        number = 0
        try:
            rendezvous = self._connect()
            watch = Watch(rendezvous)
            rendezvous.beat(number)
            while not self._closed.wait(BEAT_EVERY):
                number += 1
                rendezvous.beat(number)
                watched = self._watched
                for replica in watch.silent(watched[1]):
                    rendezvous.mark_dead(replica, f"it has ended or hangs: no heartbeat for {DEAD_AFTER:.0f} s")
                loss = rendezvous.loss(*watched)
                if watched is self._watched:
                    self.loss = loss
                self.newcomers, self.plan = rendezvous.offered(), rendezvous.plan
                rendezvous.check_self()
        except RuntimeError as failure:
            if not self._closed.is_set():
                self.failure = first_line(failure)
                if not self._closed.wait(STUCK_AFTER):
                    self._stuck(self.failure)
