"""The rendezvous of a job: messages between its ranks through a key-value store.

The store is a TCPStore of torchrun's agent or of rank 0, or that of a supervisor that outlives every rank
(lpr.dist.store_server). Replicas are numbered in the order of their start, and a replacement gets a new number, so
messages of a dead replica cannot be confused with those of its replacement. The loss of a rank is the loss of its
replica.

A job is a sequence of *epochs*, each with a list of replicas and its own process group. Members that lose their group
write their last collective to the next epoch (`Arrival`) and wait for all members that are not dead. The first list
that a member then proposes is the decision for all (`meet`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from lpr.dist.errors import CommError, check_digests, comm_errors

BEAT_EVERY = 1.0
"""Seconds between two heartbeats of a rank, and between two polls of a rank that waits for an announcement."""
MOST_BROADCASTS = 16  # consecutive broadcasts before a gather, after which no rank needs their results
PIECE_BYTES = 1 << 20  # longest value written to the store at once; a TCPStore takes 8 MiB
MOST_MESSAGES = 4  # long messages of a member kept in the store: those of the latest epochs
POLL = 0.01  # seconds between two polls of an epoch's arrivals
GONE = "the rendezvous store does not answer, so the job has ended"


@dataclass(frozen=True)
class Member:
    replica: int
    tp_rank: int = 0

    @property
    def key(self) -> str:
        return f"{self.replica}.{self.tp_rank}"


@dataclass
class Evaluated:
    """What a rank has evaluated, which is the same on all ranks of its replica after as many forwards."""

    num_forwards: int = 0
    digest: int = 0  # running, of the rows of all forwards; int32


class Arrival(msgspec.Struct, frozen=True):
    """The state of a member that enters a new epoch."""

    known: int  # number of the last collective whose result it has
    broadcast: int = 0  # bytes of the next collective if it is a broadcast that the member has begun, else 0


class Decision(msgspec.Struct, frozen=True):
    """The replicas that work together in an epoch."""

    replicas: list[int]  # In the order of their ranks. The driver is the first rank of the first one.
    planned: bool = False  # True if a command led to the epoch, false if a loss did
    beside: int = 0  # number of the Plan whose group these replicas have connected; 0 without one


class Plan(msgspec.Struct, frozen=True):
    """Replicas that connect a group while the mesh works in its own: the driver will take in those that are new."""

    number: int  # from 1, ascending in a job
    replicas: list[int]  # in the order of their ranks


class JobStore:
    """One thread's access to the store, and messages longer than a value. All methods raise CommError if it is gone."""

    def __init__(self, store: dist.Store) -> None:
        """`store` is this thread's own connection."""
        self._store = store
        self._messages: list[str] = []  # keys of this rank's messages, the oldest first

    def set(self, key: str, value: str | bytes) -> None:
        with comm_errors(GONE):
            self._store.set(key, value)  # type: ignore[arg-type]  # bytes work, the stub wants a str

    def propose(self, key: str, value: bytes) -> bytes:
        """Set a key if it has no value; returns its value."""
        with comm_errors(GONE):
            return self._store.compare_set(key, "", value.decode())

    def read(self, key: str) -> bytes:
        with comm_errors(GONE):
            return self._store.get(key) if self._store.check([key]) else b""

    def has_all(self, keys: list[str]) -> bool:
        with comm_errors(GONE):
            return self._store.check(keys)

    def wait(self, key: str, seconds: float) -> bool:
        """Wait until a key has a value; False after `seconds`."""
        with comm_errors(GONE):
            try:
                self._store.wait([key], timedelta(seconds=seconds))
            except dist.DistStoreError:
                return False
        return True

    def delete(self, key: str) -> None:
        with comm_errors(GONE):
            self._store.delete_key(key)

    def put(self, key: str, data: bytes) -> None:
        """Write `data` for other ranks; it is deleted after `MOST_MESSAGES` further messages of this rank."""
        pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self.set(f"{key}/{number}", piece)
        self.set(f"{key}/size", str(len(pieces)))  # last: a reader that finds the size finds all pieces
        self._messages.append(key)
        if len(self._messages) > MOST_MESSAGES:
            old = self._messages.pop(0)
            for number in range(int(self.read(f"{old}/size") or 0)):
                self.delete(f"{old}/{number}")
            self.delete(f"{old}/size")

    def get(self, key: str, timeout: float, find_loss: Callable[[], str | None]) -> bytes:
        """The message under `key`; raises CommError after `timeout` seconds, or as soon as `find_loss` finds one."""
        until = time.monotonic() + timeout
        while not self.has(key):
            if (loss := find_loss()) or time.monotonic() > until:
                raise CommError(f"{key} was not written: {loss or f'{timeout:.0f} s have passed'}")
            time.sleep(POLL)
        with comm_errors(GONE):
            return b"".join(self._store.get(f"{key}/{n}") for n in range(int(self.read(f"{key}/size"))))

    def has(self, key: str) -> bool:
        return bool(self.read(f"{key}/size"))


class Rendezvous:
    """One member's reads and writes. All methods raise CommError if the store is gone."""

    def __init__(self, store: dist.Store, member: Member, tp_size: int = 1) -> None:
        """For `member` of a job whose replicas have `tp_size` ranks; `store` is this thread's own connection."""
        self.member, self.tp_size, self.store = member, tp_size, JobStore(store)
        self.evaluated = Evaluated()
        self._announced = -1, 0  # an epoch, and the number of its next announcement

    def members(self, replicas: Sequence[int]) -> list[Member]:
        """The members of `replicas`, in the order of their world ranks."""
        return [Member(replica, tp_rank) for replica in replicas for tp_rank in range(self.tp_size)]

    def beat(self, number: int) -> None:
        self.store.set(f"beat/{self.member.key}", str(number))

    def heard(self, member: Member) -> bytes:
        """A member's latest heartbeat; empty if there was none."""
        return self.store.read(f"beat/{member.key}")

    def mark_dead(self, replica: int, reason: str) -> None:
        """Declare a replica dead. The first reason stays."""
        self.store.propose(f"dead/{replica}", reason.encode())

    def dead_reason(self, replica: int) -> str | None:
        """Why a replica is dead; None if it is not."""
        return self.store.read(f"dead/{replica}").decode() or None

    def check_self(self) -> None:
        """Raise CommError if this member's own replica was declared dead."""
        if reason := self.dead_reason(self.member.replica):
            raise CommError(f"replica {self.member.replica} takes part no more: {reason}")

    def mark_ready(self, serves: bool = True) -> None:
        """Tell that this member has loaded, and whether it can serve without others (lpr.engine.draft_rank)."""
        self.store.set(f"ready/{self.member.key}", "serves" if serves else "drafts")

    def is_ready(self, member: Member) -> bool:
        return bool(self.store.read(f"ready/{member.key}"))

    def only_drafts(self, member: Member) -> bool:
        """True for a member that has loaded and cannot serve without others."""
        return self.store.read(f"ready/{member.key}") == b"drafts"

    def decision(self, epoch: int) -> Decision | None:
        """The decision for an epoch; None if there is none yet."""
        found = self.store.read(f"epoch/{epoch}/members")
        return msgspec.json.decode(found, type=Decision) if found else None

    def decide(self, epoch: int, decision: Decision) -> Decision:
        """Propose a decision for an epoch; returns the first proposal, which is binding."""
        found = self.store.propose(f"epoch/{epoch}/members", msgspec.json.encode(decision))
        return msgspec.json.decode(found, type=Decision)

    def facts(self, mine: Mapping[str, int]) -> dict[str, int]:
        """The digests that the first member of this tp rank has written; all members' must be equal."""
        found = self.store.propose(f"facts/{self.member.tp_rank}", msgspec.json.encode(mine))
        return msgspec.json.decode(found, type=dict[str, int])

    def check_rows(self) -> None:
        """While this rank waits: raise DesyncError if a rank of its replica that waits too has evaluated other rows.

        On a GPU ranks that have replayed steps of other shapes wait in a layer for ever, and their gather never begins.
        """
        if self.tp_size == 1:
            return
        mine, digests = self.evaluated, dict[int, list[int]]()
        self.store.set(f"rows/{self.member.key}", msgspec.json.encode((mine.num_forwards, mine.digest)))
        for member in self.members([self.member.replica]):
            count, digest = msgspec.json.decode(self.store.read(f"rows/{member.key}") or b"[-1,0]")
            if count == mine.num_forwards:
                digests[member.replica * self.tp_size + member.tp_rank] = [digest]
        check_digests([*digests.values()], [*digests])

    def leave(self, epoch: int) -> None:
        """Tell the members of an epoch that this one has left it."""
        self.store.set(f"epoch/{epoch}/left", self.member.key)

    def loss(self, epoch: int, replicas: Sequence[int]) -> str | None:
        """Why the group of an epoch is broken: a member has left it or is dead. None if it is whole."""
        for replica in replicas:
            if reason := self.dead_reason(replica):
                return f"replica {replica} was lost: {reason}"
        return f"a rank has left epoch {epoch}" if self.store.read(f"epoch/{epoch}/left") else None

    def meet(self, epoch: int, replicas: Sequence[int], arrival: Arrival, timeout: float) -> Decision:
        """Enter an epoch and agree with the survivors of `replicas` on its members.

        A replica that does not arrive within `timeout` seconds is declared dead. Raises CommError if this member's own
        replica is.
        """
        self.store.set(f"epoch/{epoch}/here/{self.member.key}", msgspec.json.encode(arrival))
        until = time.monotonic() + timeout
        while (decision := self.decision(epoch)) is None:
            self.check_self()
            alive = [each for each in replicas if not self.dead_reason(each)]
            missing = [each for each in alive if not self._has_arrived(epoch, each)]
            if not missing:
                decision = self.decide(epoch, Decision(alive))
                break
            time.sleep(POLL)
            for replica in missing if time.monotonic() > until else ():
                self.mark_dead(replica, f"it did not come to epoch {epoch} within {timeout:.0f} s")
        self.check_self()
        return decision

    def arrivals(self, epoch: int, replicas: Sequence[int]) -> dict[Member, Arrival]:
        """The arrivals at an epoch of members of `replicas`."""
        found = {member: self.store.read(f"epoch/{epoch}/here/{member.key}") for member in self.members(replicas)}
        return {member: msgspec.json.decode(data, type=Arrival) for member, data in found.items() if data}

    def _has_arrived(self, epoch: int, replica: int) -> bool:
        return self.store.has_all([f"epoch/{epoch}/here/{member.key}" for member in self.members([replica])])

    def offer(self, replicas: Sequence[int]) -> None:
        """Publish the loaded replicas that wait to join."""
        self.store.set("newcomers", msgspec.json.encode(replicas))

    @property
    def plan(self) -> Plan:
        """The driver's latest plan; that of number 0 before the first."""
        return msgspec.json.decode(self.store.read("plan") or b'{"number": 0, "replicas": []}', type=Plan)

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.store.set("plan", msgspec.json.encode(plan))

    def offered(self) -> tuple[int, ...]:
        return msgspec.json.decode(self.store.read("newcomers") or b"[]", type=tuple[int, ...])

    def welcome(self, epoch: int, replica: int) -> None:
        """Tell a replica that it is a member from `epoch` on; its state must be in the store already."""
        self.store.set(f"welcome/{replica}", str(epoch))

    def welcomed(self, replica: int | None = None) -> int | None:
        """The first epoch of a replica (default: this member's); None if it is not welcomed yet."""
        found = self.store.read(f"welcome/{self.member.replica if replica is None else replica}")
        return int(found) if found else None

    def await_welcome(self, seconds: float) -> int | None:
        """As `welcomed`, as soon as it is; None after `seconds`."""
        return self.welcomed() if self.store.wait(f"welcome/{self.member.replica}", seconds) else None

    def announce(self, epoch: int, num_bytes: int) -> None:
        """Announce a broadcast of `num_bytes` bytes to the members of an epoch."""
        number = self._next_announcement(epoch)
        self.store.set(_announcement(epoch, number), str(num_bytes))
        if number >= MOST_BROADCASTS:
            self.store.delete(_announcement(epoch, number - MOST_BROADCASTS))
        self._announced = epoch, number + 1

    def await_announcement(self, epoch: int) -> int | None:
        """The bytes of the next announced broadcast of an epoch; None after `BEAT_EVERY` seconds without one."""
        number = self._next_announcement(epoch)
        if not self.store.wait(_announcement(epoch, number), BEAT_EVERY):
            return None
        self._announced = epoch, number + 1
        return int(self.store.read(_announcement(epoch, number)))

    def _next_announcement(self, epoch: int) -> int:
        return self._announced[1] if self._announced[0] == epoch else 0


def _announcement(epoch: int, number: int) -> str:
    return f"epoch/{epoch}/announcement/{number}"


Result = torch.Tensor | bytes  # a gather's, int32 [ranks, words], or a broadcast's


class Results:
    """The results of the collectives since a rank's last gather, by number.

    A gather completes on a rank only after all ranks have begun it, so a rank can only miss results since the last
    gather. Missed results are passed through the rendezvous store.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.completed = 0  # number of the last collective that completed on this rank
        self._rendezvous = rendezvous
        self._by_number: dict[int, Result] = {}

    @property
    def known(self) -> int:
        """Number of the last collective whose result this rank has, from its group or from other ranks."""
        return max([self.completed, *self._by_number])

    @property
    def next(self) -> Result | None:
        """The result of the collective after the last completed one, if it is known."""
        return self._by_number.get(self.completed + 1)

    @property
    def num_broadcasts(self) -> int:
        """Broadcasts completed on this rank since its last gather."""
        ended = (result for number, result in self._by_number.items() if number <= self.completed)
        return sum(isinstance(result, bytes) for result in ended)

    def add(self, result: Result) -> None:
        """Keep the result of the collective after the last completed one."""
        self._by_number[self.completed + 1] = result

    def end(self) -> Result:
        """Complete the next collective and return its result. After a gather, no rank needs earlier results."""
        self.completed += 1
        result = self._by_number[self.completed]
        if isinstance(result, torch.Tensor):
            self._by_number = {number: kept for number, kept in self._by_number.items() if number >= self.completed}
        return result

    def forget(self) -> None:
        self._by_number.clear()

    def leave(self, epoch: int) -> None:
        """Write the results to the store, for ranks that enter `epoch` without them."""
        # A result is written as its number of rows (0: a broadcast) and its bytes.
        rows = {
            number: (0, result) if isinstance(result, bytes) else (len(result), result.numpy().tobytes())
            for number, result in self._by_number.items()
        }
        self._rendezvous.store.put(f"epoch/{epoch}/results/{self._rendezvous.member.key}", msgspec.msgpack.encode(rows))

    def take(self, epoch: int, members: Sequence[Member], timeout: float, find_loss: Callable[[], str | None]) -> None:
        """Read the missed results of the first of `members` that has written its own; raises CommError."""
        keys = [f"epoch/{epoch}/results/{member.key}" for member in members]
        key = next(filter(self._rendezvous.store.has, keys), keys[0])
        found = self._rendezvous.store.get(key, timeout, find_loss)
        missed = self.known
        for number, (rows, data) in msgspec.msgpack.decode(found, type=dict[int, tuple[int, bytes]]).items():
            if number > missed:
                words = torch.frombuffer(bytearray(data), dtype=torch.int32) if rows else None
                self._by_number[number] = data if words is None else words.view(rows, -1)
