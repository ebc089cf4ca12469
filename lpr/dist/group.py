"""Process groups that can be left when a member is lost: gloo between CPUs, NCCL between GPUs.

They are made without a default group: each epoch of a job has its own, and what a dead one still holds is let go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lpr.dist.channel import CommError
from lpr.dist.download import Download

SLICE = 0.5
"""Seconds that a wait lasts between two looks at whether it can still end."""
CONNECT_SECONDS = 20.0
"""Time for the members of a new group to find each other, once all have said that they come."""

_abandoned: list[Any] = []
"""Groups with a collective that will never end: destroying one would wait for it."""


class Group(Protocol):
    """The ranks of one epoch."""

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's `payload` (int32 [P]) as int32 [ranks, P] on the host; valid until the next but one gather.

        Raises CommError.
        """
        ...

    def broadcast(self, message: bytes, length: int) -> bytes:
        """The first rank's `message` of `length` bytes, on every rank. Raises CommError."""
        ...

    def limit(self, timeout: float) -> None:
        """Let waits end after `timeout` seconds from now on."""
        ...

    def close(self) -> None:
        """Leave at once, so that others that wait for this rank fail too."""
        ...


IsBroken = Callable[[], bool]
"""Is a member of the group lost, so that no collective can end any more?"""


class ProcessGroup:
    """A group of processes. Its buffers are made once, two of them: a failed gather must not spoil the one before."""

    def __init__(
        self, group: Any, rank: int, size: int, device: torch.device, timeout: float, is_broken: IsBroken
    ) -> None:
        """Rank `rank` of a torch process `group` of `size` ranks, with payloads on `device`."""
        self._group = group
        self._rank = rank
        self._size = size
        self._device = device
        self._timeout = timeout
        self._is_broken = is_broken
        self._gathered = [torch.empty(0, dtype=torch.int32)] * 2
        self._download = Download()
        self._hangs: list[Any] = []

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """As Group.gather."""
        payload = payload.to(self._device)
        self._gathered.reverse()
        count = payload.numel() * self._size
        if self._gathered[0].numel() != count:
            self._gathered[0] = torch.empty(count, dtype=payload.dtype, device=payload.device)
        self._wait(lambda: self._group._allgather_base(self._gathered[0], payload), self._gathered[0], payload)
        return self._download.read(self._gathered[0]).view(self._size, -1)

    def broadcast(self, message: bytes, length: int) -> bytes:
        """As Group.broadcast; no rank unpickles anything."""
        data = torch.empty(length, dtype=torch.uint8)
        if self._rank == 0:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        data = data.to(self._device)
        self._wait(lambda: self._group.broadcast([data], _FROM_FIRST), data)
        return data.cpu().numpy().tobytes()

    def _wait(self, begin: Callable[[], Any], *held: Any) -> None:
        """Begin a collective on tensors `held` and wait for its end, looking now and then whether it can still end."""
        try:
            work = begin()
            until = time.monotonic() + self._timeout
            while not self._has_ended(work):
                self._hangs = [work, *held]
                if self._is_broken() or time.monotonic() > until:
                    raise CommError("the exchange between ranks cannot end: another rank has ended or hangs")
        except CommError:
            raise
        except RuntimeError as failure:
            raise CommError(str(failure).strip().split("\n")[0][:200]) from failure

    def _has_ended(self, work: Any) -> bool:
        """Wait for a collective for up to `SLICE` seconds; raises RuntimeError if it has failed."""
        if self._device.type != "cuda":
            try:
                work.wait(timedelta(seconds=SLICE))
            except RuntimeError:
                if work.is_completed():  # with an error of its own
                    raise
                return False
            return True
        # To NCCL a wait that times out is the end of the communicator, and it sleeps a millisecond between two looks.
        until = time.monotonic() + SLICE
        while not work.is_completed():
            if time.monotonic() > until:
                return False
        work.wait()  # raises what has failed; else it holds up the stream, not the host
        return True

    def limit(self, timeout: float) -> None:
        """As Group.limit."""
        self._timeout = timeout

    def close(self) -> None:
        """As Group.close."""
        if self._group is None:
            return
        abort_group(self._group)
        if self._hangs and not self._hangs[0].is_completed():
            _abandoned.append((self._group, self._hangs))
        self._group, self._hangs = None, []


class SoloGroup:
    """A group of one rank."""

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """The payload itself."""
        return payload.cpu()[None].clone()

    def broadcast(self, message: bytes, length: int) -> bytes:
        """The message itself."""
        return message

    def limit(self, timeout: float) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nobody waits."""


def connect(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: float, is_broken: IsBroken
) -> Group:
    """A group of `size` ranks that meet in `store`, all of which come; raises CommError if one is lost meanwhile."""
    if size == 1:
        return SoloGroup()
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(make_group(store, rank, size, device, timeout))
        except RuntimeError as failure:
            made.append(failure)

    # In a thread: the search for the others ends with its own time-out only, and one of them may be dead by now.
    thread = threading.Thread(target=make, daemon=True, name="connect")
    thread.start()
    until = time.monotonic() + CONNECT_SECONDS
    while thread.is_alive():
        thread.join(0.05)
        if thread.is_alive() and (is_broken() or time.monotonic() > until):
            _abandoned.append(thread)
            raise CommError("the ranks did not find each other: another one has ended or hangs")
    if isinstance(made[0], RuntimeError):
        raise CommError(str(made[0]).strip().split("\n")[0][:200])
    return ProcessGroup(made[0], rank, size, device, timeout, is_broken)


def make_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    """A torch process group of its own: NCCL for payloads on a GPU, else gloo."""
    limit = timedelta(seconds=timeout)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, limit)


def abort_group(group: Any) -> None:
    """End what a group still waits for. NCCL kills its communicator; gloo closes with the last reference."""
    abort = getattr(group, "abort", None)
    if abort is not None:
        try:
            abort()
        except RuntimeError:  # broken already, which is why it is left
            return


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return options


_FROM_FIRST = _from_first()
