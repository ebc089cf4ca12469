"""The long tests of tests/model/kernels/test_scan_kernel.py."""

from __future__ import annotations

import pytest
import torch

from lpr import Engine, SamplingParams
from lpr.model.graphs import GraphForward
from lpr.model.kernels import scan_kernel
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.step_inputs import Row
from tests.engine.test_self_draft import copied, fix
from tests.fakes import pretend_gpu
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, to_gpu
from tests.fakes.pretend_kernels import products_by_row
from tests.model.exact.test_check import TEXT, in_pieces
from tests.model.kernels.test_scan_kernel import (
    CHAIN,
    DECODE,
    DEVICE,
    KERNELS,
    PROMPTS,
    few_heads,
    launches_of_a_graph,
    normal,
    pytestmark,
    walked,
)
from tests.model.kernels.test_scan_kernel import test_an_engine_emits_the_same_ids as check_ids
from tests.model.kernels.test_scan_kernel import test_linear_attention as check_linear_attention
from tests.model.kernels.test_scan_kernel import test_other_states_advance as check_others
from tests.model.recurrent.test_recurrent import hybrid


@pytest.mark.parametrize(("kind", "dim", "dim_v"), [("delta", 128, 64), ("ssd", 64, 128)])
def test_linear_attention_of_large_heads(kind: str, dim: int, dim_v: int) -> None:
    check_linear_attention(kind, dim, dim_v, True)


def test_an_engine_of_qwen3_next_emits_the_same_ids(few_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_ids("qwen3_next", few_heads, monkeypatch)


def test_exact_linear_attention_has_the_bits_of_single_entries() -> None:
    """In a tree, with a trunk and without, and behind a state that has advanced along a path or entry by entry."""
    torch.manual_seed(0)
    parents = [*CHAIN, 32, 32, 33, 34, 34, 36]
    shape = 1, len(parents)
    inputs = [normal(*shape, 1, 16), normal(*shape, 1, 16), normal(*shape, 2, 24), -torch.rand(*shape, 2).to(DEVICE)]
    inputs.append(torch.rand(*shape, 2).to(DEVICE))
    state, last = normal(1, 2, 16, 24), torch.tensor([38], dtype=torch.int32, device=DEVICE)
    single, ended = state.clone(), [state.clone(), state.clone()]
    outputs = [walked(parents, inputs, each, trunk) for each, trunk in zip(ended, (0, 2), strict=True)]
    assert torch.equal(outputs[0][0], outputs[1][0])
    for (_, advance), each in zip(outputs, ended, strict=True):
        advance(last, each)
    for entry in [*range(33), 34, 36, 38]:
        out, advance = walked([-1], [each[:, entry : entry + 1] for each in inputs], single)
        assert torch.equal(out[0, 0], outputs[0][0][0, entry])
        advance(torch.zeros(1, dtype=torch.int32, device=DEVICE), single)
    assert torch.equal(ended[0], single) and torch.equal(ended[1], single)


@pytest.mark.parametrize("name", ["olmo_hybrid", "mamba2"])
def test_exact_bits_by_kernels(
    name: str, few_heads: None, products_by_row: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of logits, in pieces of a text and in a tree whose branches come between its nodes."""
    monkeypatch.setattr("lpr.model.recurrent.states.KERNEL_DEVICES", ("cuda", "cpu"))
    runner, text = TreeModel(hybrid(name).to(DEVICE), attention="triton", exact=True), TEXT[:10]
    assert runner.adapter.why_not_exact() is None
    single = in_pieces(runner, text, [4, *[1] * 6])
    assert torch.equal(in_pieces(runner, text, [10]), single)
    cache, prompt = KVCache(1, 64), Row.chain(0, 0, text[:4], 1)
    runner.adapter.logits([prompt], cache)
    cache.commit(prompt, range(4))
    tokens = [each for token in text[4:7] for each in (token, (token + 1) % 97)]
    row = Row(0, 4, tokens, [-1, -1, 0, 0, 2, 2], [4, 4, 5, 5, 6, 6], 6)
    assert torch.equal(runner.adapter.logits([row], cache)[::2], single[4:7])
    cache.commit(row, [0, 2, 4])
    assert cache.states.kernels is not None
    assert torch.equal(runner.adapter.logits([Row.chain(0, 7, text[7:], 3)], cache), single[7:])


def test_a_copy_drafts_by_kernels(few_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpr.model.recurrent.states.KERNEL_DEVICES", ("cuda", "cpu"))
    model, params = hybrid("qwen3_next").to(DEVICE), SamplingParams(max_new_tokens=8)
    expected = [each.token_ids for each in Engine.from_model(model, decode=DECODE).generate(PROMPTS, params)]
    engine = Engine.from_model(model, decode=DECODE, attention="triton", self_draft="int8")
    fix(engine)
    done = engine.generate(PROMPTS, params)
    assert [each.token_ids for each in done] == expected and copied(done)[1] >= 6
    cache = engine.model.cache
    assert cache is not None and cache.states.scratch is not None and cache.states.scratch.kernels is not None


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_other_states_advance(name: str, few_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_others(name, few_heads, monkeypatch)


def test_launches_of_a_step_and_its_replay(gpu: PretendGpu, few_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph holds the launches of all layers; behind it each convolution and scan advances by one."""
    for kernel in KERNELS:
        monkeypatch.setattr(scan_kernel, kernel, pretend_gpu.Launched(getattr(scan_kernel, kernel)))
    monkeypatch.setattr(GraphForward, "prepare", lambda *_: None)
    params = SamplingParams(max_new_tokens=6)
    engine = Engine.from_model(hybrid("olmo_hybrid"), decode=DECODE)
    expected = [each.token_ids for each in engine.generate(PROMPTS[:1], params)]
    engine = Engine.from_model(to_gpu(hybrid("olmo_hybrid")), decode=DECODE)
    gpu.events.clear()
    assert [each.token_ids for each in engine.generate(PROMPTS[:1], params)] == expected
    assert engine.model.graph_reason is None and gpu.num_replays > 2
    assert gpu.count("pageable") == 0, gpu.events
    engine.submit(PROMPTS[0], SamplingParams(max_new_tokens=12))
    launches = []
    while not engine.is_idle:
        before = gpu.num_kernels, gpu.num_captures
        engine.step()
        if gpu.num_captures == before[1]:
            launches.append(gpu.num_kernels - before[0])
    assert launches and max(launches) <= 2 + 1 + 1, f"two advances, moves of K/V, and the choice of tokens: {launches}"


def test_a_recurrent_layer_launches_two_kernels_of_ours(
    gpu: PretendGpu, few_heads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its convolution and its scan; where entries lie is looked up once a step. The rest is transformers' own code."""
    one = launches_of_a_graph(1, gpu, monkeypatch)
    gpu.num_captures = 0
    two = launches_of_a_graph(2, gpu, monkeypatch)
    assert {name: one[name] for name in KERNELS if one[name]} == {"find_parents": 1, "convolve_tree": 1, "scan_tree": 1}
    assert two - one == {"convolve_tree": 1, "scan_tree": 1, "all": two["all"] - one["all"]}
    assert two["all"] - one["all"] <= 44
