"""The world of the `lp` axis behind a tiny interface: a single rank, processes, or threads for tests.

A decode step uses one collective, `gather`. `broadcast` follows a step only when rank 0 has announced a message.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from lpr.config import InputError

_REPORT_BYTES = 512


class CommError(RuntimeError):
    """A rank did not answer, or answered something else: the job cannot go on."""


class Comm(Protocol):
    """The ranks as a step sees them."""

    rank: int
    size: int

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's `payload` (int32 [P], the same P everywhere), as int32 [size, P] on the host.

        Copying the result to the host is the one synchronisation of a step. Raises CommError.
        """
        ...

    def broadcast(self, message: bytes, length: int) -> bytes:
        """Rank 0's `message` of `length` bytes, on every rank. Raises CommError."""
        ...


class SoloComm:
    """A world of one rank."""

    rank = 0
    size = 1

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """The payload itself."""
        return payload.cpu()[None]

    def broadcast(self, message: bytes, length: int) -> bytes:
        """The message itself."""
        return message


class ProcessComm:
    """The ranks of a process group: NCCL between GPUs, gloo between CPUs. Its buffers are made once."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """The ranks of `group`, with payloads on `device`."""
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._gathered = torch.empty(0, dtype=torch.int32)
        # Renamed in torch 2.13, which warns of the old name.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """One fixed-shape all-gather."""
        payload = payload.to(self._device)  # gloo serves ranks that share a GPU, and works on the host
        count = payload.numel() * self.size
        if self._gathered.numel() != count:
            self._gathered = torch.empty(count, dtype=payload.dtype, device=payload.device)
        try:
            self._all_gather(self._gathered, payload, group=self._group)
            return self._gathered.view(self.size, -1).cpu()
        except RuntimeError as failure:
            raise CommError(_reason(failure)) from failure

    def broadcast(self, message: bytes, length: int) -> bytes:
        """One broadcast of bytes; no rank unpickles anything."""
        data = torch.empty(length, dtype=torch.uint8)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        data = data.to(self._device)
        try:
            dist.broadcast(data, group_src=0, group=self._group)
            return data.cpu().numpy().tobytes()
        except RuntimeError as failure:
            raise CommError(_reason(failure)) from failure


def _reason(failure: RuntimeError) -> str:
    first = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
    return f"the exchange between ranks failed, so another rank has ended or hangs: {first[:200]}"


def agree(comm: Comm, failure: str | None, facts: Mapping[str, int] | None = None) -> None:
    """Meet once at a stage of the start; raises the same InputError on every rank if one failed or differs.

    `failure` is this rank's own error line, if it has one. `facts` maps what must be equal everywhere (configuration,
    weights, tokenizer) to a 64-bit digest; its keys are the same on every rank.
    """
    facts = facts or {}
    note = (failure or "").encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES, b"\0")
    words = np.array([value & (2**64 - 1) for value in facts.values()], np.uint64).tobytes()
    payload = torch.from_numpy(np.frombuffer(note + words.ljust(64, b"\0"), np.int32).copy())
    reports = [row.numpy().tobytes() for row in comm.gather(payload)]
    for rank, report in enumerate(reports):
        text = report[:_REPORT_BYTES].rstrip(b"\0").decode(errors="replace")
        if text:
            raise InputError(f"rank {rank}: {text}" if comm.size > 1 else text)
    expected = np.frombuffer(reports[0][_REPORT_BYTES:], np.uint64)
    for rank, report in enumerate(reports):
        found = np.frombuffer(report[_REPORT_BYTES:], np.uint64)
        different = [name for i, name in enumerate(facts) if found[i] != expected[i]]
        if different:
            raise InputError(f"rank {rank} has another {' and another '.join(different)} than rank 0")


class ThreadWorld:
    """Ranks that are threads of one process: rank logic in milliseconds, and every wait has a time-out."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        """A world of `size` ranks; a rank that waits longer than `timeout` seconds raises CommError."""
        self.size = size
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

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        """Rank `rank` of `world`."""
        self._world = world
        self.rank = rank
        self.size = world.size
        self.gathered_bytes: list[int] = []
        self.num_broadcasts = 0

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """As Comm.gather; ranks with unequal payloads are an error here, where NCCL would hang."""
        self.gathered_bytes.append(payload.numel() * payload.element_size())
        payloads = self._world.exchange(self.rank, payload.detach().cpu().clone())
        try:
            return torch.stack(payloads)  # type: ignore[arg-type]
        except RuntimeError as failure:
            raise CommError("ranks gathered payloads of different sizes") from failure

    def broadcast(self, message: bytes, length: int) -> bytes:
        """As Comm.broadcast."""
        self.num_broadcasts += 1
        received = self._world.exchange(self.rank, message)[0]
        assert isinstance(received, bytes)
        return received
