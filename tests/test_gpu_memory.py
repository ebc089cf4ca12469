"""A GPU's memory: what is counted as free, what steps need, and what is said where something does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_model
from fake_graphs import FakeCapturer
from pretend_gpu import CUDA, PretendGpu, gpu, guard, to_gpu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lpr import InputError, SamplingParams
from lpr.engine.kv_pool import usable_tokens
from lpr.model import loader
from lpr.model.graphs import GraphForward
from lpr.model.kv_cache import free_bytes
from lpr.model.packing import PackedLinear, has_room_to_pack, pack_projections
from lpr.model.paged_cache import PagedCache
from lpr.model.reserve import GRAPH_BYTES, WORKSPACES, reserved_bytes
from lpr.model.runner import TreeModel
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from lpr.model.static_inputs import StaticShape
from lpr.model.step_inputs import Row

__all__ = ["gpu", "guard"]


def test_holes_between_tensors_are_not_free(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """After packing 16 GiB of 34B lie between weights: a cache that is sized with them does not fit."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 78 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 62 << 30)
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    gpu.memory = 1 << 30, 80 << 30
    assert free_bytes(CUDA) == 1 << 30 and emptied, "whole segments have been given back"


@pytest.mark.parametrize("counts_holes", [False, True])
def test_memory_with_holes_is_not_promised(counts_holes: bool, gpu: PretendGpu) -> None:
    """Counting what is free within segments, the defect, promises memory that one tensor cannot have."""
    gpu.memory = 100 << 20, 80 << 30
    made = [torch.empty(3 << 20, dtype=torch.uint8, device=CUDA) for _ in range(24)]  # segments of 20 MiB
    del made[::2]
    holes = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() if counts_holes else 0
    free = free_bytes(CUDA)
    assert free is not None and 0 < free < 100 << 20
    if counts_holes:
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(free + holes, dtype=torch.uint8, device=CUDA)
    else:
        torch.empty(free, dtype=torch.uint8, device=CUDA)


def test_packing_stops_where_room_ends(gpu: PretendGpu) -> None:
    model = to_gpu(tiny_model(num_hidden_layers=3))
    room = iter([True, True, False])
    assert pack_projections(model, lambda: next(room)) == 2
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 5, "Q, K, V and gate, up of one layer"
    for free, expected in ((11 << 30, False), (50 << 30, True)):  # 34B and 13B on 80 GiB
        gpu.memory = free, 80 << 30
        assert has_room_to_pack(CUDA) == expected


def test_what_does_not_fit_is_one_line_with_the_numbers(
    gpu: PretendGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 352.00 MiB\nGPU 0 has ...")

    gpu.memory = 1 << 28, 80 << 30
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 79 << 30)
    tiny_model().save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "_read_to", full)
    with pytest.raises(InputError, match=r"weights of .* do not fit on cuda:0: it has 80.0 GiB, .* holds 79.0 and 0.2"):
        loader.load(str(tmp_path), device="cuda:0")
    runner = TreeModel(to_gpu(tiny_model()))
    like = self_check(runner)
    monkeypatch.setattr(PagedCache, "resized", full)
    with pytest.raises(InputError, match="GiB of K/V do not fit on cuda:0"):
        runner.allocate(4, 4096, 8, like)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.size = max(self.size, each.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_reserve_covers_what_a_step_makes(temperature: float) -> None:
    """Of a large vocabulary the logits are the most, in float32 too; 5 % of what is free may be less."""
    runner = TreeModel(tiny_model(vocab_size=20_000), attention="sdpa")
    runner.allocate(4, 128, 16, self_check(runner))
    rows = [Row.chain(slot, 0, [1] * 16, 16) for slot in range(4)]
    params = [(SamplingParams(temperature=temperature, top_p=0.9, seed=1), range(16))] * 4
    with Largest() as largest:
        runner.evaluate(rows, Selection.build(params), 8)
    fixed = WORKSPACES + 192 * GRAPH_BYTES
    reserve = reserved_bytes(runner.model, runner.config, 64, 192)
    assert 64 * 20_000 * 4 <= largest.size <= (reserve - fixed) // 2, "and there may be two of them"
    free = 10 << 30
    assert (
        usable_tokens(free, 1 << 20, reserve) * (1 << 20) <= free - reserve < usable_tokens(free, 1 << 20) * (1 << 20)
    )


@pytest.mark.parametrize("fault", [False, True])
def test_graphs_that_end_at_the_logits_share_one_place(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kept its own: 2.8 GB of 7B's vocabulary and a batch of trees."""
    if fault:
        run = GraphForward._run

        def alone(self: GraphForward, shape: StaticShape) -> torch.Tensor:
            return run(self, shape).clone()

        monkeypatch.setattr(GraphForward, "_run", alone)
    runner = TreeModel(tiny_model(vocab_size=500), attention="sdpa")
    runner.capturer = FakeCapturer()
    runner.allocate(1, 256, 64, self_check(runner))
    ends = Selection.build([])
    ends.num_logprobs = 2
    found, places = [], set()
    graphs = runner.graphs
    assert graphs is not None
    results = runner.sampler.results

    def noted(logits: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        places.add(logits.untyped_storage().data_ptr())
        return results(logits, *rest, **how)

    runner.sampler.results = noted  # type: ignore[method-assign]
    for count in (20, 5, 1, 20, 5):
        found.append(graphs.evaluate([Row.chain(0, 3, [1] * count, 1)], ends, 0).tolist())
    assert (len(places) == 1) != fault and found[0] == found[3] and found[1] == found[4] != found[0]
