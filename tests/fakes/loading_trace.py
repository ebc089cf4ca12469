"""What a load asks of a GPU's memory: recorded while transformers reads a small checkpoint, replayed in large.

The recorded model has all layers of the large one and small widths, so that each width tells which one it stands for.
Four reader threads are pretended by futures that are begun a fixed number ahead, which makes the order the same in
every run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, core_model_loading

from lpr.model.rewrite.merged_loading import IN_FLIGHT
from tests.fakes.caching_allocator import Block, CachingAllocator

AHEAD = IN_FLIGHT
"""Weights that are being read, or have been and wait, while one is handed over."""


@dataclass(frozen=True)
class Widths:
    """Sizes of a Llama on one rank, in bfloat16."""

    num_layers: int
    hidden: int
    query: int
    key_value: int
    inner: int
    vocabulary: int

    @property
    def layer_bytes(self) -> int:
        """Bytes of the largest weight of a layer."""
        return 2 * self.hidden * max(self.query, self.inner)

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        layer = 2 * self.query + 2 * self.key_value + 3 * self.inner + 2
        return 2 * self.hidden * (self.num_layers * layer + 2 * self.vocabulary + 1)


SMALL = Widths(0, 48, 24, 8, 80, 136)
LARGE = {
    "7B": Widths(32, 4096, 4096, 4096, 11008, 32016),
    "13B": Widths(40, 5120, 5120, 5120, 13824, 32016),
    "34B": Widths(48, 8192, 8192, 1024, 22016, 32000),
    "34B, tp 2": Widths(48, 8192, 4096, 512, 11008, 16000),
    "70B, tp 4": Widths(80, 8192, 2048, 256, 7168, 8004),
    "70B, tp 8": Widths(80, 8192, 1024, 128, 3584, 4002),
}
"""CodeLlama's, as one rank holds them."""
Event = tuple[str, int, tuple[int, ...]]
"""A storage comes or goes: ("malloc", number, shape) or ("free", number, ())."""


class Recorder(TorchDispatchMode):
    """Records the storages of tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.device.type == "cpu" and each.numel():
                storage = each.untyped_storage()
                if id(storage) not in given | self._known:
                    self._note(storage, tuple(each.shape))
        return result

    def _note(self, storage: Any, shape: tuple[int, ...]) -> None:
        number = len(self.events)
        self._known.add(id(storage))
        self.events.append(("malloc", number, shape))

        def gone(name: int = id(storage)) -> None:
            self._known.discard(name)
            self.events.append(("free", number, ()))

        weakref.finalize(storage, gone)


class Ahead:
    """Stands for the pool of reader threads: the result of a job is there when those up to AHEAD later are begun."""

    def __init__(self, **_: Any) -> None:
        self.jobs: list[_Job | None] = []
        self.begun = 0

    def submit(self, run: Callable[[], Any]) -> Future[Any]:
        job = _Job(self, len(self.jobs), run)
        self.jobs.append(job)
        return job

    def begin(self, last: int) -> None:
        while self.begun < min(last + 1, len(self.jobs)):
            job, self.jobs[self.begun] = self.jobs[self.begun], None
            self.begun += 1
            assert job is not None
            job.found = job.run()

    def shutdown(self, **_: Any) -> None:
        self.jobs.clear()


class _Job(Future[Any]):
    def __init__(self, pool: Ahead, place: int, run: Callable[[], Any]) -> None:
        super().__init__()
        self.pool, self.place, self.run, self.found = pool, place, run, None

    def result(self, timeout: float | None = None) -> Any:
        self.pool.begin(self.place + AHEAD)
        return self.found


def small_config(num_layers: int) -> LlamaConfig:
    return LlamaConfig(
        num_hidden_layers=num_layers, hidden_size=SMALL.hidden, intermediate_size=SMALL.inner, head_dim=8,
        num_attention_heads=3, num_key_value_heads=1, vocab_size=SMALL.vocabulary, tie_word_embeddings=False,
    )  # fmt: skip


@contextmanager
def recorded(folder: Path, num_layers: int) -> Iterator[tuple[Recorder, Any]]:
    """A recorder, and a function that reads the small checkpoint in another dtype, as a GPU's copy makes new memory."""
    if not folder.exists():
        LlamaForCausalLM(small_config(num_layers)).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch, Recorder() as recorder:
        patch.setattr(core_model_loading, "ThreadPoolExecutor", Ahead)
        yield recorder, lambda: LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def real_shape(shape: tuple[int, ...], real: Widths) -> tuple[int, ...]:
    """The shape in the large model of one in the small one; groups have the sum of their outputs."""
    known = {
        SMALL.hidden: real.hidden, SMALL.inner: real.inner, SMALL.key_value: real.key_value, SMALL.query: real.query,
        SMALL.vocabulary: real.vocabulary, 2 * SMALL.inner: 2 * real.inner,
        SMALL.query + 2 * SMALL.key_value: real.query + 2 * real.key_value, 4: 64,
    }  # fmt: skip
    return tuple(known[size] for size in shape)


def replay(events: Sequence[Event], real: Widths, memory: CachingAllocator) -> None:
    """Ask for the large model's memory; raises torch.OutOfMemoryError.

    transformers first asks for all of it at once, but for 1.2 GiB of the device, and gives it back
    (`caching_allocator_warmup`): what follows is cut out of one segment.
    """
    memory.free(memory.malloc(min(real.num_bytes, memory.capacity - int(1.2 * 2**30))))
    held: dict[int, Block] = {}
    for kind, number, shape in events:
        if kind == "malloc":
            held[number] = memory.malloc(2 * prod(real_shape(shape, real)))
        else:
            memory.free(held.pop(number))
