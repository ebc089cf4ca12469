"""The heartbeat of a rank that survives others: a thread that says that this one lives, and looks after the rest.

Long work never reads as death, as the thread goes on; a process that is stopped, or a machine that is gone, does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from lpr.dist.channel import BEAT_EVERY, DEAD_AFTER, CommError, Silence
from lpr.dist.register import Register


class Watch:
    """Which of several members have not been heard for too long."""

    def __init__(self, register: Register) -> None:
        """Nobody is watched yet."""
        self._register = register
        self._silence = Silence()

    def silent(self, replicas: Sequence[int]) -> list[int]:
        """Those of `replicas` with a member whose heart has not beaten for `DEAD_AFTER` seconds; raises CommError."""
        members = {member.key: member for member in self._register.members(replicas)}
        late = self._silence.of({key: self._register.heard(member) for key, member in members.items()})
        return list(dict.fromkeys(members[key].replica for key in late))


class Heart:
    """The thread."""

    def __init__(self, connect: Callable[[], Register]) -> None:
        """`connect` makes a connection of the thread's own."""
        self.replicas: Sequence[int] = ()
        """Whom to watch: the replicas that work together now."""
        self.epoch = -1
        self.is_broken = False
        """Has somebody left the epoch, or died?"""
        self.failure: str | None = None
        """Why this member cannot go on."""
        self.newcomers: tuple[int, ...] = ()
        """Replicas that have loaded and wait to be welcomed."""
        self._connect = connect
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def watch(self, epoch: int, replicas: Sequence[int]) -> None:
        """Look after the members of a new epoch."""
        self.epoch, self.replicas, self.is_broken = epoch, replicas, False

    def close(self) -> None:
        """Stop beating."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * BEAT_EVERY)

    def _run(self) -> None:
        number = 0
        try:
            register = self._connect()
            watch = Watch(register)
            register.beat(number)
            while not self._closed.wait(BEAT_EVERY):
                number += 1
                register.beat(number)
                epoch, replicas = self.epoch, self.replicas
                for replica in watch.silent(replicas):
                    register.mark_dead(replica, f"no heartbeat for {DEAD_AFTER:.0f} s")
                if register.is_broken(epoch, replicas) and epoch == self.epoch:
                    self.is_broken = True
                self.newcomers = register.offered()
                register.check_self()
        except (CommError, RuntimeError) as failure:
            if not self._closed.is_set():
                self.failure = str(failure).splitlines()[0] if str(failure) else type(failure).__name__
