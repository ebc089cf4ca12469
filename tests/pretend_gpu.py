"""A pretend GPU: the project's CUDA path on a machine without one.

Tensors say `device="cuda:0"` and hold host memory; a dispatch mode enforces the rules that a GPU has and a CPU lacks:

* an operator does not mix tensors of the device with host tensors (but for numbers);
* what makes the host wait is written down as an event, and is an error while a graph is captured;
* a copy from memory that is not pinned waits;
* a graph holds operators and kernel launches with their tensors, and a replay runs these and no Python.

Streams, the GPU's memory, NCCL, limits of a launch and what cuBLAS allows in a capture are not pretended.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import attention_reference
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from lpr.model import step_inputs
from lpr.model.sampling import specification
from lpr.model.sampling.choice import gpu_pick
from lpr.model.sampling.selection import Selection
from lpr.model.tree_mask import Paths, TreeMask

CUDA = torch.device("cuda", 0)
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>); }
"""
WAITING = {
    "_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select", "is_nonzero",
    "equal", "bincount", "item",
}  # fmt: skip
"""Operators whose result's value or shape the host waits for."""
_local = threading.local()


NOT_THERE = -7
"""What pinned memory holds until the host has waited for the copy to it."""


class PretendError(RuntimeError):
    """What a GPU would have refused."""


class OnGpu(torch.Tensor):
    """A tensor of the pretend GPU; `held` is its memory."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnGpu:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=CUDA, requires_grad=False,
        )  # fmt: skip
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnGpu({self.held})"

    def tolist(self) -> Any:
        current_gpu().note("read", "tolist")
        return self.held.tolist()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return current_gpu().run(func, args, kwargs or {})


def current_gpu() -> PretendGpu:
    gpu = getattr(_local, "gpu", None)
    assert gpu is not None, "a tensor of the pretend GPU outside of it"
    return gpu


def held(value: Any) -> Any:
    return value.held if isinstance(value, OnGpu) else value


def storages(values: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in tree_leaves(values) if isinstance(each, torch.Tensor)}


@dataclass(eq=False)
class Graph:
    """A captured graph: operators with their arguments, and the tensors that they made."""

    steps: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor]]] = field(default_factory=list)
    is_reset: bool = False

    def reset(self) -> None:
        self.steps.clear()
        self.is_reset = True

    def replay(self) -> None:
        if self.is_reset:
            raise PretendError("a graph is replayed after its reset")
        current_gpu().num_replays += 1
        with torch.no_grad(), _disable_current_modes():
            for func, args, kwargs, made in self.steps:
                result = func(*args, **kwargs)
                given = storages((args, kwargs))
                fresh = [
                    each
                    for each in tree_leaves(result)
                    if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given
                ]
                for target, new in zip(made, fresh, strict=False):
                    if target.numel():
                        target.copy_(new)


class PretendGpu(TorchDispatchMode):
    """The machine, for one thread: counts and refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str]] = []
        """What was noted: "wait" (the host waits), "pageable" (a copy that waits), "pinned", "read" (a result), and
        "unpinned" (read into memory made for it)."""
        self.memory = (2 << 30) + (48 << 20), 4 << 30
        """Free and whole bytes; what tensors take is not counted."""
        self.capturing: Graph | None = None
        self.num_captures = self.num_replays = self.num_kernels = 0
        self.pools: dict[Any, list[weakref.ref[Graph]]] = {}
        """By handle of a pool of memory, the graphs that were captured into it."""
        self.pinned: dict[int, torch.Tensor] = {}
        self._coming: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Copies to pinned memory that nobody has waited for: where to, and what."""

    def synchronize(self) -> None:
        """The host waits for a stream: what was to come down is there."""
        for target, source in self._coming:
            self.note("read", f"{tuple(source.shape)}")
            target.copy_(source)
        self._coming.clear()

    def count(self, kind: str) -> int:
        return sum(each == kind for each, _ in self.events)

    def note(self, kind: str, what: str) -> None:
        self.events.append((kind, what))
        if self.capturing is not None and kind in ("wait", "pageable", "read"):
            raise PretendError(f"CUDA error: operation not permitted when stream is capturing ({kind}: {what})")

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
        name = func.name().split("::")[-1].split(".")[0]
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        there = [each for each in leaves if isinstance(each, OnGpu)]
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if not there and (device is None or device.type != "cuda"):
            made = func(*args, **{key: value for key, value in kwargs.items() if key != "pin_memory"})
            if kwargs.get("pin_memory"):
                self.pinned[made.data_ptr()] = made
            return made
        if name == "_to_copy" and device is not None and device.type != args[0].device.type:
            return self._copy_between(func, args[0], device, kwargs)
        if name == "copy_" and args[0].device.type != args[1].device.type:
            return self._copy_into(args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
        self._check(func, name, args, kwargs, leaves, there)
        if device is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        return self._record(_cuda_only(func, name, args), tree_map(held, args), tree_map(held, kwargs), leaves, func)

    def _check(self, func: Any, name: str, args: Any, kwargs: Any, leaves: Any, there: Any) -> None:
        if name in WAITING or (
            name == "repeat_interleave" and "Tensor" in func.name() and not kwargs.get("output_size")
        ):
            self.note("wait", name)
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            indices = [each for each in tree_leaves(args[1]) if isinstance(each, torch.Tensor)]
            if any(each.dtype in (torch.bool, torch.uint8) for each in indices):
                self.note("wait", f"{name} by a mask")
            if any(not isinstance(each, OnGpu) and each.dim() for each in indices):
                self.note("pageable", f"{name} by an index on the host")
        elif there and name not in ("copy_", "_to_copy"):
            apart = [tuple(each.shape) for each in leaves if not isinstance(each, OnGpu) and each.dim()]
            if apart:
                raise PretendError(f"{func.name()}: expected all tensors on the same device, found on the CPU {apart}")

    def _copy_between(self, func: Any, source: torch.Tensor, device: torch.device, kwargs: dict[str, Any]) -> Any:
        rest = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory", "non_blocking")}
        if device.type == "cuda":
            free = kwargs.get("non_blocking") and source.data_ptr() in self.pinned
            self.note("pinned" if free else "pageable", f"to the device {tuple(source.shape)}")
            return OnGpu(func(source, **rest).clone())
        self.note("read", f"{tuple(source.shape)}")
        self.note("unpinned", f"to the host {tuple(source.shape)}")
        return func(held(source), **rest).clone()

    def _copy_into(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        if target.device.type == "cuda":
            free = (non_blocking and source.data_ptr() in self.pinned) or not source.dim()
            self.note("pinned" if free else "pageable", f"into the device {tuple(source.shape)}")
            if self.capturing is not None:
                raise PretendError("a copy from the host in a capture would be a constant of the graph")
        elif non_blocking and target.data_ptr() in self.pinned:
            self._coming.append((target, held(source).clone()))
            target.fill_(NOT_THERE)
            return target
        else:
            self.note("read", f"{tuple(source.shape)}")
        held(target).copy_(held(source))
        return target

    def _record(self, run: Any, args: Any, kwargs: Any, leaves: Any, func: Any) -> Any:
        result = run(*args, **kwargs)
        known = {id(each.held): each for each in leaves if isinstance(each, OnGpu)}
        if self.capturing is not None:
            given = storages((args, kwargs))
            made = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            fresh = [each for each in made if each.untyped_storage()._cdata not in given]
            if fresh or func._schema.is_mutable:
                self.capturing.steps.append((run, args, kwargs, fresh))

        def there(each: Any) -> Any:
            if not isinstance(each, torch.Tensor) or isinstance(each, OnGpu):
                return each
            return known[id(each)] if id(each) in known else OnGpu(each)

        return tree_map(there, result)

    def launch(self, run: Callable[[], None]) -> None:
        """A kernel that is no operator of torch."""
        self.num_kernels += 1
        with _disable_current_modes(), torch.no_grad():
            run()
        if self.capturing is not None:
            self.capturing.steps.append((run, (), {}, []))


def _cuda_only(func: Any, name: str, args: Any) -> Any:
    """What stands for operators that a GPU has and this CPU lacks."""
    if name == "histc" and not args[0].is_floating_point():
        return lambda values, *rest, **kwargs: func(values.float(), *rest, **kwargs).to(values.dtype)
    if name == "mm" and "dtype" in func.name():
        return lambda left, right, dtype: left.to(dtype) @ right.to(dtype)
    return func


class _Capture:
    """torch.cuda.graph; its end fails after a failure inside and leaves the capture's stream current, as there."""

    def __init__(self, graph: Graph, pool: Any = None, **_: Any) -> None:
        self.graph = graph
        known = current_gpu().pools.setdefault(pool, [])
        if known and all(each() is None or each().is_reset for each in known):  # type: ignore[union-attr]
            raise PretendError("all graphs of this pool have gone: if a tensor of theirs lives, captures fail")
        known.append(weakref.ref(graph))

    def __enter__(self) -> None:
        gpu = current_gpu()
        assert gpu.capturing is None
        gpu.capturing = self.graph
        gpu.num_captures += 1
        _local.stream = "capturing"

    def __exit__(self, kind: Any, *_: Any) -> None:
        current_gpu().capturing = None
        if kind is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        _local.stream = "default"


class _Stream:
    def wait_stream(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        current_gpu().synchronize()


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


def kernel(query: Any, key: Any, value: Any, mask: TreeMask, *, tiles: Any = None, **rules: Any) -> torch.Tensor:
    """Stands for the attention kernel: its specification, launched with tensors of the device only."""
    return _launch(attention_reference.tree_attention, query, key, value, mask, rules)


def exact_kernel(query: Any, key: Any, value: Any, mask: TreeMask, paths: Paths, **rules: Any) -> torch.Tensor:
    """Stands for the kernel of exact mode, likewise."""
    if not all(isinstance(each, OnGpu) for each in (paths.entries, paths.num_shared)):
        raise PretendError("the kernel was given paths on the CPU")
    return _launch(attention_reference.exact_tree_attention, query, key, value, mask, rules)


def _launch(
    specification: Callable[..., torch.Tensor], query: Any, key: Any, value: Any, mask: TreeMask, rules: dict[str, Any]
) -> torch.Tensor:
    gpu = current_gpu()
    pages = rules.pop("pages", None)
    given = query, key, value, mask.bits, mask.num_cached, mask.num_entries, mask.positions, rules.get("sinks")
    for each in (*given, None if pages is None else pages.table):
        if each is not None and not isinstance(each, OnGpu):
            raise PretendError(f"the kernel was given a CPU tensor {tuple(each.shape)}")
    batch, num_heads, length, _ = query.shape
    out = query.new_empty(batch, length, num_heads, value.shape[3])
    tables = None if pages is None else pages._replace(table=held(pages.table))
    parts = TreeMask(held(mask.bits), held(mask.num_cached), held(mask.num_entries), held(mask.positions))

    def run() -> None:
        found = specification(
            held(query), held(key), held(value), parts, tables, **{name: held(rule) for name, rule in rules.items()}
        )
        out.held.copy_(found.transpose(1, 2))

    gpu.launch(run)
    return out.transpose(1, 2)


class Launched:
    """Stands for a kernel: runs it in the interpreter, with tensors of the device only."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            if any(isinstance(each, torch.Tensor) and not isinstance(each, OnGpu) for each in args):
                raise PretendError("a kernel was given a CPU tensor")
            current_gpu().launch(lambda: self.kernel[grid](*map(held, args), **constants))

        return launch


def sampling_kernel(logits: Any, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for the sampling kernel, likewise."""
    for name, each in {"logits": logits, "the selection": selection.keys}.items():
        if not isinstance(each, OnGpu):
            raise PretendError(f"the sampling kernel was given {name} on the CPU")
    out = logits.new_empty(len(logits), dtype=torch.int64)
    totals = logits.new_empty(len(logits), dtype=torch.float32)

    def run() -> None:
        sizes = (selection.num_keys, selection.num_rows, selection.sampled, selection.filtered)
        there = Selection(held(selection.words), *sizes)
        for made, found in zip((out, totals), specification.choose(held(logits), there), strict=True):
            made.held.copy_(found)

    current_gpu().launch(run)
    return out, totals


def load_guard(folder: Path) -> None:
    """Lets this torch make tensors of a device that it was not built for; builds the library in `folder`."""
    (folder / "guard.cpp").write_text(GUARD)
    torch_folder = Path(os.path.dirname(torch.__file__))
    subprocess.run(
        ["c++", "-shared", "-fPIC", "-std=c++20", folder / "guard.cpp", "-o", folder / "libguard.so",
         f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}", "-lc10"],
        check=True, timeout=300,
    )  # fmt: skip
    ctypes.CDLL(str(folder / "libguard.so"))


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets this torch make tensors of a device that it was not built for."""
    if shutil.which("c++") is None or torch.cuda.is_available():
        pytest.skip("the pretend GPU needs a C++ compiler and a machine without a GPU")
    load_guard(tmp_path_factory.mktemp("guard"))
    yield


@pytest.fixture
def gpu(guard: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpu]:
    """A machine with one GPU, for one test."""
    properties = types.SimpleNamespace(
        multi_processor_count=132, name="pretend", total_memory=80 << 30, major=9, minor=0
    )
    handles = itertools.count()
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    answers: dict[str, Any] = {
        "_lazy_init": nothing, "get_device_properties": lambda *_: properties, "device_count": lambda: 1,
        "current_device": lambda: 0, "mem_get_info": lambda *_: current_gpu().memory, "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0, "empty_cache": nothing, "Stream": lambda *_: _Stream(),
        "current_stream": lambda *_: _Stream(), "stream": lambda _: contextlib.nullcontext(),
        "set_stream": lambda _: setattr(_local, "stream", "default"),
        "synchronize": lambda *_: current_gpu().note("wait", "synchronize"),
        "device": lambda _: contextlib.nullcontext(), "graph_pool_handle": lambda: next(handles), "CUDAGraph": Graph,
        "graph": _Capture,
        "is_current_stream_capturing": lambda: current_gpu().capturing is not None,
        "Event": lambda *_: types.SimpleNamespace(record=nothing, synchronize=nothing),
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        made = tensor.clone()
        current_gpu().pinned[made.data_ptr()] = made
        return made

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    attention_kernel = pytest.importorskip("lpr.model.kernels.attention_kernel")
    monkeypatch.setattr(attention_kernel, "tree_attention", kernel)
    monkeypatch.setattr("lpr.model.kernels.exact_kernel.tree_attention", exact_kernel)
    monkeypatch.setattr("lpr.model.kernels.sampling_kernel.choose", sampling_kernel)
    storage_of = step_inputs.storage_of
    monkeypatch.setattr(step_inputs, "storage_of", lambda tensor: storage_of(held(tensor)))
    gpu_pick.cache_clear()
    with PretendGpu() as machine:
        yield machine
    gpu_pick.cache_clear()


def current_stream_name() -> str:
    return getattr(_local, "stream", "default")
