"""Few kernels: one matrix product for projections of one input, and torch.compile without a break, on a CPU."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.engine import prepare
from lpr.model import parallel
from lpr.model.graph_capture import Capturer, Program
from lpr.model.graph_inputs import static_shape
from lpr.model.input_builder import Row
from lpr.model.kernels import attention_kernel
from lpr.model.kv_cache import KVCache
from lpr.model.loader import load
from lpr.model.parallel import TensorParallel
from lpr.model.rewrite.compiled_model import refusal
from lpr.model.rewrite.merged_linear import PackedLinear
from lpr.model.rewrite.sharded_layers import VocabularyHead, vocabulary_head
from lpr.model.runner import SharedWeights, TreeModel
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import check_compiled
from lpr.model.step_inputs import StepInputs, current_step
from lpr.model.tree_mask import TreeMask
from tests.fakes import attention_reference
from tests.fakes.kernel_counts import fake_replica
from tests.fakes.models import tiny_model
from tests.fakes.pretend_gpu import guard
from tests.fakes.rewriting import merge_projections
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

__all__ = ["guard"]

DECODE = DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=2)
PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [7, 8, 9] * 5]
PARAMS = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # with biases
    "gemma2": {"sliding_window": 9, "head_dim": 16},
    "mistral": {"sliding_window": 9},
}


# Packed projections.


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_projections_give_the_same_ids(family: str) -> None:
    model = tiny_model(family, spread=0.12, **FAMILIES[family])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    packed = copy.deepcopy(model)
    assert merge_projections(packed) == 2 * model.config.num_hidden_layers
    for (name, mine), (other, theirs) in zip(packed.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other and torch.equal(mine, theirs)
    attention = packed.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    found = [
        [each.token_ids for each in Engine.from_model(it, decode=DECODE).generate(PROMPTS, PARAMS)]
        for it in (model, packed)
    ]
    assert found[0] == found[1]
    assert attention.q_proj.pack._input is None, "nothing of a forward is kept"


def test_one_product_for_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    merge_projections(model)
    products = []
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: products.append(1) or linear(*args))
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
    assert len(products) == 4 * 2 + 1, (
        "queries, keys and values; output; gate and up; down: of two layers; and the head"
    )


def test_gradients_reach_the_parameters() -> None:
    model = tiny_model()
    merge_projections(model)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


class OwnLinear(nn.Linear):
    """Stands for a quantised layer, which is a class of its own."""


def test_what_is_not_a_plain_layer_is_left_as_it_is() -> None:
    model = tiny_model(num_hidden_layers=4)
    layers = [layer.self_attn for layer in model.model.layers]
    layers[0].q_proj.register_forward_hook(lambda *_: None)
    layers[1].k_proj.__class__ = OwnLinear
    layers[2].v_proj.weight.data = layers[2].v_proj.weight.data.double()
    del layers[3].v_proj
    assert merge_projections(model) == 4, "the four MLPs"
    assert not any(isinstance(module, PackedLinear) for each in layers for module in each.modules())


def test_a_pack_notices_another_input() -> None:
    model = tiny_model()
    whole = copy.deepcopy(model)
    merge_projections(model)
    one, other = torch.randn(2, 3, 64)
    mine, theirs = model.model.layers[0].self_attn, whole.model.layers[0].self_attn
    with torch.no_grad():
        for name, given in (("q_proj", one), ("k_proj", other), ("q_proj", other), ("v_proj", one)):
            assert torch.allclose(getattr(mine, name)(given), getattr(theirs, name)(given), atol=1e-6)


# The compiler.


def specification(
    query: Any, key: Any, value: Any, mask: TreeMask, pages: Any, rules: attention_kernel.Rules, tiles: Any = None
) -> Any:
    """Stands for the launch of the kernel, which takes the interpreter long; this one reads where rows begin."""
    with contextlib.nullcontext() if isinstance(query, FakeTensor) else _disable_current_modes():
        out = attention_reference.tree_attention(query, key, value, mask, pages, **rules._asdict())
    return out.transpose(1, 2).contiguous()


@pytest.fixture(autouse=True)
def quick_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kernel, "_launch", specification)


def runner_of(
    family: str = "llama", replica: TensorParallel | None = None, folder: Any = None, **sizes: Any
) -> tuple[TreeModel, KVCache]:
    """A model, or a rank's part of it read from `folder`, with the kernel's attention; its cache has seen a forward."""
    model = tiny_model(family, **{**FAMILIES.get(family, {}), **sizes})
    if replica is not None:
        model.save_pretrained(folder)
        model = load(str(folder), tp=replica).model
    assert merge_projections(model) == 2 * model.config.num_hidden_layers
    part = vocabulary_head(model)
    runner, cache = TreeModel(model, attention="triton", shared=SharedWeights(part=part)), KVCache(1, 32)
    runner.adapter.logits([Row(0, 0, [1, 2], [-1, 0], [0, 1], 1)], cache)
    torch._dynamo.reset()
    return runner, cache


class Direct(Capturer):
    """Captures nothing, and runs each program where a GPU would capture it."""

    def capture(self, program: Program) -> Program:
        program()
        return program


def start_compiled(family: str, num_slots: int, max_nodes: int, **how: Any) -> tuple[int, int, int]:
    """Forms after the check, after a whole start and after steps of later slots; each is compared by the check."""
    runner, like = runner_of(family, num_hidden_layers=1, **how)
    counters = torch._dynamo.utils.counters
    counters.clear()
    runner.compile(backend="eager")
    check_compiled(runner, like)
    found = [counters["stats"]["unique_graphs"]]
    assert runner.compiled is not None and not counters["graph_break"]
    runner.capturer = Direct()
    runner.allocate(num_slots, 1100, max_nodes, like)
    runner.prepare(8, show=False)
    assert runner.num_captures > num_slots * max_nodes // 4
    assert runner.compiled.reason is None and runner.graph_reason is None
    found.append(counters["stats"]["unique_graphs"])
    for slot, length in ((1, 1), (2, 70), (3, 16)):
        rows = [Row.chain(each, 1030, [5] * length, 1) for each in range(min(slot, num_slots - 1), num_slots)]
        runner.evaluate(rows, Selection.build([]), 8)
    return found[0], found[1], counters["stats"]["unique_graphs"]


@pytest.fixture
def replica() -> Iterator[TensorParallel]:
    """A world of two ranks whose collectives do nothing; this is the first."""
    with fake_replica(2) as mesh:
        assert mesh is not None
        yield TensorParallel(mesh)


def test_layers_that_only_transformers_can_split_are_named(replica: TensorParallel, tmp_path: Path) -> None:
    tiny_model("mixtral", num_hidden_layers=1).save_pretrained(tmp_path)
    model = load(str(tmp_path), tp=replica).model
    reason = "its module model.layers.0.mlp.experts is split over ranks in a way that the compiler does not follow"
    assert refusal(model) == reason and refusal(tiny_model("mixtral", num_hidden_layers=1)) is None


@pytest.mark.parametrize("as_transformers_splits_them", [False, True])
def test_a_rank_of_a_replica_is_packed_and_compiled(
    as_transformers_splits_them: bool, replica: TensorParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the wrappers of transformers' own split, the defect, nothing is: 1444 launches of 7B for 430."""
    if as_transformers_splits_them:
        monkeypatch.setattr(parallel, "make_plain", lambda *_: None)
    tiny_model().save_pretrained(tmp_path)
    model = load(str(tmp_path), tp=replica).model
    is_whole_graph = refusal(model) is None
    num_packed = merge_projections(model)
    assert (num_packed, is_whole_graph) == ((0, False) if as_transformers_splits_them else (4, True))


@pytest.mark.parametrize("waits", [True, False])
def test_the_first_replica_compiles_before_the_others(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read what it has written; all at once, the defect, each compiles everything."""
    if not waits:
        monkeypatch.setattr(prepare, "agree", lambda *_: None)
    events: list[str] = []
    begun, names = threading.Event(), threading.local()

    def compile_it(*_: Any) -> None:
        events.append(f"{names.rank} begins")
        if names.rank:
            begun.set()
        else:
            begun.wait(0.5 if waits else 60)
        events.append(f"{names.rank} ends")

    monkeypatch.setattr(prepare, "why_not", lambda *_: None)
    monkeypatch.setattr(prepare, "_compile", compile_it)
    model = tiny_model(num_hidden_layers=1)

    def rank(comm: ThreadComm) -> None:
        names.rank = comm.rank
        Engine.from_model(copy.deepcopy(model), decode=DECODE, comm=comm)

    run_ranks(ThreadWorld(2), rank)
    assert (events == ["0 begins", "0 ends", "1 begins", "1 ends"]) == waits


def equal_sizes_are_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("lpr.model.torch_compile.distinct_sizes", contextlib.nullcontext)


def the_number_of_keys_decides(patch: pytest.MonkeyPatch) -> None:
    attend = attention_kernel.tree_attention

    def mutant(query: Any, key: Any, value: Any, mask: TreeMask, pages: Any = None, **rules: Any) -> Any:
        return attend(query * 1 if pages.num_kv == 1024 else query, key, value, mask, pages, **rules)

    patch.setattr(attention_kernel, "tree_attention", mutant)


@pytest.mark.slow
def test_a_compiler_that_changes_logits_is_found() -> None:
    def wrong(graph: Any, _: Any) -> Any:
        return lambda *args: tuple(each + 0.1 * torch.randn_like(each) for each in graph(*args))

    runner, like = runner_of(num_hidden_layers=1)
    runner.compile(backend=wrong)  # type: ignore[arg-type]
    check_compiled(runner, like)
    assert runner.compiled is not None and "differ from direct ones" in str(runner.compiled.reason)


class Small(nn.Module):
    """Something to compile in a moment."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.sigmoid(hidden) + 1


# What a GPU would run.


def small(**sizes: int) -> Any:
    """A Llama with more than a processor's worth of everything."""
    shape = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=4)
    return AutoConfig.for_model("llama", **{**shape, "num_hidden_layers": 2, **sizes})


# A few steps through the compiler, as a whole start takes ten times as long (tests/slow).


def step_of(runner: TreeModel, cache: KVCache, batch: int, start: int, in_parts: bool) -> StepInputs:
    """A step of one token each of `batch` sequences, with logits in parts or not."""
    rows, nothing = [Row.chain(slot, start, [5], 1) for slot in range(batch)], Selection.build([])
    how = runner.adapter.reads_bits, 1, False, runner.adapter.reads_tables
    shape = static_shape(rows, nothing, 0, 5, cache.rows_per_slot, 1, *how)
    assert shape is not None
    words = torch.zeros(shape.num_words, dtype=torch.int32)
    shape.place(words.numpy(), rows, nothing, cache)
    inputs = shape.read(words, cache)[0]
    inputs.in_parts = in_parts
    return inputs


def forms_of(runner: TreeModel, like: KVCache, steps: list[tuple[int, int, bool]]) -> int:
    """Forms of steps: batch, tokens before, and whether logits come in parts."""
    counters, cache = torch._dynamo.utils.counters, like.resized(5, 1100)
    counters.clear()
    runner.compile(backend="eager")
    assert runner.compiled is not None
    for step in steps:
        runner.compiled.forward(step_of(runner, cache, *step), cache)
    assert runner.compiled.reason is None and not counters["graph_break"]
    return int(counters["stats"]["unique_graphs"])


KEYS = [(1, 12, False), (1, 1060, False)]
BATCHES = [(batch, 12, False) for batch in (2, 3, 5)]


def asks_for_parts(self: VocabularyHead, input: torch.Tensor) -> torch.Tensor:
    step, mine = current_step(), nn.functional.linear(input, self.weight)
    return mine if step is not None and step.in_parts else mine + 0
