"""The world behind a tiny interface: a single rank, or processes. (Tests have one of threads.)

The world is a mesh of `lp` replicas of `tp` ranks each; tp is the inner axis, so world rank w is tp rank w % tp of
replica w // tp. A step sees the replicas only. It uses one collective over the whole world, `gather`; `broadcast`
follows only when world rank 0, the *driver*, has announced commands, in a step's header or on the host channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lpr.config import InputError
from lpr.dist.channel import CommError, HostChannel, SoloChannel
from lpr.dist.download import Download

_REPORT_BYTES = 512


class MeshChangedError(CommError):
    """A gather of a mesh that is no more, whose result nobody has: the step is to be dropped."""


class Membership(Protocol):
    """How a mesh changes, as the engine sees it (lpr.dist.elastic)."""

    num_replicas: int
    """Replicas that the job was started with, and has again once all that were lost are replaced."""

    @property
    def epoch(self) -> int:
        """Number of the mesh among all that the job has had: a later driver has a higher one."""
        ...

    @property
    def newcomers(self) -> tuple[int, ...]:
        """Replicas that have loaded and wait to be taken in."""
        ...

    @property
    def has_changed(self) -> bool:
        """Is it time to `adopt` another mesh? It turns true at the same place of the program on all survivors."""
        ...

    @property
    def is_newcomer(self) -> bool:
        """Does this rank load for a mesh that may run already? Then `await_welcome` comes before the first step."""
        ...

    def compare(self, facts: Mapping[str, int]) -> None:
        """Raise InputError if this rank differs from the mesh in one of `facts`, digests under what they are of.

        Those that start a mesh have met and `agree`d; a newcomer loads alone, and asks before it is ready to join.
        """
        ...

    def adopt(self) -> list[int | None]:
        """Take on the mesh as it is now: for each replica its place before, None for a newcomer."""
        ...

    def take_in(self, newcomers: Sequence[int]) -> None:
        """Plan a mesh with `newcomers` behind the others, on all ranks after the same command; `adopt` is next."""
        ...

    def meet(self, state: bytes) -> None:
        """Form the group of the planned mesh; the driver hands `state` to the newcomers."""
        ...

    def await_welcome(self) -> bytes | None:
        """On a newcomer that has loaded: the state of the mesh that it is part of from now on; None if it is alone."""
        ...


class Comm(Protocol):
    """The ranks as a step sees them; the driver is replica 0's first rank."""

    rank: int
    """This rank's replica: its place on the `lp` axis."""
    size: int
    """Number of replicas."""
    tp_rank: int
    """This rank's place among the ranks that share its replica."""
    tp_size: int
    """Ranks per replica."""
    tp_mesh: DeviceMesh | None
    """The ranks that share this replica's weights, for the model layer; None where each rank holds all of them."""
    num_sharing: int
    """Ranks that share this rank's memory, itself included."""
    channel: HostChannel
    """Where ranks without work wait."""
    membership: Membership | None
    """How the mesh changes when ranks are lost or replaced; None where a lost rank is the loss of the job."""

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's `payload` (int32 [P], the same P everywhere), as int32 [size * tp_size, P] on the host.

        Rows are in the order of world ranks. Copying the result to the host is the one synchronisation of a step.
        Raises CommError.
        """
        ...

    def begin_gather_replica(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send this rank's `payload` (on the host) to its replica's ranks; what is returned waits for theirs.

        That is [tp_size, P]. Nothing else may be gathered along `tp` meanwhile. Raises CommError.
        """
        ...

    def broadcast(self, message: bytes, length: int) -> bytes:
        """World rank 0's `message` of `length` bytes, on every rank. Raises CommError."""
        ...

    def loaded(self) -> None:
        """The start is over: from now on a wait ends after the time-out of a step, not after that of loading."""
        ...


class SoloComm:
    """A world of one rank."""

    rank = 0
    size = 1
    tp_rank = 0
    tp_size = 1
    tp_mesh: DeviceMesh | None = None
    num_sharing = 1
    membership: Membership | None = None

    def __init__(self) -> None:
        """The only rank is the driver."""
        self.channel: HostChannel = SoloChannel()
        self._download = Download()

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """The payload itself."""
        return self._download.read(payload)[None]

    def begin_gather_replica(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The payload itself."""
        return lambda: payload[None]

    def broadcast(self, message: bytes, length: int) -> bytes:
        """The message itself."""
        return message

    def loaded(self) -> None:
        """Nobody waits."""


class ProcessComm:
    """The processes of a mesh: NCCL between GPUs, gloo between CPUs. Its buffers are made once."""

    membership: Membership | None = None

    def __init__(
        self, mesh: DeviceMesh, device: torch.device, channel: HostChannel, timeout: float, num_sharing: int = 1
    ) -> None:
        """The world as `mesh` [lp, tp], with payloads on `device`; once loaded, waits end after `timeout` seconds."""
        self.channel = channel
        self._timeout = timedelta(seconds=timeout)
        self._groups = [dist.group.WORLD, mesh.get_group("lp"), mesh.get_group("tp")]
        self._device = device
        self.rank, self.tp_rank = mesh.get_local_rank("lp"), mesh.get_local_rank("tp")
        self.size, self.tp_size = mesh.shape
        self.tp_mesh = mesh["tp"] if self.tp_size > 1 else None
        self.num_sharing = num_sharing
        self._tp_group = mesh.get_group("tp")
        self._leads = dist.get_rank() == 0
        self._gathered = torch.empty(0, dtype=torch.int32)
        self._download = Download()
        # Renamed in torch 2.13, which warns of the old name.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """One fixed-shape all-gather over the whole world: a second one along `tp` would double a step's waits."""
        payload = payload.to(self._device)  # gloo serves ranks that share a GPU, and works on the host
        num_ranks = self.size * self.tp_size
        if self._gathered.numel() != payload.numel() * num_ranks:
            self._gathered = torch.empty(payload.numel() * num_ranks, dtype=payload.dtype, device=payload.device)
        try:
            self._all_gather(self._gathered, payload)
            return self._download.read(self._gathered).view(num_ranks, -1)
        except RuntimeError as failure:
            raise CommError(_reason(failure)) from failure

    def begin_gather_replica(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """An all-gather along `tp`, on the host: a GPU's stream need not be waited for."""
        gathered = torch.empty(payload.numel() * self.tp_size, dtype=payload.dtype)
        try:
            work = self._all_gather(gathered, payload, group=self._tp_group, async_op=True)
        except RuntimeError as failure:
            raise CommError(_reason(failure)) from failure

        def wait() -> torch.Tensor:
            try:
                work.wait()
            except RuntimeError as failure:
                raise CommError(_reason(failure)) from failure
            return gathered.view(self.tp_size, -1)

        return wait

    def broadcast(self, message: bytes, length: int) -> bytes:
        """One broadcast of bytes; no rank unpickles anything."""
        data = torch.empty(length, dtype=torch.uint8)
        if self._leads:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        data = data.to(self._device)
        try:
            dist.broadcast(data, src=0)
            return data.cpu().numpy().tobytes()
        except RuntimeError as failure:
            raise CommError(_reason(failure)) from failure

    def loaded(self) -> None:
        """As Comm.loaded."""
        for group in self._groups:
            dist.distributed_c10d._set_pg_timeout(self._timeout, group)


def _reason(failure: RuntimeError) -> str:
    first = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
    return f"the exchange between ranks failed, so another rank has ended or hangs: {first[:200]}"


def agree(
    comm: Comm,
    failure: str | None,
    facts: Mapping[str, int] | None = None,
    replica_facts: Mapping[str, int] | None = None,
) -> None:
    """Meet once at a stage of the start; raises the same InputError on every rank if one failed or differs.

    `failure` is this rank's own error line, if it has one. `facts` maps what must be equal everywhere (configuration,
    tokenizer) to a 64-bit digest, `replica_facts` what must be equal along `lp` only (weights: each tp rank has other
    ones). Their keys are the same on every rank; errors name world ranks.
    """
    num_ranks = comm.size * comm.tp_size
    if num_ranks == 1:
        if failure:
            raise InputError(failure)
        return
    groups = (tuple(facts or {}), tuple(replica_facts or {}))
    values = [*(facts or {}).values(), *(replica_facts or {}).values()]
    note = (failure or "").encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES, b"\0")
    words = np.array([value & (2**64 - 1) for value in values], np.uint64).tobytes()
    payload = torch.from_numpy(np.frombuffer(note + words.ljust(64, b"\0"), np.int32).copy())
    reports = [row.numpy().tobytes() for row in comm.gather(payload)]
    for rank, report in enumerate(reports):
        text = report[:_REPORT_BYTES].rstrip(b"\0").decode(errors="replace")
        if text:
            raise InputError(f"rank {rank}: {text}")
    found = [np.frombuffer(report[_REPORT_BYTES:], np.uint64) for report in reports]
    first = 0
    for names, period in zip(groups, (1, comm.tp_size), strict=True):
        for rank in range(num_ranks):
            peer = rank % period
            different = [name for i, name in enumerate(names, first) if found[rank][i] != found[peer][i]]
            if different:
                raise InputError(f"rank {rank} has another {' and another '.join(different)} than rank {peer}")
        first += len(names)


def is_driver(comm: Comm) -> bool:
    """Is this rank world rank 0, which puts the commands in order?"""
    return comm.rank == comm.tp_rank == 0


def is_alone(comm: Comm) -> bool:
    """Is this a world of one rank?"""
    return comm.size * comm.tp_size == 1
