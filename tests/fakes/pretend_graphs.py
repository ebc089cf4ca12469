"""Graphs of the pretend GPU, as torch.cuda.graph captures them (torch/csrc/cuda/CUDAGraph.cpp).

A capture runs nothing: what it seemed to write is put back, and what it made holds garbage until a replay. A replay
runs the captured launches and no Python, on the stream that is current then. It reads memory that must still be there,
and overwrites what other graphs of its pool left (torch's notes on CUDA semantics, "Sharing memory across captures"). A
pool whose graphs have gone takes no graph while a tensor of it lives. Not imitated: launches on several streams in one
capture, updates of a graph, and what a library allows in a capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.fakes.caching_allocator import CachingAllocator
from tests.fakes.pretend_device import Memory, OnGpu, PretendError, current_gpu, leaves_of, spoil, storage
from tests.fakes.pretend_streams import Stream, Uses


class Pool:
    """Memory of graphs that share a handle."""

    def __init__(self, handle: Hashable) -> None:
        self.handle, self.uses = handle, Uses()
        self.graphs: list[weakref.ref[Graph]] = []
        self.survivors: weakref.WeakSet[Memory] = weakref.WeakSet()
        self.find_last: Callable[[], Graph | None] = lambda: None
        """The graph that ran last, whose results are still there."""

    def begin(self, graph: Graph) -> None:
        known = [each() for each in self.graphs]
        if known and all(each is None or each.is_reset for each in known) and self.survivors:
            raise PretendError("all graphs of this pool have gone while a tensor of theirs lives: no more captures")
        self.graphs.append(weakref.ref(graph))


class Graph:
    """As torch.cuda.CUDAGraph: launches with their arguments, and the tensors that they make."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.steps: list[tuple[Callable[..., Any], Any, Any, list[torch.Tensor]]] = []
        self.pool: Pool = Pool(None)
        self.is_reset = False
        self.results: list[torch.Tensor] = []
        """What is left of it after its capture."""
        self.given: dict[int, tuple[weakref.ref[Memory], bool]] = {}
        """Memory of others that it reads, and True if it writes it."""
        self._allocator: CachingAllocator | None = None
        self._made: list[tuple[weakref.ref[Memory], torch.Tensor]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self) -> None:
        self.pool.begin(self)
        self._allocator = current_gpu().allocator
        self._allocator.hold_pool(self.pool.handle)

    def reset(self) -> None:
        if self._allocator is not None:
            self._allocator.drop_pool(self.pool.handle)
        self._allocator, self.is_reset = None, True
        self.steps, self.results, self._made = [], [], []

    def __del__(self) -> None:
        self.reset()

    def add(
        self, run: Any, args: Any, kwargs: Any, fresh: list[OnGpu], reads: list[OnGpu], writes: list[OnGpu]
    ) -> None:
        """A launch, before it runs."""
        self.steps.append((run, args, kwargs, [each.held for each in fresh]))
        self._made += [(weakref.ref(each.memory), each.held) for each in fresh]
        self.pool.survivors.update(each.memory for each in fresh)
        for each in [*reads, *writes]:
            if each.memory.graph is not self:
                writes_it = any(each is other for other in writes) or self.given.get(id(each.memory), (None, False))[1]
                self.given[id(each.memory)] = weakref.ref(each.memory), writes_it

    def keep(self, writes: Iterable[OnGpu]) -> None:
        """Keep what a launch would write outside of the graph, as a capture runs nothing."""
        for each in writes:
            if each.memory.graph is not self and id(each.memory) not in self._before:
                whole = torch.empty(0, dtype=torch.uint8).set_(each.held.untyped_storage())
                self._before[id(each.memory)] = whole, whole.clone()

    def end(self) -> None:
        """The capture has ended: nothing has run."""
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before = {}
        self.results = [values for memory, values in self._made if memory() is not None]
        self.spoil()

    def spoil(self) -> None:
        for each in self.results:
            spoil(each)

    def replay(self) -> None:
        gpu = current_gpu()
        if self.is_reset:
            raise PretendError("a graph is replayed after its reset")
        gpu.num_replays += 1
        gpu.settle()
        stream = gpu.streams.current
        stream.launch()
        for find, writes_it in self.given.values():
            memory = find()
            if memory is None:
                raise PretendError("a graph reads memory that has been freed since its capture")
            (memory.uses.written if writes_it else memory.uses.read)(stream, "a graph")
        self.pool.uses.written(stream, "a graph")
        with torch.no_grad(), _disable_current_modes():
            if (last := self.pool.find_last()) is not None and last is not self:
                last.spoil()
            self.pool.find_last = weakref.ref(self)
            for func, args, kwargs, made in self.steps:
                result = func(*args, **kwargs)
                given = {storage(each) for each in leaves_of((args, kwargs)) if isinstance(each, torch.Tensor)}
                tensors = [each for each in leaves_of(result) if isinstance(each, torch.Tensor)]
                fresh = [each for each in tensors if storage(each) not in given]
                for target, new in zip(made, fresh, strict=False):
                    if target.numel():
                        target.copy_(new)


class Capture:
    """As torch.cuda.graph; its end fails after a failure inside and leaves the capture's stream current, as there."""

    def __init__(self, graph: Graph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> None:
        gpu = current_gpu()
        self.graph, self._stream, self._mode = graph, stream or Stream(gpu.streams), capture_error_mode
        self.graph.pool = gpu.pools.setdefault(pool, Pool(pool))

    def __enter__(self) -> None:
        gpu = current_gpu()
        assert gpu.capturing is None
        gpu.synchronize()
        gpu.allocator.empty_cache()
        self.graph.begin()
        self._outer, gpu.streams.current = gpu.streams.current, self._stream
        gpu.capturing = self.graph
        gpu.num_captures += 1

    def __exit__(self, kind: Any, *_: Any) -> None:
        gpu = current_gpu()
        gpu.capturing = None
        if kind is not None:
            with _disable_current_modes():
                self.graph.end()
            if issubclass(kind, Exception):
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            return
        gpu.streams.current = self._outer
        with _disable_current_modes():
            self.graph.end()
        if self._mode == "global" and gpu.num_watched:
            raise PretendError("a watchdog has asked for an event during a capture, whose error mode is global")
