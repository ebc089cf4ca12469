"""The ranks of a job as a step sees them.

The world is a mesh of `lp` replicas of `tp` ranks each; tp is the inner axis, so world rank w is tp rank w % tp of
replica w // tp. A step sees the replicas only. It uses one collective over the whole world, `gather`. `broadcast`
follows only when world rank 0, the *driver*, has announced commands, in a step's header or by `announce`.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from lpr.config import InputError
from lpr.dist.errors import CommError, MeshChangedError
from lpr.dist.group import Group, leave_replica, limit_replica
from lpr.dist.membership import Membership
from lpr.dist.rendezvous import Evaluated

_REPORT_BYTES = 512


class Comm:
    """The ranks as a step sees them. `Comm()` is a world of one rank, `ProcessComm` one of several processes."""

    tp_rank: int = 0  # this rank's place on the `tp` axis
    tp_size: int = 1  # ranks per replica
    tp_mesh: DeviceMesh | None = None
    """The tensor-parallel mesh of this replica, for the model layer; None without tensor parallelism."""
    num_sharing: int = 1  # ranks that share this rank's memory, itself included
    num_drafting: int = 0
    """Number of draft-only replicas, the last ones of the job (lpr.engine.draft_rank); set by the engine."""
    membership: Membership | None = None
    """Handles lost and replaced ranks; None if a lost rank ends the job."""

    def __init__(self) -> None:
        self._group = Group()
        self.evaluated = Evaluated()

    @property
    def rank(self) -> int:
        """This rank's replica: its place on the `lp` axis."""
        return 0

    @property
    def size(self) -> int:
        return 1

    @property
    def replicas(self) -> Sequence[int]:
        """Per rank, the number of its replica in the job."""
        return range(self.size)

    @property
    def num_replicas(self) -> int:
        """Replicas of the job, lost ones included."""
        return self.membership.num_replicas if self.membership is not None else self.size

    def only_drafts(self, replica: int) -> bool:
        """True for the number of a replica that only drafts. A replacement has the role of what it replaces."""
        return replica % self.num_replicas >= self.num_replicas - self.num_drafting

    @property
    def drafting(self) -> list[int]:
        """The draft-only ranks."""
        return [rank for rank, each in enumerate(self.replicas) if self.only_drafts(each)] if self.num_drafting else []

    @property
    def num_serving(self) -> int:
        """Number of ranks that evaluate trees."""
        return self.size - len(self.drafting)

    @property
    def serves(self) -> bool:
        """True if this rank evaluates trees."""
        return self.rank not in self.drafting

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's `payload` (int32 [P], the same P everywhere), as int32 [size * tp_size, P] on the host.

        Rows are in the order of world ranks. Copying the result to the host is the only synchronisation of a step.
        Raises CommError, or MeshChangedError if the mesh no longer exists and no rank has the result.
        """
        return self._group.gather(payload)

    def begin_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin `gather`: what is launched later does not delay its result. The returned function waits for it.

        Only for a world of one rank.
        """
        return self._group.begin_gather(payload)

    def begin_gather_replica(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to gather `payload` (on the host) over the ranks of this replica.

        The returned function waits for the result [tp_size, P]. No other gather along `tp` may start before it ends.
        Raises CommError.
        """
        return self._group.begin_gather(payload)

    def broadcast(self, message: bytes, length: int) -> bytes:
        """World rank 0's `message` of `length` bytes, on every rank; b"" if it was lost with the driver.

        Raises CommError.
        """
        return message

    def announce(self, num_bytes: int) -> None:
        """On the driver: tell ranks without work that a broadcast of `num_bytes` bytes follows. Raises CommError."""

    def await_announcement(self) -> int:
        """On the other ranks: bytes of the next announced broadcast; 0 when the mesh has changed. Raises CommError.

        The wait is on the host and may last for days: a wait in a collective of the device times out and uses a core.
        """
        raise RuntimeError("the driver waits for no announcement")

    def check(self) -> None:
        """Handle lost ranks while there is no work; raises CommError if this rank cannot continue."""

    def loaded(self) -> None:
        """Mark the end of loading: later waits have the time-out of a step instead of that of loading."""

    def leave(self, reason: str) -> None:
        """Tell the other ranks that this one cannot continue: they end with this reason, or continue without it."""

    def before_close(self, release: Callable[[], None]) -> None:
        """Call the bound method `release` before communicators end, if its object is still alive (weak reference).

        NCCL's abort waits until no captured graph holds a collective of its communicator.
        """


class ProcessComm(Comm):
    """The processes of a mesh."""

    def __init__(
        self, members: Membership, tp_rank: int = 0, tp_size: int = 1, *, tp_group: Group | None = None,
        tp_mesh: DeviceMesh | None = None, num_sharing: int = 1, timeout: float = 300.0,
    ) -> None:  # fmt: skip
        """The mesh of `members`, seen from rank `tp_rank` of `tp_size` of its replica.

        With tensor parallelism, `tp_group` compares the ranks' inputs on the host and `tp_mesh` is the mesh of the
        model. After loading, waits end after `timeout` seconds.
        """
        self.tp_rank, self.tp_size, self.tp_mesh, self.num_sharing = tp_rank, tp_size, tp_mesh, num_sharing
        self.membership = members if members.survives else None
        self._members, self._timeout, self.evaluated = members, timeout, members.evaluated
        self._tp_group = tp_group if tp_group is not None else Group()
        self._group = Group()  # of this rank alone
        self._releases: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def rank(self) -> int:
        return self._members.rank

    @property
    def size(self) -> int:
        return self._members.size

    @property
    def replicas(self) -> Sequence[int]:
        return self._members.view

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """As Comm.gather: one collective over the whole world, because a second one along `tp` would add a wait."""
        found = self._members.run(lambda group: group.gather(payload))
        if found is None:
            raise MeshChangedError(f"the mesh is now one of replicas {self._members.replicas}")
        assert isinstance(found, torch.Tensor)
        return found

    def begin_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        wait = self._group.begin_gather(payload)
        return lambda: self._members.run(lambda _: wait())  # type: ignore[return-value]

    def begin_gather_replica(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As Comm.begin_gather_replica, on the host, without waiting for the GPU's stream."""
        return self._tp_group.begin_gather(payload)

    def broadcast(self, message: bytes, length: int) -> bytes:
        found = self._members.run(lambda group: group.broadcast(message, length), length)
        assert not isinstance(found, torch.Tensor)
        return found or b""

    def announce(self, num_bytes: int) -> None:
        self._members.check()
        if not is_alone(self):
            self._members.announce(num_bytes)

    def await_announcement(self) -> int:
        return self._members.await_announcement()

    def check(self) -> None:
        self._members.check()

    def loaded(self) -> None:
        self._members.loaded(self.serves)
        self._tp_group.limit(self._timeout)
        if self.tp_mesh is not None:
            limit_replica(self.tp_mesh, self._timeout)

    def leave(self, reason: str) -> None:
        self._members.stop(reason)

    def before_close(self, release: Callable[[], None]) -> None:
        self._releases.append(weakref.WeakMethod(release))

    def finish(self) -> None:
        """Wait until all ranks have the last command: a rank that leaves earlier would count as lost."""
        if not is_alone(self):
            with contextlib.suppress(CommError):
                self.gather(torch.zeros(1, dtype=torch.int32))

    def close(self, reason: str | None = None) -> None:
        """Leave the mesh; with a `reason`, as a lost rank: the others notice at once and do not wait for it."""
        self._members.stop(reason)
        for reference in self._releases:
            if (release := reference()) is not None:
                release()
        self._members.close()
        self._tp_group.close()
        leave_replica(aborts=reason is not None)


def agree(
    comm: Comm, failure: str | None, facts: Mapping[str, int] | None = None,
    replica_facts: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """A collective check at the start; raises the same InputError on every rank if one failed or differs.

    `failure` is this rank's own error message, if any. `facts` are 64-bit digests of values that must be equal on all
    ranks (configuration, tokenizer), `replica_facts` of values that must be equal along `lp` only (weights: each tp
    rank has another shard). All ranks pass the same keys; errors name world ranks.
    """
    if is_alone(comm):
        if failure:
            raise InputError(failure)
        return
    facts, replica_facts = facts or {}, replica_facts or {}
    periods = dict.fromkeys(facts, 1) | dict.fromkeys(replica_facts, comm.tp_size)
    values = [*facts.values(), *replica_facts.values()]
    note = (failure or "").encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES, b"\0")
    words = np.array([value & (2**64 - 1) for value in values], np.uint64).tobytes()
    payload = torch.from_numpy(np.frombuffer(note + words.ljust(64, b"\0"), np.int32).copy())
    reports = [row.numpy().tobytes() for row in comm.gather(payload)]
    for rank, report in enumerate(reports):
        text = report[:_REPORT_BYTES].rstrip(b"\0").decode(errors="replace")
        if text:
            raise InputError(f"rank {rank}: {text}")
    found = [np.frombuffer(report[_REPORT_BYTES:], np.uint64) for report in reports]
    for period in (1, comm.tp_size):
        compared = [(i, name) for i, (name, each) in enumerate(periods.items()) if each == period]
        for rank, row in enumerate(found):
            if different := [name for i, name in compared if row[i] != found[rank % period][i]]:
                raise InputError(f"rank {rank} has another {' and another '.join(different)} than rank {rank % period}")


def is_driver(comm: Comm) -> bool:
    """True on world rank 0, which puts the commands in order."""
    return comm.rank == comm.tp_rank == 0


def is_alone(comm: Comm) -> bool:
    return comm.size * comm.tp_size == 1
