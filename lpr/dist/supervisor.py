"""The supervisor: the process that starts the ranks of one machine, outlives each of them, and replaces the lost ones.

torchrun ends all ranks when one fails. This process holds the rendezvous store, so that the store survives any rank. It
marks a replica dead when one of its ranks has ended, kills a rank that is stopped or hangs, so that its sockets close,
and starts a replacement for a lost replica, which loads alone and joins the others when it is ready. If no replica is
left, the first one that has loaded starts a new mesh.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from lpr.dist.places import die_with_parent, process_state, rank_environment
from lpr.dist.store_server import StoreServer

if TYPE_CHECKING:
    from lpr.dist.heartbeat import Watch
    from lpr.dist.rendezvous import Rendezvous

TICK = 0.25  # seconds between two polls of heartbeats and newcomers; the end of a process is noticed at once
BACKOFF = (0.0, 1.0, 5.0, 15.0, 60.0)
"""Seconds before a replica is restarted, by the number of its consecutive failed starts. The last value holds for all
further ones: a service that runs for months must not lose a replica for good."""
HOPELESS = 3  # consecutive failed starts at every place after which the job ends, if no replica is left
STOP_SECONDS = 10.0  # time for ranks to end after a signal, before they are killed
LEAVE_SECONDS = 30.0  # time for the other ranks to end after one that has finished the job
STOPPED_SECONDS = 2.0  # time that a rank may be stopped (SIGSTOP, a debugger) before it counts as lost
DYING_SECONDS = 2.0  # time that the ranks of a dead replica have to end by themselves, and to report why
BAD_INPUT = 2  # exit code of a rank that refuses its input: starting it again would not help
FINISHED = (0, BAD_INPUT, 130)
"""Exit codes of a rank that has finished its job: success, some bad input, or interrupted."""


@dataclass
class Replica:
    """A started replica: the processes of its ranks."""

    number: int  # among all replicas that were ever started
    place: int  # among those of the full mesh
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    is_ready: bool = False  # True if it has loaded
    codes: dict[int, int] = field(default_factory=dict)  # exit codes by process id, of the ranks that have ended
    dead_since: float | None = None  # when it was first seen marked dead
    stopped_since: dict[int, float] = field(default_factory=dict)
    """By process id of a stopped rank, when that was first seen."""

    @property
    def is_over(self) -> bool:
        return len(self.codes) == len(self.processes)

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.pid not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def is_stopped(self) -> bool:
        """True if a rank has been stopped by a signal for `STOPPED_SECONDS` (from /proc, also while it loads)."""
        now = time.monotonic()
        pids = [process.pid for process in self.processes if process.pid not in self.codes]
        stopped = [pid for pid in pids if process_state(pid) == "T"]
        self.stopped_since = {pid: self.stopped_since.get(pid, now) for pid in stopped}
        return any(now - since > STOPPED_SECONDS for since in self.stopped_since.values())


class Restarts:
    """The times at which lost replicas are restarted."""

    def __init__(self, num_places: int) -> None:
        self.due: dict[int, float] = {}  # by place, when it is to be filled
        self.drafting: set[int] = set()  # places whose replicas only draft, as far as one has loaded
        self._failures = [0] * num_places  # by place, replicas in a row that ended before they had loaded

    def plan(self, place: int, *, had_loaded: bool = False, is_refused: bool = False, is_last: bool = False) -> bool:
        """Schedule the restart of a lost replica; False if that is hopeless.

        `is_refused` is true if it refused its input, `is_last` if no replica is left that serves.
        """
        failures = 0 if had_loaded else max(self._failures[place] + 1, HOPELESS if is_refused else 0)
        self._failures[place] = failures
        if is_last and all(n >= HOPELESS for at, n in enumerate(self._failures) if at not in self.drafting):
            return False
        now = time.monotonic()
        self.due[place] = now + BACKOFF[min(failures, len(BACKOFF) - 1)]
        if is_last:  # streams wait
            self.due = {each: min(due, now + BACKOFF[HOPELESS - 1]) for each, due in self.due.items()}
        return True

    def take_due(self) -> list[int]:
        now = time.monotonic()
        taken = [place for place, due in self.due.items() if due <= now]
        self.due = {place: due for place, due in self.due.items() if place not in taken}
        return taken


class Supervisor:
    """The ranks of a job on this machine."""

    def __init__(self, command: Sequence[str], num_replicas: int, tp: int = 1) -> None:
        self.command, self.num_replicas, self.tp = list(command), num_replicas, tp
        self._replicas: dict[int, Replica] = {}  # those that have not ended, by number
        self._ended: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        """Replica, process id and exit code of ranks that have ended; None when a signal came."""
        self._num_started = [0] * num_replicas
        """By place."""
        self._epoch = -1
        self._members: list[int] = []  # the latest mesh: its epoch, and its replicas
        self._restarts = Restarts(num_replicas)
        self._code: int | None = None  # the exit code of the job, once it is known
        self._signalled: int | None = None
        self._until: float | None = None  # when the ranks that are left are killed

    def run(self) -> int:
        """Start the ranks and wait until all have ended; returns the exit code of the job.

        0 if a rank has finished the job, 2 for bad input, 1 if replicas repeatedly end before they have loaded, or 128
        plus a signal's number.
        """
        with self._signals():
            self._store = StoreServer()
            for place in range(self.num_replicas):
                self._start(place)
            # While they import their libraries: torch takes seconds to load.
            self._rendezvous, self._watch = self._open_store()
            try:
                while self._replicas or (self._restarts.due and self._code is None):
                    self._tick()
            finally:
                for replica in self._replicas.values():
                    replica.signal(signal.SIGKILL)
                self._store.close()
        return 1 if self._code is None else self._code

    def _open_store(self) -> tuple[Rendezvous, Watch]:
        from lpr.dist.heartbeat import Watch
        from lpr.dist.private_store import PrivateStore
        from lpr.dist.rendezvous import Member, Rendezvous

        store = PrivateStore(self._store.open_door(), timedelta(seconds=30))
        rendezvous = Rendezvous(store, Member(-1), self.tp)
        return rendezvous, Watch(rendezvous)

    def _start(self, place: int) -> None:
        number = place + self.num_replicas * self._num_started[place]  # modulo num_replicas: the place
        self._num_started[place] += 1
        replica = self._replicas[number] = Replica(number, place)

        def wait(process: subprocess.Popen[bytes]) -> None:
            self._ended.put((number, process.pid, process.wait()))

        for tp_rank in range(self.tp):
            rank, local_rank = number * self.tp + tp_rank, place * self.tp + tp_rank
            with self._store.open_door() as door:
                fd = door.fileno()
                variables = rank_environment(os.environ, rank, local_rank, self.num_replicas * self.tp, fd)
                # Its own process group: a Ctrl-C in the terminal is for this process, which passes it on.
                process = subprocess.Popen(self.command, env=variables, process_group=0, pass_fds=[fd])
            replica.processes.append(process)
            threading.Thread(target=wait, args=replica.processes[-1:], daemon=True).start()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Forward SIGTERM and SIGINT to the ranks, which handle them."""

        def take(number: int, _: object) -> None:
            self._signalled = number
            self._ended.put(None)

        before = {number: signal.signal(number, take) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _tick(self) -> None:
        with contextlib.suppress(queue.Empty):
            if (found := self._ended.get(timeout=TICK)) is not None:
                self._note_end(*found)
        if self._signalled is not None:
            number, self._signalled = self._signalled, None
            self._end(128 + number, STOP_SECONDS, number)
        self._note_ready()
        self._end_the_dead()
        if self._code is None:
            for place in self._restarts.take_due():
                self._start(place)
            self._found_or_offer()
        elif self._until is not None and time.monotonic() > self._until:
            for replica in self._replicas.values():
                replica.signal(signal.SIGKILL)

    def _note_end(self, number: int, pid: int, code: int) -> None:
        """Note that a rank has ended; a replica whose ranks have all ended is replaced, unless the job ends."""
        replica = self._replicas[number]
        replica.codes[pid] = code
        self._rendezvous.mark_dead(number, f"a rank has ended with code {code}")
        if code in FINISHED and replica.is_ready:
            self._end(code, LEAVE_SECONDS)
        elif self._code is None:
            replica.signal(signal.SIGKILL)  # the rest of a replica is no use
        if not replica.is_over:
            return
        del self._replicas[number]
        if self._code is not None:
            return
        print(f"lpr: replica {number} was lost (codes {sorted(replica.codes.values())})", file=sys.stderr, flush=True)
        is_refused = BAD_INPUT in replica.codes.values()
        is_planned = self._restarts.plan(
            replica.place, had_loaded=replica.is_ready, is_refused=is_refused,
            is_last=all(each.place in self._restarts.drafting for each in self._replicas.values()),
        )  # fmt: skip
        if not is_planned or (is_refused and self._epoch < 0):  # the start itself was refused, on all ranks
            self._end(BAD_INPUT if is_refused else 1, STOP_SECONDS, signal.SIGTERM)

    def _note_ready(self) -> None:
        for replica in self._replicas.values():
            if not replica.is_ready:
                members = self._rendezvous.members([replica.number])
                replica.is_ready = all(self._rendezvous.is_ready(member) for member in members)
                if any(self._rendezvous.only_drafts(member) for member in members):
                    self._restarts.drafting.add(replica.place)

    def _end_the_dead(self) -> None:
        """Kill ranks that hang or are declared dead, so that they can be replaced. Loading has no time limit here."""
        for number, replica in self._replicas.items():
            if replica.is_stopped():
                self._rendezvous.mark_dead(number, "it was stopped")
                replica.signal(signal.SIGKILL)
        ready = [replica for replica in self._replicas.values() if replica.is_ready]
        for number in self._watch.silent([replica.number for replica in ready]):
            self._rendezvous.mark_dead(number, "no heartbeat")
        now = time.monotonic()
        for replica in ready:
            if self._rendezvous.dead_reason(replica.number):
                replica.dead_since = replica.dead_since or now
                if now - replica.dead_since > DYING_SECONDS:
                    replica.signal(signal.SIGKILL)

    def _found_or_offer(self) -> None:
        """Publish the replicas that wait to join; if no mesh is left, let the first of them start one."""
        while (decision := self._rendezvous.decision(self._epoch + 1)) is not None:
            self._epoch += 1
            self._members = decision.replicas
        waiting = [number for number, replica in self._replicas.items() if replica.is_ready]
        if self._epoch >= 0:
            waiting = [number for number in waiting if number not in self._members]
        elif any(number < self.num_replicas for number in self._replicas):
            return  # the first start goes on
        is_left = self._epoch >= 0 and any(
            number in self._replicas and self._rendezvous.dead_reason(number) is None for number in self._members
        )
        founders = [number for number in waiting if number % self.num_replicas not in self._restarts.drafting]
        if founders and not is_left:
            from lpr.dist.rendezvous import Decision

            if self._epoch < 0:  # the ranks of the start, which never met, may have written there
                self._rendezvous.decide(0, Decision([]))
            epoch = max(0, self._epoch) + 1
            if self._rendezvous.decide(epoch, Decision(founders[:1])).replicas == founders[:1]:
                self._rendezvous.welcome(epoch, founders[0])
        elif self._epoch >= 0:
            self._rendezvous.offer(waiting)

    def _end(self, code: int, patience: float, number: int | None = None) -> None:
        """End the job with `code`: replace no replica, and kill the remaining ranks after `patience` seconds."""
        if not self._code:
            self._code = code
        if self._until is None:
            self._until = time.monotonic() + patience
        for replica in self._replicas.values():
            if number is not None:
                replica.signal(number)
            elif replica.number >= self.num_replicas and not replica.is_ready:
                replica.signal(signal.SIGKILL)  # it loads for a job that is over


def main(argv: Sequence[str]) -> int:
    """`python -m lpr.dist.supervisor LP TP MODULE [ARGUMENT...]`: run a module as the ranks of a mesh."""
    if len(argv) < 3 or not all(word.isdecimal() and int(word) > 0 for word in argv[:2]):
        print(f"{Path(__file__).stem}: error: give LP TP MODULE [ARGUMENT...], not {argv}", file=sys.stderr)
        return BAD_INPUT
    die_with_parent()
    lp, tp, module, *arguments = argv
    return Supervisor([sys.executable, "-m", module, *arguments], int(lp), int(tp)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
