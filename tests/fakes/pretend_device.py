"""The machine of the pretend GPU: tensors that say `device="cuda:0"`, hold host memory, and obey a GPU's rules.

A dispatch mode enforces what a GPU has and a CPU lacks. Imitated, each after its source:

* operators do not mix tensors of the device with host tensors, but for numbers (c10 dispatch);
* the host waits for an operator whose result it needs, and for a copy that is not pinned; both are written down, and
  are errors while a graph is captured (CUDA C++ Programming Guide, "CUDA Graphs": prohibited operations);
* a copy to pinned memory has arrived when the host has waited for it, and pinned memory stays as it is until a copy
  from it has been waited for (same guide, "Asynchronous Concurrent Execution"); work is ordered by streams and events
  alone (pretend_streams);
* memory comes from a model of torch's caching allocator (caching_allocator), whose OutOfMemoryError is torch's; new
  memory holds garbage; memory that another stream may still use is not given back without `record_stream`;
* graphs are in pretend_graphs.

Not imitated: time, work that overlaps, several GPUs in one process, what cuBLAS allows in a capture, peer access.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.fakes.caching_allocator import CachingAllocator
from tests.fakes.pretend_streams import Stream, Streams, Uses

if TYPE_CHECKING:
    from tests.fakes.pretend_graphs import Graph, Pool

CUDA = torch.device("cuda", 0)
WAITING = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "is_nonzero",
    "equal", "bincount", "item",
}  # fmt: skip
"""Operators whose result's value or shape the host waits for."""
EMPTY = {"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"}
NOT_THERE = -7
"""What memory of integers holds before anything is written to it, or before a copy to it has arrived."""
_local = threading.local()


class PretendError(RuntimeError):
    """What a GPU would have refused, or got wrong."""


class Memory:
    """Memory of the device that a tensor and its views share: a block of the allocator, and who used it last."""

    def __init__(self, gpu: PretendGpu | None, num_bytes: int) -> None:
        self.uses, self.graph = Uses(), None if gpu is None else gpu.capturing
        """`graph`: the one in whose capture it was made."""
        if self.graph is not None:
            self.uses = self.graph.pool.uses
        self._gpu, self._stream, self._block = gpu, None if gpu is None else gpu.streams.current, None
        if gpu is not None:
            self._block = gpu.allocate(num_bytes)

    def record_stream(self, stream: Stream) -> None:
        assert self._gpu is not None and self._block is not None
        self._gpu.allocator.record_stream(self._block, stream.number)

    def __del__(self) -> None:
        if self._gpu is not None and self._block is not None:
            self._gpu.freed.append((self._block, self._stream, self.uses))  # in any thread, at any time


class OnGpu(torch.Tensor):
    """A tensor of the pretend GPU; `held` are its values."""

    held: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, held: torch.Tensor, memory: Memory | None = None) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=CUDA, requires_grad=False,
        )  # fmt: skip
        made.held = held
        made.memory = memory or Memory(find_gpu(), held.untyped_storage().nbytes())
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.held})"

    def tolist(self) -> Any:
        current_gpu().host_reads("read", "tolist", [self])
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def record_stream(self, stream: Any) -> None:
        self.memory.record_stream(stream)

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return current_gpu().run(func, args, kwargs or {})


def find_gpu() -> PretendGpu | None:
    """The machine of this thread, if it has one."""
    return getattr(_local, "gpu", None)


def current_gpu() -> PretendGpu:
    gpu = find_gpu()
    assert gpu is not None, "a tensor of the pretend GPU outside of it"
    return gpu


def held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def leaves_of(value: Any) -> list[Any]:
    """What tuples, lists and dictionaries hold; torch's pytree takes most of a test's time for it."""
    if not isinstance(value, tuple | list | dict):
        return [value]
    parts = value.values() if isinstance(value, dict) else value
    return [leaf for part in parts for leaf in leaves_of(part)]


def plain(value: Any) -> Any:
    """The same structure of host tensors; most arguments hold no others."""
    kind = type(value)
    if kind is OnGpu:
        return value.held
    if kind is tuple or kind is list:
        return kind([plain(part) for part in value])
    return {key: plain(part) for key, part in value.items()} if kind is dict else held(value)


def tensors_of(value: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Add the tensors of tuples, lists and dictionaries."""
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, tuple | list | dict):
            tensors_of(part, found)
    return found


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same structure of changed leaves."""
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    return type(value)([mapped(change, part) for part in value]) if isinstance(value, tuple | list) else change(value)


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def spoil(tensor: torch.Tensor) -> None:
    """Fill with what nobody may rely on."""
    if tensor.numel() and tensor.dtype != torch.bool:
        tensor.fill_(
            torch.nan if tensor.is_floating_point() else NOT_THERE % 256 if not tensor.is_signed() else NOT_THERE
        )


@cache
def written_places(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write)


@cache
def name_of(func: Any) -> str:
    return str(func.name().split("::")[-1].split(".")[0])


@cache
def is_view(func: Any) -> bool:
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


def written_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[OnGpu]:
    if not (places := written_places(func)):
        return []
    found = [args[at] if at < len(args) else kwargs.get(name) for at, name in places]
    return [each for each in leaves_of(found) if isinstance(each, OnGpu)]


class PretendGpu(TorchDispatchMode):
    """The machine, for one thread: counts and refuses."""

    def __init__(self, capacity: int = 4 << 30, context: int = (2 << 30) - (48 << 20)) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []
        """What was noted: "wait" (the host waits), "pageable" (a copy that waits), "pinned", "read" (a result), and
        "unpinned" (read into memory made for it)."""
        self.allocator = CachingAllocator(capacity, context)
        self.freed: deque[tuple[Any, Stream, Uses]] = deque()
        self.streams = Streams(self._arrive)
        self.capturing: Graph | None = None
        self.num_captures = self.num_replays = self.num_kernels = self.num_watched = 0
        """`num_watched`: communicators whose watchdog asks for events (pretend_nccl)."""
        self.pools: dict[Any, Pool] = {}
        self._pinned: dict[int, torch.Tensor] = {}
        self._handles = itertools.count(1)
        self._coming: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        """Copies to pinned memory that nobody has waited for: stream, its work, where to, and what."""
        self._leaving: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        """Copies from pinned memory, likewise: what is there, and what was."""

    # Memory.

    @property
    def memory(self) -> tuple[int, int]:
        """Free and whole bytes, as torch.cuda.mem_get_info."""
        self._take_back()
        return self.allocator.device_free, self.allocator.capacity

    @memory.setter
    def memory(self, sizes: tuple[int, int]) -> None:
        free, whole = sizes
        self.allocator.capacity, self.allocator.context = whole, whole - free - self.allocator.reserved

    def allocate(self, num_bytes: int) -> Any:
        self._take_back()
        pool = None if self.capturing is None else self.capturing.pool.handle
        return self.allocator.malloc(num_bytes, self.streams.current.number, pool)

    def _take_back(self) -> None:
        while self.freed:
            block, stream, uses = self.freed.popleft()
            stream.clock.learn(self.streams.host)
            if block.pool is None and (unsafe := uses.unknown_to(stream) - {-1} - block.users):
                raise PretendError(f"memory of stream {stream.number} is freed while streams {unsafe} may use it")
            self.allocator.free(block)

    def empty_cache(self) -> None:
        self._take_back()
        self.allocator.empty_cache()

    def pin(self, tensor: torch.Tensor) -> None:
        """Host memory is pinned for as long as the machine is there."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def new_handle(self) -> int:
        return next(self._handles)

    # Waits.

    def synchronize(self) -> None:
        """The host waits for all streams that the current one and the default one know of."""
        for stream in (self.streams.default, self.streams.current):
            stream.synchronize()
        self.allocator.finish()

    def _arrive(self) -> None:
        """The host has waited: what was to come is there, and what was to leave must have been left alone."""
        for each in [each for each in self._coming if self.streams.knows(*each[:2])]:
            self.note("read", f"{tuple(each[3].shape)}")
            each[2].copy_(each[3])
            self._coming.remove(each)
        for each in [each for each in self._leaving if self.streams.knows(*each[:2])]:
            self._leaving = [other for other in self._leaving if other is not each]
            if not torch.equal(each[2], each[3]):
                raise PretendError("pinned memory was written while a copy from it was under way")

    def count(self, kind: str) -> int:
        """Events of a kind, but for the look at the weights of an idle engine (lpr.model.watch), which compares."""
        return sum(each == kind and what != "equal" for each, what in self.events)

    def note(self, kind: str, what: str) -> None:
        self.events.append((kind, what))
        if self.capturing is not None and kind in ("wait", "pageable", "read"):
            raise PretendError(f"CUDA error: operation not permitted when stream is capturing ({kind}: {what})")

    def host_reads(self, kind: str, what: str, tensors: Iterable[OnGpu]) -> None:
        """The host waits for the current stream and reads."""
        self.note(kind, what)
        self.use(what, tensors, ())
        self.streams.current.synchronize()

    def use(self, what: Any, reads: Iterable[OnGpu], writes: Iterable[OnGpu]) -> None:
        """A piece of work on the current stream; what is captured uses nothing yet."""
        if self.capturing is None:
            stream = self.streams.current
            stream.launch()
            for each in reads:
                each.memory.uses.read(stream, what)
            for each in writes:
                each.memory.uses.written(stream, what)

    def settle(self) -> None:
        """Work that is launched comes behind what holds the current stream up."""
        if self.capturing is None and self.streams.current.held_up:
            self.streams.current.settle()
            self._coming = [(*each[:3], each[3].clone()) for each in self._coming]

    # Operators.

    def __enter__(self) -> PretendGpu:
        self._outer = getattr(_local, "gpu", None)
        _local.gpu = self
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _local.gpu = self._outer
        torch._C._set_only_lift_cpu_tensors(False)

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """One operator."""
        name = name_of(func)
        leaves = tensors_of((args, kwargs), [])
        there = [each for each in leaves if isinstance(each, OnGpu)]
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not there and (device is None or device.type != "cuda"):
            made = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
            if kwargs.get("pin_memory"):
                self.pin(made)
            return made
        if name == "_to_copy" and device is not None and device.type != args[0].device.type:
            return self._copy_between(func, args[0], device, kwargs)
        if name == "copy_" and args[0].device.type != args[1].device.type:
            return self._copy_into(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        self._check(func, name, args, kwargs, leaves, there)
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        return self._record(func, name, args, kwargs, there)

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, leaves: Any, there: list[OnGpu]) -> None:
        if name in WAITING or (
            name == "repeat_interleave" and "Tensor" in func.name() and not kwargs.get("output_size")
        ):
            self.host_reads("wait", name, there)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [each for each in leaves_of(args[1]) if isinstance(each, torch.Tensor)]
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                self.host_reads("wait", f"{name} by a mask", there)
            if any(not isinstance(each, OnGpu) and each.dim() for each in indices):
                self.note("pageable", f"{name} by an index on the host")
        elif there and name not in ("copy_", "_to_copy"):
            apart = [tuple(each.shape) for each in leaves if not isinstance(each, OnGpu) and each.dim()]
            if apart:
                raise PretendError(f"{func.name()}: expected all tensors on the same device, found on the CPU {apart}")

    def _copy_between(self, func: Any, source: torch.Tensor, device: torch.device, kwargs: dict[str, Any]) -> Any:
        rest = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "non_blocking")}
        if device.type == "cuda":
            made = OnGpu(func(source, **rest).clone())
            self._from_host(source, made, bool(kwargs.get("non_blocking")), "to the device")
            return made
        self.host_reads("read", f"{tuple(source.shape)}", [source])  # type: ignore[list-item]
        self.note("unpinned", f"to the host {tuple(source.shape)}")
        return func(held(source), **rest).clone()

    def _copy_into(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if isinstance(target, OnGpu):
            self._from_host(source, target, non_blocking, "into the device")
            if self.capturing is not None:
                raise PretendError("a copy from the host in a capture would be a constant of the graph")
        elif non_blocking and self.is_pinned(target):
            self.use("a copy", [source], ())  # type: ignore[list-item]
            stream, values = self.streams.current, held(source)
            values = values if stream.held_up else values.clone()
            self._coming.append((stream.number, stream.clock[stream.number], target, values))
            self._overwrite(stream, target)
            target.fill_(NOT_THERE)
            return target
        else:
            self.host_reads("read", f"{tuple(source.shape)}", [source])  # type: ignore[list-item]
        held(target).copy_(held(source))
        return target

    def _overwrite(self, stream: Stream, target: torch.Tensor) -> None:
        """A copy to pinned memory comes behind copies from it that its stream knows of."""
        begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
        for each in [each for each in self._leaving if each[2].data_ptr() < end]:
            is_known = stream.clock.get(each[0], 0) >= each[1]
            if each[2].data_ptr() + each[2].nbytes > begin and is_known and torch.equal(each[2], each[3]):
                self._leaving = [other for other in self._leaving if other is not each]

    def _from_host(self, source: torch.Tensor, target: OnGpu, non_blocking: bool, where: str) -> None:
        """A copy to the device, which waits unless it is of pinned memory, or a number."""
        self.settle()
        is_pinned = non_blocking and self.is_pinned(source)
        self.note("pinned" if is_pinned or (where == "into the device" and not source.dim()) else "pageable",
                  f"{where} {tuple(source.shape)}")  # fmt: skip
        self.use("a copy", (), [target])
        stream = self.streams.current
        for each in [each for each in self._coming if storage(each[2]) == storage(source)]:
            if stream.clock.get(each[0], 0) < each[1]:
                raise PretendError("pinned memory is copied from before a copy to it has ended")
            self._coming = [other for other in self._coming if other is not each]
            each[2].copy_(each[3])
        if is_pinned:
            self._leaving.append((stream.number, stream.clock.get(stream.number, 0), source, source.clone()))
        elif source.dim():
            stream.synchronize()

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, there: list[OnGpu]) -> Any:
        run, writes = _cuda_only(func, name, args), written_by(func, args, kwargs)
        if not is_view(func):
            self.settle()
        plain_args, plain_kwargs = plain(args), plain(kwargs)
        if self.capturing is not None and name[-1] == "_" and writes and writes[0].memory.graph is not self.capturing:
            result = writes[0]  # nothing runs, and nothing that a whole cache would have to be kept for
        else:
            if self.capturing is not None and writes:
                self.capturing.keep(writes)
            result = run(*plain_args, **plain_kwargs)
        known = {id(each.held): each for each in there}
        memories = {storage(each.held): each.memory for each in there}
        fresh: list[OnGpu] = []

        def wrapped(each: Any) -> Any:
            if not isinstance(each, torch.Tensor) or isinstance(each, OnGpu):
                return each
            if id(each) in known:
                return known[id(each)]
            made = OnGpu(each, memories.get(storage(each)))
            if storage(each) not in memories:
                fresh.append(made)
                memories[storage(each)] = made.memory
                if name in EMPTY:
                    spoil(each)
            return made

        found = mapped(wrapped, result)
        if fresh or writes:
            reads = [] if name in EMPTY else there
            self.use(name, reads, [*writes, *fresh])
            if self.capturing is not None and name not in EMPTY:
                self.capturing.add(run, plain_args, plain_kwargs, fresh, reads, writes)
            elif self.capturing is not None:
                self.capturing.add(lambda: None, (), {}, fresh, [], [])
        return found

    def launch(self, run: Callable[[], None], reads: list[OnGpu], writes: list[OnGpu]) -> None:
        """A kernel that is no operator of torch."""
        self.num_kernels += 1
        self.settle()
        if self.capturing is not None:
            self.capturing.add(run, (), {}, [], reads, writes)
            for each in writes:  # nothing runs; indices that lie here are valid
                if each.memory.graph is self.capturing:
                    each.held.zero_()
            return
        with _disable_current_modes(), torch.no_grad():
            run()
        self.use("a kernel", reads, writes)


def _cuda_only(func: Any, name: str, args: Any) -> Any:
    """What stands for operators that a GPU has and this CPU lacks."""
    if name == "histc" and not args[0].is_floating_point():
        return lambda values, *rest, **kwargs: func(values.float(), *rest, **kwargs).to(values.dtype)
    if name == "mm" and "dtype" in func.name():
        return lambda left, right, dtype: left.to(dtype) @ right.to(dtype)
    return func


def to_gpu(module: torch.nn.Module) -> Any:
    """The module with its parameters and buffers, and tensors in attributes, on the pretend GPU."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                made = OnGpu(parameter.detach().clone())
                part._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = OnGpu(buffer.detach().clone())
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and not isinstance(value, OnGpu):
                vars(part)[name] = OnGpu(value.clone())
    return module
