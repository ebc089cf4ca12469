"""The world behind a tiny interface: a single rank, processes, or threads for tests.

The world is a mesh of `lp` replicas of `tp` ranks each; tp is the inner axis, so world rank w is tp rank w % tp of
replica w // tp. A step sees the replicas only. It uses one collective over the whole world, `gather`; `broadcast`
follows a step only when world rank 0 has announced a message.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lpr.config import InputError

_REPORT_BYTES = 512


class CommError(RuntimeError):
    """A rank did not answer, or answered something else: the job cannot go on."""


class Comm(Protocol):
    """The ranks as a step sees them."""

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

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's `payload` (int32 [P], the same P everywhere), as int32 [size * tp_size, P] on the host.

        Rows are in the order of world ranks. Copying the result to the host is the one synchronisation of a step.
        Raises CommError.
        """
        ...

    def gather_replica(self, payload: torch.Tensor) -> torch.Tensor:
        """The `payload` (on the host) of each rank of this replica, as [tp_size, P]. Raises CommError."""
        ...

    def broadcast(self, message: bytes, length: int) -> bytes:
        """World rank 0's `message` of `length` bytes, on every rank. Raises CommError."""
        ...


class SoloComm:
    """A world of one rank."""

    rank = 0
    size = 1
    tp_rank = 0
    tp_size = 1
    tp_mesh: DeviceMesh | None = None
    num_sharing = 1

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """The payload itself."""
        return payload.cpu()[None]

    def gather_replica(self, payload: torch.Tensor) -> torch.Tensor:
        """The payload itself."""
        return payload[None]

    def broadcast(self, message: bytes, length: int) -> bytes:
        """The message itself."""
        return message


class ProcessComm:
    """The processes of a mesh: NCCL between GPUs, gloo between CPUs. Its buffers are made once."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, num_sharing: int = 1) -> None:
        """The world as `mesh` [lp, tp], with payloads on `device`."""
        self._device = device
        self.rank, self.tp_rank = mesh.get_local_rank("lp"), mesh.get_local_rank("tp")
        self.size, self.tp_size = mesh.shape
        self.tp_mesh = mesh["tp"] if self.tp_size > 1 else None
        self.num_sharing = num_sharing
        self._tp_group = mesh.get_group("tp")
        self._leads = dist.get_rank() == 0
        self._gathered = torch.empty(0, dtype=torch.int32)
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
            return self._gathered.view(num_ranks, -1).cpu()
        except RuntimeError as failure:
            raise CommError(_reason(failure)) from failure

    def gather_replica(self, payload: torch.Tensor) -> torch.Tensor:
        """An all-gather along `tp`, on the host: a GPU's stream need not be waited for."""
        gathered = torch.empty(payload.numel() * self.tp_size, dtype=payload.dtype)
        try:
            self._all_gather(gathered, payload, group=self._tp_group)
        except RuntimeError as failure:
            raise CommError(_reason(failure)) from failure
        return gathered.view(self.tp_size, -1)

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


class ThreadWorld:
    """Ranks that are threads of one process: rank logic in milliseconds, and every wait has a time-out."""

    def __init__(self, size: int, timeout: float = 60.0, tp: int = 1) -> None:
        """A world of `size` ranks, `tp` to a replica; one that waits longer than `timeout` seconds raises CommError.

        Nothing is sharded here: the ranks of a replica all hold the full model.
        """
        self.size = size
        self.tp = tp
        self._barrier = threading.Barrier(size, timeout=timeout)
        self._slots: list[torch.Tensor | bytes | None] = [None] * size

    def comm(self, rank: int) -> ThreadComm:
        """The world as `rank` sees it."""
        return ThreadComm(self, rank)

    def exchange(self, rank: int, value: torch.Tensor | bytes) -> list[torch.Tensor | bytes | None]:
        """Every rank's value, in rank order."""
        self._slots[rank] = value
        try:
            self._barrier.wait()
            everything = list(self._slots)
            self._barrier.wait()  # nobody may write the next value before all have read this one
        except threading.BrokenBarrierError:
            raise CommError("another rank has ended or hangs") from None
        return everything

    def abort(self) -> None:
        """Wake every waiting rank with a CommError: called when one of them fails."""
        self._barrier.abort()


class ThreadComm:
    """One rank of a ThreadWorld; counts its collectives and bytes, for tests."""

    tp_mesh: DeviceMesh | None = None

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        """World rank `rank` of `world`."""
        self._world = world
        self._world_rank = rank
        self.rank, self.tp_rank = divmod(rank, world.tp)
        self.size, self.tp_size = world.size // world.tp, world.tp
        self.num_sharing = world.size
        self.gathered_bytes: list[int] = []
        self.num_broadcasts = 0

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """As Comm.gather; ranks with unequal payloads are an error here, where NCCL would hang."""
        self.gathered_bytes.append(payload.numel() * payload.element_size())
        payloads = self._world.exchange(self._world_rank, payload.detach().cpu().clone())
        try:
            return torch.stack(payloads)  # type: ignore[arg-type]
        except RuntimeError as failure:
            raise CommError("ranks gathered payloads of different sizes") from failure

    def gather_replica(self, payload: torch.Tensor) -> torch.Tensor:
        """As Comm.gather_replica; every rank of the world takes part, as there is one barrier only."""
        first = self.rank * self.tp_size
        return torch.stack(self._world.exchange(self._world_rank, payload)[first : first + self.tp_size])  # type: ignore[arg-type]

    def broadcast(self, message: bytes, length: int) -> bytes:
        """As Comm.broadcast."""
        self.num_broadcasts += 1
        received = self._world.exchange(self._world_rank, message)[0]
        assert isinstance(received, bytes)
        return received
