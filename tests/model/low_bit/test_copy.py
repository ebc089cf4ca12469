"""A low-bit copy: near the model on its own K/V, sharing all but the rounded weights, and the model stays as it is."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lpr import DecodeConfig, Engine, SamplingParams, native
from lpr.model.adapter import Adapter
from lpr.model.cpu.products import PrepackedLinear
from lpr.model.cpu.tiles import can_tile
from lpr.model.fused.decoder_layer import DecoderLayer
from lpr.model.kv_cache import KVCache
from lpr.model.low_bit import direct as direct_module
from lpr.model.low_bit.copy import LowBitCopy, make_copy
from lpr.model.low_bit.direct import Direct, LikelyTokens
from lpr.model.low_bit.products import FORMS, Form, LowBitLinear
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.model.step_inputs import Row
from tests.fakes.models import stock_greedy, tiny_model
from tests.fakes.rewriting import make_faster

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with a tied head": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "mistral": {"sliding_window": 9},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 9},
    "starcoder2": {},
    "mixtral": {},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
"""With biases (Qwen 2, StarCoder 2), norms of heads, windows, experts."""
DIRECT = {"llama", "llama with a tied head", "qwen2", "qwen3", "mistral"}
"""Families whose decoder layers are one call, between plain embeddings and a plain head."""
NEAR: dict[str, float] = {"int8": 0.05, "fp8": 0.2, "int4": 0.5}
"""Largest difference of a logit over the range of the logits."""
PARAMS = SamplingParams(max_new_tokens=16)


def model_of(family: str, **sizes: Any) -> Any:
    return tiny_model(family.split()[0], **FAMILIES[family], **sizes)


class World:
    """A checked model with a prompt in its cache."""

    def __init__(self, model: Any, is_accelerated: bool = True) -> None:
        self.runner = TreeModel(model)
        self.counts = make_faster(model) if is_accelerated else {}
        self_check(self.runner)
        self.cache = KVCache(1, 96)
        prompt = Row.chain(0, 0, [(7 * i) % 89 + 2 for i in range(24)], 1)
        self.logits(model, prompt)
        self.cache.commit(prompt, range(24))

    @property
    def adapter(self) -> Adapter:
        return self.runner.adapter

    def logits(self, model: Any, row: Row | None = None) -> Tensor:
        """Of a small tree below the prompt, unless of `row`; as an engine calls the model."""
        tree = Row(0, 24, [5, 9, 7, 8], [-1, 0, 0, 1], [24, 25, 25, 26], 4)
        held, self.adapter.model = self.adapter.model, model
        try:
            return self.adapter.logits([row or tree], self.cache, packed=self.adapter.packed)
        finally:
            self.adapter.model = held


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / (expected.max() - expected.min()))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("is_accelerated", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(first=6)
def test_a_copy_is_near_the_model_which_stays_as_it_is(family: str, is_accelerated: bool) -> None:
    model = model_of(family)
    world = World(model, is_accelerated)
    before, weights, keys = world.logits(model), state(model), [*model.state_dict()]
    twin = make_copy(model, "int8")
    found = world.logits(twin.model)
    assert 1e-5 < difference(found, before) < NEAR["int8"], "rounded, and no more than that"
    assert torch.equal(world.logits(model), before), "the model and its K/V of the prompt are as they were"
    assert [*model.state_dict()] == keys
    assert all(torch.equal(each, weights[name]) for name, each in model.state_dict().items())
    assert type(twin.model) is type(model) and twin.model.config is model.config


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_those_of_the_rounded_weights(family: str) -> None:
    """Each token's sum over its experts is that of transformers' own code with the rounded weights."""
    model = model_of(family)
    twin = make_copy(model, "int8", fuse=False).model
    modules = [(each, twin.get_submodule(name)) for name, each in model.named_modules() if hasattr(each, "_apply_gate")]
    assert len(modules) == 2
    for full, rounded in modules:
        packs = vars(rounded)["forward"].packs
        with torch.no_grad():
            weights = [torch.stack([each.weight_of(0) for each in side]) for side in packs.values()]
            assert 0 < float((weights[0] - full.gate_up_proj).abs().max()) < 0.6 / 127
            full.gate_up_proj.copy_(weights[0])
            full.down_proj.copy_(weights[1])
            states, chosen = torch.randn(9, 64), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
            given = states, chosen, torch.rand(9, 2)
            assert torch.allclose(rounded(*given), full(*given), atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: Form) -> None:
    model = model_of("llama", vocab_size=1000)
    world = World(model)
    twin = make_copy(model, form)
    assert twin.form == form and isinstance(twin, LowBitCopy)
    assert 1e-3 < difference(world.logits(twin.model), world.logits(model)) < NEAR[form]
    full = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear))
    size = full - 3 / 8 * (full - model.lm_head.weight.numel()) if form == "int4" else full
    assert size <= twin.num_bytes < 1.25 * size
    fine = make_copy(model, "int8").model.lm_head.weight
    assert torch.equal(twin.model.lm_head.weight, fine) == (form != "fp8"), "the head has 8 bits"


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ValueError, match="'int3' is none of int8, int4, fp8"):
        make_copy(tiny_model(), "int3")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_accelerated", [True, False])
@pytest.mark.parametrize("family", ["llama", "llama with a tied head", "qwen2", "mixtral"])
def test_a_copy_has_no_memory_but_its_rounded_weights(family: str, is_accelerated: bool) -> None:
    model = model_of(family)
    if is_accelerated:
        World(model)
    twin = make_copy(model, "int8").model
    own = {each.data_ptr() for each in (*model.parameters(), *model.buffers())}
    assert all(each.data_ptr() in own for each in (*twin.parameters(), *twin.buffers()))
    linears = [each for each in model.modules() if isinstance(each, nn.Linear)]
    rounded = [each for each in twin.modules() if isinstance(each, LowBitLinear)]
    assert len(rounded) == len(linears) > 0
    assert not any(each.dim() == 3 for each in twin.parameters()), "experts are rounded"
    assert not any(isinstance(each, LowBitLinear) for each in model.modules())
    assert not any(type(each) is PrepackedLinear for each in twin.modules())
    assert twin.get_input_embeddings().weight is model.get_input_embeddings().weight
    packs = {id(each.pack): each.pack for each in rounded}
    assert sum(each.num_bytes for each in packs.values()) < 1.3 * sum(each.weight.numel() for each in linears) + 4096


@pytest.mark.skipif(not can_tile(torch.float32, 2), reason="no products to pack for")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_of_the_copy_is_one_call(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.DecoderLayers is None or not can_tile(dtype, 2):
        pytest.skip("no extension")
    model = model_of("llama").to(dtype)
    world = World(model)
    twin = make_copy(model, "int8").model
    calls = [vars(each)["forward"] for each in twin.model.layers]
    assert all(isinstance(each, DecoderLayer) and each.whole is not None for each in calls)
    assert calls[0].run is not None and len(calls[0].run.layers) == 2 and calls[1].follows
    whole = world.logits(twin)
    monkeypatch.setattr("lpr.model.fused.decoder_layer.NATIVE", None)
    monkeypatch.setattr("lpr.model.fused.decoder_layer.NATIVE_EXACT", None)
    assert difference(whole, world.logits(twin)) < (0.03 if dtype is torch.bfloat16 else 1e-4), "product by product"
    monkeypatch.undo()
    plain = make_copy(model, "int8", fuse=False).model
    assert not any(isinstance(vars(each).get("forward"), DecoderLayer) for each in plain.modules())
    assert difference(whole, world.logits(plain)) < (0.03 if dtype is torch.bfloat16 else 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow(first=6)
def test_the_parts_of_a_copy_are_called_directly(family: str, dtype: torch.dtype) -> None:
    """With the logits of its forward, or not at all."""
    if native.DecoderLayers is None or not can_tile(dtype, 2):
        pytest.skip("no extension")
    world = World(model_of(family).to(dtype))
    adapter, cache = world.adapter, KVCache(2, 96)
    twin, rows = make_copy(adapter.model, "int8").model, [Row.chain(0, 0, [4, 6, 2], 3), Row.chain(1, 0, [3, 1], 2)]
    expected = adapter.forward(adapter.inputs(rows, cache, packed=True), cache, model=twin)
    keys = [side.clone() for pair in cache.layer_tensors.values() for side in pair]
    cache.clear_all()
    direct = Direct.of(twin, adapter.layer_rules)
    assert (direct is not None) == (family in DIRECT)
    if direct is not None:
        assert torch.equal(direct.logits(rows, cache), expected)
        assert all(map(torch.equal, keys, [side for pair in cache.layer_tensors.values() for side in pair]))


def test_a_pass_reads_the_head_of_likely_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_module, "LEAST_PANELS", 4)
    monkeypatch.setattr(direct_module, "REMEMBERED", 2)
    likely = LikelyTokens(170)  # 6 panels, the last of 10 tokens
    assert likely.all.tolist() == [0, 1, 2, 3, 4, 5] and likely.panels.tolist() == [0, 1, 2]
    likely.learn([5, 165])
    likely.learn([165, 40])
    assert likely.panels.tolist() == [0, 1, 2, 5]
    likely.learn([100])
    likely.learn([101, 130])
    assert likely.panels.tolist() == [0, 1, 2, 3, 4], "panel 5 is forgotten"
    assert LikelyTokens(128).panels.tolist() == [0, 1, 2, 3], "a small head is read whole"


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("num_rows", [1, 3, 19])
def test_likely_tokens_have_the_logits_that_they_have_among_all(
    monkeypatch: pytest.MonkeyPatch, form: Form, num_rows: int
) -> None:
    if native.DecoderLayers is None or not can_tile(torch.float32, 2):
        pytest.skip("no extension")
    monkeypatch.setattr(direct_module, "LEAST_PANELS", 1)
    world = World(model_of("llama", vocab_size=170))
    found = Direct.of(make_copy(world.adapter.model, form).model, world.adapter.layer_rules)
    assert found is not None
    found.likely.learn([169])
    cache, rows = KVCache(2, 96), [Row.chain(0, 0, list(range(num_rows)), num_rows)]
    with torch.no_grad():
        world.adapter.forward(world.adapter.inputs(rows, cache, packed=True), cache)  # which allocates it
    cache.clear_all()  # no row may hold NaN
    whole, part = found.logits(rows, cache), found.logits(rows, cache, of_all=False)
    for panel in range(6):
        mine = slice(32 * panel, min(32 * panel + 32, 170))
        if panel in (0, 1, 2, 5):
            assert torch.equal(part[:, mine], whole[:, mine])
        else:
            assert (part[:, mine] == -torch.inf).all()


def test_parts_that_are_not_all_of_a_copy_are_not_called_directly() -> None:
    """Granite divides its logits behind a plain head."""
    for expected, model in ((True, model_of("llama")), (False, tiny_model("granite", logits_scaling=4.0))):
        engine = Engine.from_model(model, decode=DecodeConfig(trie_nodes=8, window_size=0), self_draft="int8")
        drafter = engine.model.self_drafter
        assert drafter is not None and (drafter.direct is not None) == (expected and native.DecoderLayers is not None)
        if not expected:
            assert Direct.of(drafter.copy.model, drafter.adapter.layer_rules) is not None  # type: ignore[attr-defined]


def test_a_draft_leaves_no_trace_in_the_text() -> None:
    """The copy writes the rows of drafted tokens, and the model's own forward overwrites them."""
    model = model_of("llama")
    world = World(model)
    before = world.logits(model)
    twin = make_copy(model, "int4").model
    sides = [side for pair in world.cache.layer_tensors.values() for side in pair]
    committed = [side[:24].clone() for side in sides]
    world.logits(twin)
    assert all(map(torch.equal, committed, [side[:24] for side in sides]))
    assert torch.equal(world.logits(model), before)


def test_ids_of_an_engine_with_a_copy_of_its_model() -> None:
    model = model_of("llama")
    expected = stock_greedy(model, [5, 9, 5, 9, 5], 16)
    engine = Engine.from_model(model, decode=DecodeConfig(window_size=4, trie_nodes=12))
    assert engine.generate([[5, 9, 5, 9, 5]], PARAMS)[0].token_ids == expected
    twin = make_copy(model, "int4")
    assert engine.generate([[5, 9, 5, 9, 5]], PARAMS)[0].token_ids == expected
    assert stock_greedy(twin.model, [5, 9, 5, 9, 5], 16) != expected, "the copy is another model"
    engine.close()


def test_layers_with_hooks_keep_their_weights() -> None:
    model, calls = model_of("llama"), list[int]()
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append(1))
    twin = make_copy(model, "int8").model
    assert type(twin.model.layers[0].mlp.down_proj) is nn.Linear
    assert isinstance(twin.model.layers[1].mlp.down_proj, LowBitLinear)
    with torch.no_grad():
        twin(torch.tensor([[1, 2, 3]]))
    assert calls == [1]


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2"])
def test_a_dropped_copy_is_freed(family: str) -> None:
    model = model_of(family)
    World(model)
    gc.collect()
    gc.disable()
    try:
        twin = make_copy(model, "int8")
        modules = [*twin.modules()]
        packs = [each.pack for each in modules if isinstance(each, LowBitLinear)]
        packs += [each.forward.packs["gate_up_proj"][0] for each in modules if hasattr(each, "_apply_gate")]
        left = [weakref.ref(each) for each in (*modules, *packs)]
        del twin, modules, packs
        assert not [each() for each in left if each() is not None]
    finally:
        gc.enable()
