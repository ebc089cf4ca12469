"""Reads the launcher's environment and joins the mesh; no other module does."""

import contextlib
import functools
import gc
import os
import socket
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, Self

import torch
import torch.distributed as dist

from lpr.config import InputError
from lpr.dist import group
from lpr.dist.comm import Comm, ProcessComm
from lpr.dist.errors import first_line
from lpr.dist.group import FindLoss, Group, join_replica, leave_replica
from lpr.dist.heartbeat import Heartbeat
from lpr.dist.membership import Membership
from lpr.dist.nccl import prepare_environment
from lpr.dist.places import DOOR, SUPERVISED, die_with_parent, is_launched, whole_number
from lpr.dist.private_store import PrivateStore, inherited_door
from lpr.dist.rendezvous import Member, Rendezvous

CLOSE_SECONDS = 20.0  # seconds for a failed rank to abort its communicators before it exits
_PORT = 29500  # torchrun's port


@dataclass(frozen=True)
class World:
    """This process's ranks and sizes, as set by torchrun."""

    rank: int
    size: int
    local_rank: int
    attempt: int  # number of restarts of the job by torchrun
    launched: bool  # True if torchrun, or another launcher with its environment, started this process
    local_size: int = 1  # processes on this machine
    supervised: bool = False
    """True if lost ranks are replaced while the others continue (lpr.dist.supervisor). `rank` then counts all ranks
    that were ever started; ranks from `size` on are replacements."""
    has_agent_store: bool = False  # True if the launcher, and not rank 0, holds the rendezvous store

    @classmethod
    def from_environment(cls) -> Self:
        """Read torchrun's variables (RANK, WORLD_SIZE, ...); a world of one unless a rank and an address are set.

        WORLD_SIZE or LOCAL_RANK alone are ignored: compose files, schedulers and notebooks leave them set. Raises
        InputError for invalid numbers and for ranks that cannot connect.
        """
        alone = cls(rank=0, size=1, local_rank=0, attempt=0, launched=False)
        if not os.environ.get("RANK") and not os.environ.get("MASTER_ADDR"):
            return alone
        size, rank = whole_number("WORLD_SIZE", 1), whole_number("RANK", 0)
        if not is_launched():
            if size == 1 and rank == 0:
                return alone
            missing = "RANK" if os.environ.get("MASTER_ADDR") else "MASTER_ADDR"
            raise InputError(f"rank {rank} of WORLD_SIZE {size} has no {missing}: use torchrun, or unset its variables")
        if size < 1 or (rank >= size and SUPERVISED not in os.environ):
            raise InputError(f"RANK {rank} is no rank of WORLD_SIZE {size}: start the ranks with torchrun")
        if size > 1:
            whole_number("MASTER_PORT", _PORT)
        return cls(
            rank=rank,
            size=size,
            local_size=whole_number("LOCAL_WORLD_SIZE", size),
            local_rank=whole_number("LOCAL_RANK", 0),
            attempt=whole_number("TORCHELASTIC_RESTART_COUNT", 0),
            launched=is_launched(),
            supervised=SUPERVISED in os.environ,
            has_agent_store=os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    def mesh_shape(self, tp: int, lp: int | None = None) -> tuple[int, int]:
        """The mesh shape (lp, tp) of this world for replicas of `tp` ranks; raises InputError if there is none."""
        if lp is not None and (lp < 1 or tp < 1 or lp * tp != self.size):
            raise InputError(f"a mesh of lp {lp} x tp {tp} needs {lp * tp} ranks, and this job has {self.size}")
        if tp < 1 or self.size % tp:
            fits = ", ".join(str(n) for n in range(1, self.size + 1) if self.size % n == 0)
            raise InputError(f"--tp {tp} does not divide the {self.size} ranks of this job; {fits} would")
        return self.size // tp, tp

    def device(self, wanted: str | None) -> str | None:
        """This rank's device: the given one, or the GPU of its local rank (ranks share GPUs if there are fewer)."""
        if wanted is None and torch.cuda.is_available():
            wanted = "cuda"
        if wanted == "cuda" and self.launched:
            return f"cuda:{self.local_rank % max(1, torch.cuda.device_count())}"
        return wanted


@contextlib.contextmanager
def join(
    world: World, device: str | None, timeout: float, tp: int = 1, load_timeout: float | None = None
) -> Iterator[Comm]:
    """Context manager: the world as a mesh of replicas of `tp` ranks each.

    Every wait of the start, loading included, ends with an error after `load_timeout` seconds (default: `timeout`), and
    every wait of a step after `timeout`. Raises InputError if the ranks cannot connect.
    """
    world.mesh_shape(tp)
    if world.size == 1 and not world.supervised:
        yield Comm()
        return
    die_with_parent()  # else an orphan would wait for its peers until the time-out
    if world.supervised and os.getppid() != int(os.environ[SUPERVISED]):
        raise InputError("the supervisor of this rank has ended")
    try:
        comm = _meet(world, device, timeout, tp, max(timeout, load_timeout or timeout))
    except InputError:
        raise
    except (RuntimeError, ValueError) as failure:
        leave_replica(aborts=True)
        where = f"rank {world.rank} of {world.size}"
        raise InputError(f"{where} cannot join the others: {first_line(failure)}") from failure
    try:
        yield comm
    except BaseException as failure:
        _close_or_leave(comm, f"rank {world.rank} failed: {type(failure).__name__}", failure)
        raise
    comm.finish()
    comm.close()


def _close_or_leave(comm: ProcessComm, reason: str, failure: BaseException) -> None:
    """Leave the mesh as a lost rank; exits the process if a communicator cannot be aborted in time."""
    closing = threading.Thread(target=comm.close, args=(reason,), daemon=True, name="close")
    closing.start()
    closing.join(CLOSE_SECONDS)
    if closing.is_alive():
        traceback.print_exception(failure)
        _end_process("a communicator does not end")


def _end_process(reason: str) -> None:
    print(f"lpr: this rank ends its process: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _meet(world: World, device: str | None, timeout: float, tp: int, load_timeout: float) -> ProcessComm:
    """Join the mesh, with NCCL if each rank has its own GPU, else with gloo."""
    on_gpu = device is not None and device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    member = Member(*divmod(world.rank, tp))
    limit = timedelta(seconds=load_timeout)
    store = connect_store(world, limit, is_host=world.rank == 0 and not world.has_agent_store)
    rendezvous = Rendezvous(store, member, tp)
    num_sharing, most_sharing = _count_sharing(world, store, device if on_gpu else None)
    if on_gpu and tp > 1 and most_sharing > 1:
        advice = "start fewer ranks, or give --device cpu"
        raise InputError(f"--tp {tp} needs a GPU per rank, and {most_sharing} ranks share one: {advice}")
    nccl = on_gpu and most_sharing == 1 and dist.is_nccl_available()
    if nccl:
        prepare_environment(survives=world.supervised)
    where = torch.device(device if nccl and device is not None else "cpu")

    def connect(name: str, rank: int, size: int, find_loss: FindLoss, is_start: bool) -> Group:
        meeting = dist.PrefixStore(f"group/{name}", connect_store(world, limit))
        waits = (load_timeout, find_loss, load_timeout) if is_start else (timeout, find_loss)
        return group.connect(meeting, rank, size, where, *waits)

    def find_loss_in_replica() -> str | None:
        rendezvous.check_rows()
        return rendezvous.dead_reason(member.replica)

    tp_group = tp_mesh = None
    if tp > 1:
        shared = dist.PrefixStore(f"replica/{member.replica}", connect_store(world, limit))
        tp_mesh = join_replica(shared, member.tp_rank, tp, nccl, load_timeout)
        # The tp ranks of a replica also compare host data, through gloo, without waiting for the GPU's stream.
        tp_group = group.connect(
            dist.PrefixStore("host", shared), member.tp_rank, tp, torch.device("cpu"), load_timeout,
            find_loss_in_replica, patience=load_timeout,
        )  # fmt: skip
    members = Membership(
        rendezvous, Heartbeat(lambda: Rendezvous(connect_store(world, limit), member, tp), _end_process), connect,
        world.size // tp,
        survives=world.supervised, joins=world.rank >= world.size, timeout=timeout,
        connects_beside=not nccl,  # two communicators beside captured collectives were never run
    )  # fmt: skip
    return ProcessComm(
        members, member.tp_rank, tp, tp_group=tp_group, tp_mesh=tp_mesh, num_sharing=num_sharing, timeout=timeout
    )


def memory_of(device: str | None) -> str:
    """An identifier of the memory that a rank's model is in: its machine, and the GPU if it has one.

    Device indices do not identify a GPU: a launcher may show each rank one GPU only, "cuda:0" for all of them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine, unlike its name
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return machine if device is None else f"{machine}/{torch.cuda.get_device_properties(device).uuid}"


def sharing(store: dist.Store, world: World, memory: str) -> tuple[int, int]:
    """The number of ranks that share this one's `memory`, and the maximum over all ranks; a collective call."""
    store.set(f"memory/{world.rank}", memory)
    counts = Counter(store.get(f"memory/{rank}") for rank in range(world.size))
    return counts[memory.encode()], max(counts.values())


def _count_sharing(world: World, store: dist.Store, device: str | None) -> tuple[int, int]:
    """As `sharing`. Under a supervisor it is computed: all ranks see the same GPUs and do not start together."""
    if not world.supervised:
        return sharing(store, world, memory_of(device))
    num_devices = 1 if device is None else max(1, torch.cuda.device_count())
    num_sharing = -(-world.local_size // num_devices)
    return num_sharing, num_sharing


def connect_store(world: World, limit: timedelta, is_host: bool = False) -> dist.Store:
    """A connection to the rendezvous store for one thread: the supervisor's store, or the one at MASTER_ADDR.

    Keys have a prefix per attempt: torch 2.13 shares one store between restarts, so restarted gloo ranks would read the
    addresses of dead processes.
    """
    if world.supervised:
        return _private_store(limit)
    host, port = os.environ["MASTER_ADDR"], whole_number("MASTER_PORT", _PORT)
    base = dist.TCPStore(
        host, port, None, is_master=is_host, timeout=limit, wait_for_workers=False, multi_tenant=is_host
    )
    return dist.PrefixStore(f"lpr-attempt-{world.attempt}", base)


@functools.cache
def _private_store(limit: timedelta) -> PrivateStore:
    """The single PrivateStore of this process, used by all threads."""
    return PrivateStore(inherited_door(DOOR), limit)


def leave(code: int) -> NoReturn:
    """End the process with `code`.

    Under a launcher without teardown: threads of destroyed groups can abort a process in it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.unfreeze()
    if is_launched():
        os._exit(code)
    sys.exit(code)
