"""Process groups that can be left when a member is lost: NCCL between GPUs, gloo between CPUs.

Each epoch of a job has a group of its own, made without torch's default group. This module is the only one that makes
and aborts groups.
"""

import contextlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lpr.dist import nccl
from lpr.dist.errors import CommError, comm_errors, first_line


class Download:
    """Words of the device on the host, in pinned places made once: nothing is allocated, staged or copied twice."""

    def __init__(self) -> None:
        self._places = [torch.empty(0, dtype=torch.int32)] * 2

    def begin(self, words: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Enqueue the copy of `words` (int32, any shape and device) after the device's queued work.

        The returned function waits for it. Its result holds until the call after the next one; words that are on the
        host already are returned as they are.
        """
        if words.device.type != "cuda":
            return lambda: words
        self._places.reverse()
        if self._places[0].numel() < words.numel():
            self._places[0] = torch.empty(words.numel(), dtype=words.dtype).pin_memory()
        place = self._places[0][: words.numel()].view(words.shape)
        place.copy_(words, non_blocking=True)
        copied = torch.cuda.Event()  # one per copy: a shared one would also wait for the next gather
        copied.record(torch.cuda.current_stream(words.device))

        def wait() -> torch.Tensor:
            copied.synchronize()
            return place

        return wait


SLICE = 0.5  # seconds between two looks of a wait at whether it can still end
CONNECT_SECONDS = 20.0  # time for the members of a new group to find each other once all have arrived at its epoch
SECRET_BYTES = 16  # what a rank shows each other one through a new connection of gloo
LOST = "another rank has ended or hangs"

abandoned: list[Any] = []  # groups with a collective that will never end: destroying one would wait for it

FindLoss = Callable[[], str | None]
"""Why the group is broken, so that no collective can end any more; None if it is whole. May raise CommError."""


class Group:
    """The ranks of one epoch. This class is a group of one rank, `ProcessGroup` one of several processes."""

    def __init__(self) -> None:
        self._download = Download()

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        """Every rank's `payload` (int32 [P]) as int32 [ranks, P] on the host; raises CommError.

        It is valid until the next gather but one: a failed gather leaves the result before it, which other ranks may
        have missed.
        """
        return self.begin_gather(payload)()

    def begin_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin a gather; what is returned waits for its result. Both raise CommError."""
        download = self._download.begin(payload)
        return lambda: download()[None]

    def broadcast(self, message: bytes, length: int) -> bytes:
        """The first rank's `message` of `length` bytes, on every rank; raises CommError."""
        return message

    def limit(self, timeout: float) -> None:
        """End waits after `timeout` seconds from now on."""

    def close(self) -> None:
        """Leave at once, so that ranks that wait for this one fail too."""


class ProcessGroup(Group):
    """A group of processes. Its two buffers are used in turn."""

    def __init__(
        self, group: Any, rank: int, size: int, device: torch.device, timeout: float, find_loss: FindLoss
    ) -> None:
        """Rank `rank` of a torch process `group` of `size` ranks, with payloads on `device`; waits end after
        `timeout` seconds."""
        super().__init__()
        self._group, self._rank, self._size, self._device = group, rank, size, device
        self._timeout, self._find_loss = timeout, find_loss
        self._gathered = [torch.empty(0, dtype=torch.int32)] * 2
        self._hanging: list[Any] = []  # a collective that may not have ended, and its tensors

    def begin_gather(self, payload: torch.Tensor) -> Callable[[], torch.Tensor]:
        payload = payload.to(self._device)  # gloo serves ranks that share a GPU, and works on the host
        self._gathered.reverse()
        count = payload.numel() * self._size
        if self._gathered[0].numel() != count:
            self._gathered[0] = torch.empty(count, dtype=payload.dtype, device=payload.device)
        gathered = self._gathered[0]
        with comm_errors(LOST):
            work = self._group._allgather_base(gathered, payload)
            if self._device.type == "cuda":
                work.wait()  # blocks the stream, not the host: the copy starts without the host
        download = self._download.begin(gathered)

        def wait() -> torch.Tensor:
            self.wait(work, gathered, payload)
            return download().view(self._size, -1)

        return wait

    def broadcast(self, message: bytes, length: int) -> bytes:
        """As Group.broadcast; no rank unpickles anything."""
        data = torch.empty(length, dtype=torch.uint8)
        if self._rank == 0:
            data.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
        data = data.to(self._device)
        with comm_errors(LOST):
            work = self._group.broadcast([data], dist.BroadcastOptions())
        self.wait(work, data)
        return data.cpu().numpy().tobytes()

    def wait(self, work: Any, *tensors: torch.Tensor) -> None:
        """Wait for a collective on `tensors`; raises CommError if it failed, took too long or can no longer end."""
        until = time.monotonic() + self._timeout
        with comm_errors(LOST):
            while not self._has_ended(work):
                self._hanging = [work, *tensors]
                if loss := self._find_loss():
                    raise CommError(loss)
                if time.monotonic() > until:
                    raise CommError(f"another rank hangs: no answer for {self._timeout:.0f} s")

    def limit(self, timeout: float) -> None:
        self._timeout = timeout

    def close(self) -> None:
        if self._group is None:
            return
        abort_group(self._group)
        if self._hanging and not self._hanging[0].is_completed():
            abandoned.append((self._group, self._hanging))
        self._group, self._hanging = None, []

    def _has_ended(self, work: Any) -> bool:
        """Wait for a collective for up to `SLICE` seconds; raises RuntimeError if it has failed."""
        if self._device.type != "cuda":
            try:
                work.wait(timedelta(seconds=SLICE))
            except RuntimeError:
                if not work.is_completed():
                    return False
                work.wait()  # raises an error of its own; without one it ended just after the time-out
            return True
        # For NCCL a wait that times out ends the communicator, and it sleeps a millisecond between two looks.
        until = time.monotonic() + SLICE
        while not work.is_completed():
            if time.monotonic() > until:
                return False
        work.wait()  # raises an error of the collective; otherwise it holds up the stream, not the host
        return True


def connect(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: float, find_loss: FindLoss,
    patience: float = CONNECT_SECONDS,
) -> Group:  # fmt: skip
    """A group of `size` ranks that meet in `store`; raises CommError if one is lost or stays away for `patience`
    seconds. Waits in the group end after `timeout` seconds."""
    if size == 1:
        return Group()
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(make_group(store, rank, size, device, timeout))
        except Exception as failure:  # raised again below
            made.append(failure)

    # In a thread: making a group only ends with its own time-out, and one of the members may be dead by now.
    thread = threading.Thread(target=make, daemon=True, name="connect")
    thread.start()
    until = time.monotonic() + patience
    while thread.is_alive():
        thread.join(0.05 if patience <= CONNECT_SECONDS else SLICE)
        if thread.is_alive() and ((loss := find_loss()) or time.monotonic() > until):
            abandoned.append(thread)
            raise CommError(f"the ranks did not find each other: {loss or 'another one has ended or hangs'}")
    with comm_errors(LOST):
        if isinstance(made[0], Exception):
            raise made[0]
    return ProcessGroup(made[0], rank, size, device, timeout, find_loss)


class Connecting:
    """A group that a thread connects while its ranks work in another one."""

    def __init__(self, connect: Callable[[FindLoss], Group], find_loss: FindLoss, find_loss_later: FindLoss) -> None:
        """`find_loss` is called in the thread, `find_loss_later` by the caller of `take`, in and after that call."""
        self.failure: str | None = None  # why there is no group
        self._find_loss, self._is_taken = find_loss_later, False
        self._group: Group | None = None

        def run() -> None:
            try:
                self._group = connect(lambda: find_loss_later() if self._is_taken else self.failure or find_loss())
            except (CommError, RuntimeError) as failure:
                self.failure = first_line(failure)

        self._thread = threading.Thread(target=run, daemon=True, name="connect beside")
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def take(self) -> Group:
        """The connected group; raises CommError if there is none."""
        while self._thread.is_alive():
            self._thread.join(0.05)
            if self._thread.is_alive() and (loss := self._find_loss()):
                self.drop(loss)
                raise CommError(loss)
        if self._group is None:
            raise CommError(self.failure or LOST)
        self._is_taken = True
        return self._group

    def drop(self, reason: str = "the mesh has changed") -> None:
        """End the thread; a group that is connected closes with its last reference."""
        self.failure, self._group = self.failure or reason, None


def make_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    """A torch process group of its own: NCCL for payloads on a GPU, else gloo."""
    if device.type == "cuda":
        return nccl.make_connected(store, rank, size, device, timeout)
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
    check_peers(store, group, rank, size)
    return group


def check_peers(store: dist.Store, group: Any, rank: int, size: int) -> None:
    """Raise RuntimeError unless each of gloo's connections leads to the rank that it should.

    gloo accepts whoever connects first and sends a small number. So each rank sends every other one a secret that only
    those who reach the store know, before anything else.
    """
    given = secrets.token_bytes(SECRET_BYTES * size)
    store.set(f"secrets/{rank}", given)  # type: ignore[arg-type]
    sent = torch.frombuffer(bytearray(given), dtype=torch.uint8)
    found = torch.empty_like(sent)
    work = group.alltoall_base(found, sent, [], [], dist.AllToAllOptions())
    work.wait(timedelta(seconds=CONNECT_SECONDS))
    mine = slice(SECRET_BYTES * rank, SECRET_BYTES * (rank + 1))
    if not hmac.compare_digest(
        found.numpy().tobytes(), b"".join(store.get(f"secrets/{other}")[mine] for other in range(size))
    ):
        raise RuntimeError("a process that is not of this job has connected to a rank")


def abort_group(group: Any) -> None:
    """End what a group still waits for. NCCL kills its communicator; gloo closes with the last reference."""
    with contextlib.suppress(RuntimeError):  # it is left because it is broken
        group.abort()


def join_replica(store: dist.Store, rank: int, size: int, nccl: bool, timeout: float) -> DeviceMesh:
    """The mesh `tp` of the ranks that share a replica's weights. Their group is torch's default group."""
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    mesh = init_device_mesh("cuda" if nccl else "cpu", (size,), mesh_dim_names=("tp",))
    for name, group in (("world", dist.group.WORLD), ("mesh", mesh.get_group())):
        check_peers(dist.PrefixStore(name, store), group, rank, size)
    limit_replica(mesh, timeout)  # the time-out of init_process_group does not reach groups that a mesh makes
    return mesh


# torch 2.14 has a public name for it.
set_timeout: Callable[..., None] = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def limit_replica(mesh: DeviceMesh, timeout: float) -> None:
    """End waits of a replica's collectives after `timeout` seconds from now on."""
    for group in (dist.group.WORLD, mesh.get_group()):
        set_timeout(timedelta(seconds=timeout), group)


def leave_replica(aborts: bool) -> None:
    """Leave torch's default group, if there is one; `aborts` where the other ranks do not come.

    Destroying an NCCL group is a collective, and live groups at exit end the process with a signal.
    """
    if not dist.is_initialized():
        return
    if aborts and "nccl" in dist.get_backend_config():
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
