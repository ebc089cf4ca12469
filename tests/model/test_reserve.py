"""A GPU's memory: what is counted as free, what steps need, and what is said where something does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.engine import prepare
from lpr.engine.kv_pool import usable_tokens
from lpr.model import loader
from lpr.model.graph_inputs import StaticShape
from lpr.model.graphs import GraphForward
from lpr.model.kv_cache import KVCache
from lpr.model.reserve import CONTEXT, Steps, free_bytes, memory_needs, sizes_of
from lpr.model.rewrite.merged_linear import PackedLinear, has_room_to_pack
from lpr.model.rewrite.merged_loading import laid_side_by_side
from lpr.model.runner import TreeModel
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from lpr.model.step_inputs import Row
from lpr.planner.facts import facts_of, resolve
from lpr.planner.footprint import Mesh, footprint, rank_sizes
from tests.fakes.caching_allocator import CachingAllocator
from tests.fakes.fake_graphs import FakeCapturer
from tests.fakes.largest import Largest
from tests.fakes.loading_trace import LARGE, Event, recorded, replay
from tests.fakes.models import tiny_model
from tests.fakes.paths import ROOT
from tests.fakes.pretend_gpu import CUDA, PretendGpu, gpu, guard, to_gpu
from tests.fakes.rewriting import merge_projections
from tests.fakes.sharded import config_values

__all__ = ["gpu", "guard"]

EXAMPLES = {
    "7B": ("codellama-7b", Mesh(1, 1)),
    "13B": ("codellama-13b", Mesh(1, 1)),
    "34B": ("codellama-34b", Mesh(1, 1)),
    "34B, tp 2": ("codellama-34b", Mesh(1, 2)),
    "70B, tp 4": ("codellama-70b", Mesh(1, 4)),
    "70B, tp 8": ("codellama-70b", Mesh(1, 8)),
}
"""Those of docs/several_gpus.md."""


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
    room = iter([True, True, False, False, False, False])
    assert merge_projections(model, lambda: next(room)) == 2
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 5, "Q, K, V and gate, up of one layer"
    for free, expected in ((11 << 30, False), (50 << 30, True)):  # 34B and 13B on 80 GiB
        gpu.memory = free, 80 << 30
        assert has_room_to_pack(CUDA) == expected


@pytest.fixture(scope="module")
def load_and_pack(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], list[Event]]:
    """What a load of so many layers and packing ask of the memory, by whether weights are laid side by side before."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def events_of(num_layers: int, is_laid: bool) -> list[Event]:
        with recorded(folder / str(num_layers), num_layers) as (recorder, read):
            with laid_side_by_side(torch.device("cpu")) if is_laid else contextlib.nullcontext():
                model = read()
            assert merge_projections(model, lambda: not is_laid) == 2 * num_layers
            events = list(recorder.events)
        if num_layers == 40:
            plain = LlamaForCausalLM.from_pretrained(folder / str(num_layers), dtype=torch.bfloat16)
            for (name, mine), (other, theirs) in zip(
                model.state_dict().items(), plain.state_dict().items(), strict=True
            ):
                assert name == other and torch.equal(mine, theirs)
        return events

    return events_of


FEW = ["13B"]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.slow
def test_the_worked_examples_fit_as_they_are_told(name: str, load_and_pack: Callable[[int, bool], list[Event]]) -> None:
    """The allocator's model plays a start on 80 GB as the documents tell it: load, pages, graphs, a prompt."""
    real, (preset, mesh) = LARGE[name], EXAMPLES[name]
    decode = DecodeConfig(**resolve(preset).decode, max_batch_size=8, max_length=4096)
    row = footprint(facts_of(resolve(preset).config, preset), decode, mesh, 4096, 2)
    told = row.needs
    assert told is not None and told.weights == real.num_bytes
    pool, left = row.pool_tokens(80 << 30), row.left_bytes(80 << 30)
    parts = [*astuple(told), pool * row.kv_token_bytes, left]
    cells = [name, *(f"{each / 2**30:.1f}" for each in parts), f"{pool:,}"]
    documents = (ROOT / "docs" / "several_gpus.md").read_text()
    assert "| " + " | ".join(cells) + " |" in documents
    memory = CachingAllocator(80 << 30, told.context + told.nccl)
    replay(load_and_pack(real.num_layers, True), real, memory)
    most = real.num_bytes + told.loading
    assert memory.allocated - (8 << 20) <= real.num_bytes <= memory.peak_reserved <= most + (20 << 20)
    memory.empty_cache()
    memory.verify()
    assert memory.stuck <= told.loading
    assert memory.device_free >= (80 << 30) - told.before - (20 << 20), "what the engine measures as free"
    for _ in ("keys", "values"):
        memory.malloc(pool * row.kv_token_bytes // 2)
    memory.context += told.graphs + told.workspaces
    memory.free(memory.malloc(told.layers))
    memory.hold_pool("graphs")
    no_prompt = footprint(facts_of(resolve(preset).config, preset), replace(decode, prefill_chunk=1), mesh, 4096, 2)
    captured = no_prompt.needs.layers  # no graph holds a prompt's piece
    for size in (captured, told.logits):
        memory.malloc(size, pool="graphs")
    assert memory.device_free >= left - captured - (60 << 20) > 0
    with pytest.raises(torch.OutOfMemoryError):
        memory.malloc(left + told.loading + told.layers + (60 << 20))


@pytest.mark.slow
def test_packing_after_loading_leaves_holes_of_9_gib(load_and_pack: Callable[[int, bool], list[Event]]) -> None:
    """34B on 80 GB then has no room for steps, and beside a program that holds 10 GiB it does not load."""
    real, stuck = LARGE["34B"], {}
    for is_laid in (False, True):
        events = load_and_pack(real.num_layers, is_laid)
        memory, less = CachingAllocator(80 << 30, CONTEXT), CachingAllocator(70 << 30, CONTEXT)
        replay(events, real, memory)
        memory.empty_cache()
        stuck[is_laid] = memory.stuck / 2**30
        with contextlib.nullcontext() if is_laid else pytest.raises(torch.OutOfMemoryError, match="of 70.00 GiB"):
            replay(events, real, less)
    assert stuck[True] < 2 and stuck[False] > 8


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
    monkeypatch.setattr(KVCache, "resized", full)
    with pytest.raises(InputError, match="GiB of K/V do not fit on cuda:0"):
        runner.allocate(4, 4096, 8, like)
    monkeypatch.setattr(prepare, "self_check", full)
    with pytest.raises(InputError, match="the weights and the first steps do not fit on cuda:0: it has 80.0 GiB"):
        Engine.from_model(to_gpu(tiny_model()))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_reserve_covers_what_a_step_makes(temperature: float) -> None:
    """Of a large vocabulary the logits are the most, in float32 too; 5 % of what is free may be less."""
    runner = TreeModel(tiny_model(vocab_size=20_000), attention="sdpa")
    runner.allocate(4, 128, 16, self_check(runner))
    rows = [Row.chain(slot, 0, [1] * 16, 16) for slot in range(4)]
    params = [(SamplingParams(temperature=temperature, top_p=0.9, seed=1), range(16))] * 4
    with Largest() as largest:
        runner.evaluate(rows, Selection.build(params), 8)
    needs = memory_needs(sizes_of(runner.model), Steps(batch=4, num_ahead=16, prompt=16, by_kernel=False))
    assert 64 * 20_000 * 4 <= largest.size <= needs.logits // 3, "and there may be three of them"
    free = 10 << 30
    assert usable_tokens(free, 1 << 20, needs.steps) == (free - needs.steps) >> 20 < usable_tokens(free, 1 << 20)


@pytest.mark.parametrize("family", ["llama", "qwen2", "mixtral"])
def test_the_planner_and_the_engine_tell_the_same(family: str) -> None:
    """The sizes are read off a model that is loaded, and off its config: the sum is one function."""
    values = config_values(family)
    model = tiny_model(values.pop("model_type"), **values)  # type: ignore[arg-type]
    assert rank_sizes(facts_of(model.config, family), 1, 4) == sizes_of(model)


def test_a_graph_of_the_largest_step_is_as_high_as_is_told() -> None:
    """With the chain that other ranks have evaluated, padded: 96 entries for a tree of 64, and one for none."""
    for batch, num_ahead, most in ((1, 64, 96), (8, 64, 8 * 96), (8, 40, 8 * 96), (4, 1, 4), (1, 1000, 1024)):
        runner = TreeModel(tiny_model(), attention="sdpa")
        runner.capturer = FakeCapturer()
        runner.allocate(batch, 256, num_ahead, self_check(runner))
        graphs = runner.graphs
        assert graphs is not None
        assert Steps(batch=batch, num_ahead=num_ahead, prompt=1).num_entries == most >= batch * num_ahead
        assert max(each.batch * each.num_entries for each in graphs.common_shapes(4)) <= most


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
