"""NCCL for ranks that are threads of one process, each with a pretend GPU: what matters where ranks are lost.

Imitated, from torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and from NCCL's sources:

* the constructor only notes; the first collective connects, on the caller's thread and without a time-out
  (`initNCCLComm`); `eager_connect_single_device` connects at once;
* a collective runs on a stream of its own, after what the current stream has so far; `wait` orders the current stream
  after it (`WorkNCCL::synchronizeStream`) and returns. The copies to pinned memory that follow are launched; other
  work behind a collective that has not ended waits on the host here. An error is raised by a wait that comes after it;
* collectives meet in the order of their launches, whatever they are: other kinds or sizes are an error here;
* one in a capture becomes part of the graph, and each replay meets again. Unless NCCL_GRAPH_REGISTER is 0, ranks
  register its buffers with each other during the capture (NCCL's register/coll_reg.cc);
* `abort` waits until graphs with its collectives are gone (NCCL's init.cc, `commReclaim`: persistent references);
* the watchdog asks for events, which a capture of the error mode "global" does not allow; it ends the process when a
  collective fails (TORCH_NCCL_ASYNC_ERROR_HANDLING), and writes a key that the monitors of all others end theirs by,
  newcomers too (TORCH_NCCL_DUMP_ON_TIMEOUT, TORCH_NCCL_ENABLE_MONITORING). An end is written down here.

What would hang raises HangError after `Job.patience` seconds. Not imitated: algorithms, topology, NVLS, bandwidth.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any

import torch

from tests.fakes.pretend_device import PretendError, find_gpu, held
from tests.fakes.pretend_streams import Stream


class HangError(BaseException):
    """A rank waits for one that does not come. No Exception, as no program catches that it hangs."""


class Job:
    """What the ranks of a job share."""

    def __init__(self, patience: float = 2.0) -> None:
        self.patience = patience
        self.ended: dict[int, str] = {}
        """Ranks whose watchdog or monitor has ended the process."""
        self.lost: set[int] = set()
        self.is_signalled = False
        """The key in the store that monitors look for."""
        self._met: dict[Hashable, dict[int, Any]] = {}
        self._changed = threading.Condition()

    def bring(self, key: Hashable, rank: int, value: Any) -> None:
        """Come to a meeting."""
        with self._changed:
            self._met.setdefault(key, {})[rank] = value
            self._changed.notify_all()

    def found(self, key: Hashable, size: int) -> dict[int, Any] | None:
        """What all ranks have brought; None as long as one is missing."""
        met = self._met.get(key, {})
        return met if len(met) == size else None

    def has_ended(self, key: Hashable, size: int) -> bool:
        """True if all have come, or one that has not is lost."""
        met = self._met.get(key, {})
        return len(met) == size or not self.lost.isdisjoint(set(range(size)) - set(met))

    def wait(self, key: Hashable, rank: int, size: int) -> dict[int, Any]:
        """What all have brought; raises RuntimeError if one is lost, and HangError."""
        until = time.monotonic() + self.patience
        with self._changed:
            while (found := self.found(key, size)) is None:
                missing = set(range(size)) - set(self._met[key])
                if missing & self.lost:
                    raise RuntimeError("NCCL error: remote process exited or there was a network error")
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    raise HangError(f"rank {rank} waits in {key} for ranks {sorted(missing)}, which do not come")
        return found

    def lose(self, rank: int) -> None:
        """The process of a rank is gone."""
        with self._changed:
            self.lost.add(rank)
            self._changed.notify_all()

    def watch(self, rank: int) -> None:
        """The watchdog of a rank has seen an error."""
        if _is_on("TORCH_NCCL_ASYNC_ERROR_HANDLING"):
            self.ended[rank] = "its watchdog"
        self.is_signalled = self.is_signalled or _is_on("TORCH_NCCL_DUMP_ON_TIMEOUT")

    def monitor(self, rank: int) -> None:
        """The monitor of a rank looks for the key."""
        if self.is_signalled and _is_on("TORCH_NCCL_ENABLE_MONITORING"):
            self.ended.setdefault(rank, "its monitor")


def _is_on(name: str) -> bool:
    return os.environ.get(name, "1") != "0"


class PretendNccl:
    """As torch.distributed.ProcessGroupNCCL; `nccl_of(job)` makes the class."""

    job: Job

    class Options:
        _timeout: timedelta | None = None

    def __init__(self, store: Any, rank: int, size: int, options: Options | None = None) -> None:
        self.rank, self.size, self.is_connected = rank, size, False
        self._name = store if isinstance(store, str) else id(store)
        self._count = self._registered = 0
        self._graphs: list[weakref.ref[Any]] = []
        self._stream: Stream | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._connect()

    def _connect(self) -> None:
        self.job.monitor(self.rank)
        key = (self._name, "connect")
        self.job.bring(key, self.rank, None)
        self.job.wait(key, self.rank, self.size)
        self.is_connected = True
        if (gpu := find_gpu()) is not None:
            self._stream = Stream(gpu.streams)
            gpu.num_watched += 1

    def _allgather_base(self, gathered: torch.Tensor, payload: torch.Tensor) -> Work:
        def write(found: list[torch.Tensor]) -> None:
            held(gathered).copy_(torch.cat(found).view(gathered.shape))

        return self._begin("all-gather", payload, gathered, write)

    def allreduce(self, tensors: list[torch.Tensor]) -> Work:
        def write(found: list[torch.Tensor]) -> None:
            held(tensors[0]).copy_(torch.stack(found).sum(0))

        return self._begin("all-reduce", tensors[0], tensors[0], write)

    def _begin(self, kind: str, given: Any, made: Any, write: Callable[[list[torch.Tensor]], None]) -> Work:
        if not self.is_connected:
            self._connect()
        gpu = find_gpu()

        def meet() -> None:
            Work(self, kind, held(given).clone(), write, None).finish()

        if gpu is None or gpu.capturing is None:
            if gpu is not None and self._stream is not None:
                self._stream.wait_stream(gpu.streams.current)
            return Work(self, kind, held(given).clone(), write, (given, made))
        self._graphs.append(weakref.ref(gpu.capturing))
        gpu.capturing.keep([made])
        gpu.capturing.add(meet, (), {}, [], [given], [made])
        if _is_on("NCCL_GRAPH_REGISTER"):
            self._registered += 1
            key = (self._name, "registration", self._registered)
            self.job.bring(key, self.rank, None)
            self.job.wait(key, self.rank, self.size)
        return Captured()

    def next_key(self, kind: str, shape: Any) -> Hashable:
        self._count += 1
        return self._name, "collective", self._count

    def abort(self) -> None:
        until = time.monotonic() + self.job.patience
        while any(graph is not None and not graph.is_reset for graph in (find() for find in self._graphs)):
            if time.monotonic() > until:
                raise HangError(f"the abort of rank {self.rank} waits for graphs with collectives")
            time.sleep(0.005)
        if self.is_connected and (gpu := find_gpu()) is not None:
            gpu.num_watched -= 1
        self.is_connected = False

    @property
    def stream(self) -> Stream | None:
        return self._stream


def nccl_of(job: Job) -> type[PretendNccl]:
    """The class that the ranks of a job make their groups of."""
    return type("ProcessGroupNCCL", (PretendNccl,), {"job": job})


class Work:
    """A collective that has begun."""

    def __init__(self, group: PretendNccl, kind: str, given: torch.Tensor, write: Any, uses: Any) -> None:
        self._group, self._write = group, write
        self._is_done = False
        self._key = group.next_key(kind, given.shape)
        gpu = find_gpu()
        if gpu is not None and group.stream is not None and uses is not None:
            outer, gpu.streams.current = gpu.streams.current, group.stream
            gpu.use("a collective", [uses[0]], [uses[1]])
            gpu.streams.current = outer
        group.job.bring(self._key, group.rank, (kind, given))

    def is_completed(self) -> bool:
        """True if it has ended or failed."""
        self._group.job.monitor(self._group.rank)
        return self._group.job.has_ended(self._key, self._group.size)

    def wait(self, *_: Any) -> bool:
        gpu, stream = find_gpu(), self._group.stream
        is_held_up = gpu is not None and stream is not None and not self.is_completed()
        if not is_held_up:
            self.finish()
        if gpu is not None and stream is not None:
            gpu.streams.current.wait_stream(stream)
            gpu.streams.current.held_up += [self] if is_held_up else []
        return True

    def finish(self) -> None:
        """Wait for the other ranks and write the result, on the communicator's stream."""
        if self._is_done:
            return
        group = self._group
        try:
            found = group.job.wait(self._key, group.rank, group.size)
        except RuntimeError:
            group.job.watch(group.rank)
            raise
        if len({(kind, each.shape) for kind, each in found.values()}) > 1:
            raise PretendError(f"ranks meet in different collectives: {[kind for kind, _ in found.values()]}")
        with torch.utils._python_dispatch._disable_current_modes():
            self._write([found[rank][1] for rank in range(group.size)])
        self._is_done = True


class Captured:
    """A collective of a graph: its stream is the graph's."""

    def is_completed(self) -> bool:
        raise PretendError("the host asks for a collective while it is captured")

    def wait(self, *_: Any) -> bool:
        return True
