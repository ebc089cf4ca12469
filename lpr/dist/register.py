"""The register of a job that outlives its ranks: who takes part, who is dead, and what survivors agree on.

It is kept in the rendezvous store, which a process that is no rank holds (lpr.dist.supervisor). Replicas are numbered as
they are started; one that is started again has a new number, so no message of the old one can be taken for its own. A
lost rank is its whole replica's loss.

The life of a job is a sequence of *epochs*. In each, one list of replicas works together, in a process group of its
own. Members that lose their group write down in the next epoch how far they have come (`Arrival`), wait for everybody
who is not dead, and the first list that somebody proposes is the one that counts for all (`meet`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import msgspec
import torch.distributed as dist

from lpr.dist.channel import BEAT_EVERY, CommError, gone

PIECE_BYTES = 1 << 20
"""Longest value that is written to the store at once: it takes 8 MiB at most."""
MOST_LEFT = 4
"""Longer messages of a member that stay in the register: those of the last epochs."""
POLL = 0.01
"""Seconds between two looks at who has arrived: agreeing takes a few of them."""


@dataclass(frozen=True)
class Member:
    """A rank of a replica."""

    replica: int
    tp_rank: int = 0

    @property
    def key(self) -> str:
        """Its name in the store."""
        return f"{self.replica}.{self.tp_rank}"


class Arrival(msgspec.Struct, frozen=True):
    """What a member says when it comes to a new epoch."""

    known: int
    """Number of the last collective whose result it has."""
    broadcast: int = 0
    """Bytes of the next collective, if that is a broadcast which it has begun; else 0."""


class Decision(msgspec.Struct, frozen=True):
    """Who works together in an epoch."""

    replicas: list[int]
    """In the order of their ranks; the first one's first rank is the driver."""
    planned: bool = False
    """Did the members go there by a command, rather than because they had lost their group?"""


class Register:
    """One thread's access to the register."""

    def __init__(self, store: dist.Store, member: Member, tp_size: int = 1) -> None:
        """For `member` of a job whose replicas have `tp_size` ranks; `store` is this thread's own connection."""
        self.store = store
        self.member = member
        self.tp_size = tp_size
        self._left: list[str] = []
        """Keys of what `leave_behind` has left."""

    def members(self, replicas: Sequence[int]) -> list[Member]:
        """The members of `replicas`, in the order of their world ranks."""
        return [Member(replica, tp_rank) for replica in replicas for tp_rank in range(self.tp_size)]

    # Life and death.

    def beat(self, number: int) -> None:
        """Say that this member lives."""
        with _store_errors():
            self.store.set(f"beat/{self.member.key}", str(number))

    def heard(self, member: Member) -> bytes:
        """The latest beat of a member; empty if there was none."""
        return self._read(f"beat/{member.key}")

    def mark_dead(self, replica: int, reason: str) -> None:
        """Let everybody know that a replica takes part no more; the first reason stays."""
        with _store_errors():
            self.store.compare_set(f"dead/{replica}", "", reason)

    def dead_reason(self, replica: int) -> str | None:
        """Why a replica takes part no more, or None if it does."""
        return self._read(f"dead/{replica}").decode() or None

    def mark_ready(self) -> None:
        """Say that this member has loaded its model, and either works already or waits to be welcomed."""
        with _store_errors():
            self.store.set(f"ready/{self.member.key}", "1")

    def is_ready(self, member: Member) -> bool:
        """Has a member loaded its model?"""
        return bool(self._read(f"ready/{member.key}"))

    # Epochs.

    def decision(self, epoch: int) -> Decision | None:
        """What has been decided for an epoch, or None if that is still open."""
        found = self._read(f"epoch/{epoch}/members")
        return msgspec.json.decode(found, type=Decision) if found else None

    def decide(self, epoch: int, decision: Decision) -> Decision:
        """Propose who works together in an epoch; returns what counts, which is the first proposal."""
        with _store_errors():
            found = self.store.compare_set(f"epoch/{epoch}/members", "", msgspec.json.encode(decision).decode())
        return msgspec.json.decode(found, type=Decision)

    def facts(self, mine: Mapping[str, int]) -> dict[str, int]:
        """What must be equal on all members with this one's place in its replica, as the first of them has said it."""
        with _store_errors():
            found = self.store.compare_set(f"facts/{self.member.tp_rank}", "", msgspec.json.encode(mine).decode())
        return msgspec.json.decode(found, type=dict[str, int])

    def leave(self, epoch: int) -> None:
        """Let those that still work in an epoch know that this member does not."""
        with _store_errors():
            self.store.set(f"epoch/{epoch}/left", self.member.key)

    def is_broken(self, epoch: int, replicas: Sequence[int]) -> bool:
        """Has some member of an epoch left it, or is dead?"""
        return bool(self._read(f"epoch/{epoch}/left")) or any(self.dead_reason(each) for each in replicas)

    def meet(self, epoch: int, replicas: Sequence[int], arrival: Arrival, timeout: float) -> Decision:
        """Come to an epoch and agree with the survivors of `replicas`; returns who works on together.

        A replica that neither arrives within `timeout` seconds nor is known to be dead hangs, and is declared dead.
        Raises CommError where this member's own replica is.
        """
        with _store_errors():
            self.store.set(f"epoch/{epoch}/here/{self.member.key}", msgspec.json.encode(arrival).decode())
        until = time.monotonic() + timeout
        while (decision := self.decision(epoch)) is None:
            self.check_self()
            missing = [each for each in replicas if not self.dead_reason(each) and not self._has_arrived(epoch, each)]
            if missing and time.monotonic() > until:
                for replica in missing:
                    self.mark_dead(replica, f"it did not come to epoch {epoch} within {timeout:.0f} s")
            elif missing:
                time.sleep(POLL)
            else:
                alive = [each for each in replicas if not self.dead_reason(each)]
                decision = self.decide(epoch, Decision(alive))
                break
        self.check_self()
        return decision

    def check_self(self) -> None:
        """Raise CommError if the others have gone on without this member's replica."""
        if reason := self.dead_reason(self.member.replica):
            raise CommError(f"replica {self.member.replica} takes part no more: {reason}")

    def arrivals(self, epoch: int, replicas: Sequence[int]) -> dict[Member, Arrival]:
        """What the members of `replicas` said when they came to an epoch."""
        found = {}
        for member in self.members(replicas):
            said = self._read(f"epoch/{epoch}/here/{member.key}")
            if said:
                found[member] = msgspec.json.decode(said, type=Arrival)
        return found

    def _has_arrived(self, epoch: int, replica: int) -> bool:
        with _store_errors():
            return self.store.check([f"epoch/{epoch}/here/{member.key}" for member in self.members([replica])])

    # Newcomers.

    def offer(self, replicas: Sequence[int]) -> None:
        """Name the replicas that have loaded and wait to be welcomed."""
        with _store_errors():
            self.store.set("newcomers", json.dumps(list(replicas)))

    def offered(self) -> tuple[int, ...]:
        """The replicas that have loaded and wait to be welcomed."""
        return tuple(json.loads(self._read("newcomers") or b"[]"))

    def welcome(self, epoch: int, replica: int) -> None:
        """Tell a replica that it takes part from `epoch` on; what it must know is there already."""
        with _store_errors():
            self.store.set(f"welcome/{replica}", str(epoch))

    def welcomed(self) -> int | None:
        """From which epoch on this member's replica takes part; None as long as nobody has said so."""
        found = self._read(f"welcome/{self.member.replica}")
        return int(found) if found else None

    # Longer messages.

    def put(self, key: str, data: bytes) -> None:
        """Leave `data` for others."""
        with _store_errors():
            pieces = [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]
            for number, piece in enumerate(pieces):
                self.store.set(f"{key}/{number}", piece)  # type: ignore[arg-type]  # bytes work, the stub says str
            self.store.set(f"{key}/size", str(len(pieces)))  # last, so that who sees it sees all

    def leave_behind(self, key: str, data: bytes) -> None:
        """Leave `data` for others as long as the last few of this kind are kept."""
        self.put(key, data)
        self._left.append(key)
        if len(self._left) > MOST_LEFT:
            self.forget(self._left.pop(0))

    def get(self, key: str, timeout: float, is_hopeless: Callable[[], bool]) -> bytes:
        """What somebody leaves under `key`; raises CommError after `timeout` seconds, or when `is_hopeless`."""
        until = time.monotonic() + timeout
        while not (size := self._read(f"{key}/size")):
            if time.monotonic() > until or is_hopeless():
                raise CommError(f"nobody has left {key}")
            time.sleep(POLL)
        with _store_errors():
            return b"".join(self.store.get(f"{key}/{number}") for number in range(int(size)))

    def has_left(self, key: str) -> bool:
        """Has somebody left something under `key`?"""
        return bool(self._read(f"{key}/size"))

    def forget(self, key: str) -> None:
        """Free what was left under `key`."""
        with _store_errors():
            for number in range(int(self._read(f"{key}/size") or 0)):
                self.store.delete_key(f"{key}/{number}")
            self.store.delete_key(f"{key}/size")

    # Announcements on the host channel.

    def announce(self, epoch: int, number: int, num_bytes: int) -> None:
        """Wake the members that wait in an epoch."""
        with _store_errors():
            self.store.set(_announcement(epoch, number), str(num_bytes))

    def await_announcement(self, epoch: int, number: int) -> int | None:
        """The bytes that an announcement speaks of; None after `BEAT_EVERY` seconds without it."""
        key = _announcement(epoch, number)
        try:
            self.store.wait([key], timedelta(seconds=BEAT_EVERY))
        except dist.DistStoreError:
            return None
        except RuntimeError as failure:
            raise CommError(gone(failure)) from failure
        return int(self._read(key))

    def drop_announcement(self, epoch: int, number: int) -> None:
        """Free an announcement that everybody has read."""
        with _store_errors():
            self.store.delete_key(_announcement(epoch, number))

    def _read(self, key: str) -> bytes:
        """What is under `key`, without a wait; empty if there is nothing."""
        with _store_errors():
            return self.store.get(key) if self.store.check([key]) else b""


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except CommError:
        raise
    except RuntimeError as failure:
        raise CommError(gone(failure)) from failure


def _announcement(epoch: int, number: int) -> str:
    return f"epoch/{epoch}/announcement/{number}"
