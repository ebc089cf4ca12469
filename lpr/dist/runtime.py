"""The world that torchrun started: the only module that reads its environment, and joins and leaves its groups."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lpr.config import InputError
from lpr.dist.channel import CommError, StoreChannel
from lpr.dist.comm import Comm, ProcessComm, SoloComm
from lpr.dist.elastic import FIRST_EPOCH, ElasticComm
from lpr.dist.group import Group, IsBroken
from lpr.dist.group import connect as join_group
from lpr.dist.heart import Heart
from lpr.dist.places import SUPERVISED, die_with_parent
from lpr.dist.register import Member, Register


@dataclass(frozen=True)
class World:
    """This process's place among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    attempt: int
    """How often torchrun has restarted the job."""
    launched: bool
    """Did torchrun (or another launcher with its environment) start this process?"""
    local_size: int = 1
    """Processes on this machine."""
    supervised: bool = False
    """Are lost ranks replaced while the others go on (lpr.dist.supervisor)? Then `rank` counts all that were ever
    started, and one from `size` on replaces another."""

    @classmethod
    def from_environment(cls) -> World:
        """Read what torchrun sets (RANK, WORLD_SIZE and their kin); without it, a world of one."""
        try:
            size = int(os.environ.get("WORLD_SIZE", "1"))
            return cls(
                rank=int(os.environ.get("RANK", "0")),
                size=size,
                local_size=int(os.environ.get("LOCAL_WORLD_SIZE", size)),
                local_rank=int(os.environ.get("LOCAL_RANK", "0")),
                attempt=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                launched="RANK" in os.environ and "MASTER_ADDR" in os.environ,
                supervised=SUPERVISED in os.environ,
            )
        except ValueError as failure:
            raise InputError(f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: {failure}") from failure

    def mesh_shape(self, tp: int, lp: int | None = None) -> tuple[int, int]:
        """The mesh (lp, tp) of this world for replicas of `tp` ranks; raises InputError if it has no such mesh."""
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
    """The world as a mesh of replicas of `tp` ranks each, for as long as the context lasts.

    Every wait of the start, loading included, ends with an error after `load_timeout` seconds (default: `timeout`), and
    every wait of a step after `timeout`. NCCL serves GPUs that belong to one rank each, gloo everything else. Raises
    InputError when the ranks cannot meet.
    """
    shape = world.mesh_shape(tp)
    if world.size == 1 and not world.supervised:
        yield SoloComm()
        return
    _die_with_launcher()
    if world.supervised:
        with _join_elastic(world, device, timeout, tp, load_timeout) as elastic:
            yield elastic
        return
    limit = timedelta(seconds=max(timeout, load_timeout or timeout))
    on_gpu = device is not None and device.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        is_host = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        store = _connect(world, limit, is_host)
        num_sharing, most_sharing = sharing(store, world, memory_of(device if on_gpu else None))
        if on_gpu and tp > 1 and most_sharing > 1:
            raise _shared_gpu(tp, most_sharing)
        nccl = on_gpu and most_sharing == 1 and dist.is_nccl_available()
        # The ranks of a replica also compare what is on the host, for which a GPU's stream need not be waited for.
        backend = ("cpu:gloo,cuda:nccl" if tp > 1 else "nccl") if nccl else "gloo"
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=limit)
    except InputError:
        raise
    except (RuntimeError, ValueError) as failure:
        first = str(failure).strip().splitlines()[0]
        raise InputError(f"rank {world.rank} of {world.size} cannot join the others: {first}") from failure
    channel = None
    try:
        mesh = init_device_mesh("cuda" if nccl else "cpu", shape, mesh_dim_names=("lp", "tp"))
        for axis in ("lp", "tp"):  # the time-out of init_process_group does not reach groups made later
            dist.distributed_c10d._set_pg_timeout(limit, mesh.get_group(axis))
        channel = StoreChannel(lambda: _connect(world, limit), world.rank, world.size)
        where = torch.device(device if nccl and device is not None else "cpu")
        yield ProcessComm(mesh, where, channel, timeout, num_sharing)
        with contextlib.suppress(RuntimeError):  # a rank that has left with an error does not come
            dist.barrier()
    except BaseException:
        if nccl:  # destroying the group is a collective, for which the others do not come
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()
        raise
    finally:
        if channel is not None:
            channel.close()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _join_elastic(
    world: World, device: str | None, timeout: float, tp: int, load_timeout: float | None
) -> Iterator[ElasticComm]:
    """As `join`, where lost replicas are replaced while the others go on."""
    limit = max(timeout, load_timeout or timeout)
    on_gpu = device is not None and device.startswith("cuda")
    num_sharing = _num_sharing(world, tp, on_gpu)
    nccl = on_gpu and num_sharing == 1 and dist.is_nccl_available()
    if on_gpu:
        torch.cuda.set_device(device)
    where = torch.device(device if nccl and device is not None else "cpu")
    member = Member(*divmod(world.rank, tp))

    def store() -> dist.Store:
        return _connect(world, timedelta(seconds=limit))

    def register() -> Register:
        return Register(store(), member, tp)

    def connect(name: str, rank: int, size: int, is_broken: IsBroken) -> Group:
        meeting = dist.PrefixStore(f"group/{name}", store())
        return join_group(meeting, rank, size, where, limit if name == FIRST_EPOCH else timeout, is_broken)

    comm = None
    try:
        mesh = tp_group = None
        mine = register()
        if tp > 1:
            shared = dist.PrefixStore(f"replica/{member.replica}", store())
            backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
            dist.init_process_group(
                backend, store=shared, rank=member.tp_rank, world_size=tp, timeout=timedelta(seconds=limit)
            )
            mesh = init_device_mesh("cuda" if nccl else "cpu", (tp,), mesh_dim_names=("tp",))
            tp_group = join_group(
                dist.PrefixStore("host", shared), member.tp_rank, tp, torch.device("cpu"), limit,
                lambda: mine.dead_reason(member.replica) is not None,
            )  # fmt: skip
        comm = ElasticComm(
            mine, Heart(register), connect, world.size // tp,
            joins=world.rank >= world.size, tp_group=tp_group, timeout=timeout,
        )  # fmt: skip
        comm.tp_mesh, comm.num_sharing = mesh, num_sharing
    except (CommError, RuntimeError, ValueError) as failure:
        first = str(failure).strip().splitlines()[0]
        raise InputError(f"rank {world.rank} of {world.size} cannot join the others: {first}") from failure
    try:
        yield comm
    except BaseException as failure:
        comm.close(f"rank {world.rank} failed: {type(failure).__name__}")
        raise
    comm.finish()
    comm.close()


def memory_of(device: str | None) -> str:
    """Name of the memory that a rank's model is in: its machine, and the GPU if it has one.

    Numbers of devices do not tell, as a launcher may show each rank one GPU only, which is "cuda:0" to all of them.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine, unlike its name
    machine = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return machine if device is None else f"{machine}/{torch.cuda.get_device_properties(device).uuid}"


def sharing(store: dist.Store, world: World, memory: str) -> tuple[int, int]:
    """How many ranks share this one's `memory`, itself included, and how many share the busiest; asked of all ranks."""
    store.set(f"memory/{world.rank}", memory)
    counts = Counter(store.get(f"memory/{rank}") for rank in range(world.size))
    return counts[memory.encode()], max(counts.values())


def _num_sharing(world: World, tp: int, on_gpu: bool) -> int:
    """Ranks of a supervised job that share this one's memory; its supervisor shows all of them the same GPUs."""
    if not on_gpu:
        return world.local_size
    num_sharing = -(-world.local_size // max(1, torch.cuda.device_count()))
    if tp > 1 and num_sharing > 1:
        raise _shared_gpu(tp, num_sharing)
    return num_sharing


def _shared_gpu(tp: int, num_sharing: int) -> InputError:
    return InputError(
        f"--tp {tp} needs a GPU per rank, and {num_sharing} ranks share one: start fewer ranks, or give --device cpu"
    )


def _connect(world: World, limit: timedelta, is_host: bool = False) -> dist.Store:
    """A connection to the rendezvous store, with keys of this attempt only.

    torch 2.13 shares one store between restarts, so restarted gloo ranks would read the addresses of dead processes.
    """
    host, port = os.environ.get("MASTER_ADDR", "localhost"), int(os.environ.get("MASTER_PORT", "29500"))
    base = dist.TCPStore(
        host, port, None, is_master=is_host, timeout=limit, wait_for_workers=False, multi_tenant=is_host
    )
    return dist.PrefixStore(f"lpr-attempt-{world.attempt}", base)


def _die_with_launcher() -> None:
    """See that this process ends when its launcher dies: an orphan would wait for its peers until the time-out."""
    die_with_parent()
    launcher = os.environ.get(SUPERVISED)
    if launcher is not None and os.getppid() != int(launcher):
        raise InputError("the supervisor of this rank has ended")


def leave(world: World, code: int) -> NoReturn:
    """End the process with `code`.

    Under a launcher at once: threads of destroyed groups can abort a process that is tearing down otherwise.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    gc.unfreeze()
    if world.size > 1 or world.supervised:
        os._exit(code)
    sys.exit(code)
