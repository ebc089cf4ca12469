"""A pretend GPU: the project's CUDA path on a machine without one, as fixtures.

pretend_device is the machine (operators and memory), pretend_graphs its captures, pretend_streams the order of its
work, pretend_kernels what stands for Triton kernels, caching_allocator its memory, pretend_nccl its process groups.
Each says what it imitates, after which source, and what it does not.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lpr.model import graph_inputs, step_inputs
from lpr.model.moves import gpu_mover
from lpr.model.sampling.choice import TRIED, gpu_likeliest, gpu_pick
from tests.fakes.pretend_device import CUDA, OnGpu, PretendError, PretendGpu, current_gpu, held, to_gpu
from tests.fakes.pretend_graphs import Capture, Graph
from tests.fakes.pretend_guard import load_guard
from tests.fakes.pretend_kernels import (
    Launched,
    exact_kernel,
    gate,
    kernel,
    likeliest_kernel,
    move_rows,
    multiply_codes,
    norm_heads,
    place,
    rms_norm,
    rotate,
    sampling_kernel,
    without_a_check,
)
from tests.fakes.pretend_streams import Event, RaceError, Stream

__all__ = [
    "CUDA",
    "Launched",
    "OnGpu",
    "PretendError",
    "PretendGpu",
    "RaceError",
    "gpu",
    "guard",
    "held",
    "quick_start",
    "sampling_kernel",
    "short_steps",
    "to_gpu",
]  # fmt: skip


@pytest.fixture(scope="session")
def guard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets this torch make tensors of a device that it was not built for."""
    if shutil.which("c++") is None or torch.cuda.is_available():
        pytest.skip("the pretend GPU needs a C++ compiler and a machine without a GPU")
    ours = tmp_path_factory.getbasetemp()
    load_guard(ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours)  # which all workers share
    yield


@pytest.fixture
def quick_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No self-check, and all graphs but the first, before which the model is looked at, are captured when needed.

    A start captures 80 others. It has its own tests, as the self-check has.
    """
    monkeypatch.setattr("lpr.model.graphs.MOST_COMMON", 1)
    monkeypatch.setattr("lpr.model.pass_graphs.MOST_PREPARED", 0)
    monkeypatch.setattr("lpr.engine.prepare.self_check", without_a_check)


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed steps have at most 256 entries, and more are evaluated directly: a start captures none of 2,048."""
    short = tuple(size for size in graph_inputs.PACKED_BUCKETS if size <= 256)
    for name in ("graph_inputs", "graphs", "runner", "reserve"):
        monkeypatch.setattr(f"lpr.model.{name}.PACKED_BUCKETS", short)


@pytest.fixture
def gpu(guard: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendGpu]:
    """A machine with one GPU, for one test."""
    properties = types.SimpleNamespace(
        multi_processor_count=132, name="pretend", total_memory=80 << 30, major=9, minor=0
    )
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731

    @contextlib.contextmanager
    def on_stream(stream: Stream | None) -> Iterator[None]:
        streams = current_gpu().streams
        outer, streams.current = streams.current, stream or streams.current
        try:
            yield
        finally:
            streams.current = outer

    def synchronize(*_: Any) -> None:
        current_gpu().note("wait", "synchronize")
        current_gpu().synchronize()

    answers: dict[str, Any] = {
        "_lazy_init": nothing, "get_device_properties": lambda *_: properties, "device_count": lambda: 1,
        "current_device": lambda: 0, "mem_get_info": lambda *_: current_gpu().memory,
        "memory_reserved": lambda *_: current_gpu().memory and current_gpu().allocator.reserved,
        "memory_allocated": lambda *_: current_gpu().memory and current_gpu().allocator.allocated,
        "empty_cache": lambda: current_gpu().empty_cache(), "Stream": lambda *_: Stream(current_gpu().streams),
        "current_stream": lambda *_: current_gpu().streams.current, "stream": on_stream,
        "default_stream": lambda *_: current_gpu().streams.default,
        "set_stream": lambda stream: setattr(current_gpu().streams, "current", stream), "synchronize": synchronize,
        "device": lambda _: contextlib.nullcontext(), "graph_pool_handle": lambda: current_gpu().new_handle(),
        "CUDAGraph": Graph, "graph": Capture, "Event": lambda *_: Event(current_gpu().streams),
        "is_current_stream_capturing": lambda: current_gpu().capturing is not None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)

    def pin_memory(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        made = tensor.clone()
        current_gpu().pin(made)
        return made

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    attention_kernel = pytest.importorskip("lpr.model.kernels.attention_kernel")
    monkeypatch.setattr(attention_kernel, "tree_attention", kernel)
    monkeypatch.setattr("lpr.model.kernels.exact_kernel.tree_attention", exact_kernel)
    for each in (rms_norm, norm_heads, rotate, place, gate):
        monkeypatch.setattr(f"lpr.model.kernels.elementwise_kernel.{each.__name__}", each)
    monkeypatch.setattr("lpr.model.kernels.coded_kernel.multiply", multiply_codes)
    monkeypatch.setattr("lpr.model.kernels.moves_kernel.move_rows", move_rows)
    monkeypatch.setattr("lpr.model.kernels.sampling_kernel.choose", sampling_kernel)
    monkeypatch.setattr("lpr.model.kernels.sampling_kernel.likeliest", likeliest_kernel)
    # The specifications stand for the kernels: large vocabularies would tell nothing and take half a second.
    monkeypatch.setattr("lpr.model.sampling.choice.TRIED", TRIED[:1])
    storage_of = step_inputs.storage_of
    monkeypatch.setattr(step_inputs, "storage_of", lambda tensor: storage_of(held(tensor)))
    for each in (gpu_pick, gpu_likeliest, gpu_mover):
        each.cache_clear()
    with PretendGpu() as machine:
        yield machine
    for each in (gpu_pick, gpu_likeliest, gpu_mover):
        each.cache_clear()
