"""Packed products and C++ modules on a CPU: the same logits and ids as transformers' own modules."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from lpr import DecodeConfig, Engine, InputError, SamplingParams, native
from lpr.model import loader
from lpr.model.cpu.products import Prepacked, PrepackedLinear
from lpr.model.cpu.tiles import can_tile
from lpr.model.exact import check
from lpr.model.fused import decoder_layer, elementwise, modules
from lpr.model.fused.decoder_layer import DecoderLayer
from lpr.model.kv_cache import KVCache
from lpr.model.loader import load
from lpr.model.parallel import TensorParallel
from lpr.model.rewrite import sharded_layers
from lpr.model.rewrite.base import Setting, Stage
from lpr.model.rewrite.table import rewrite
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.model.step_inputs import Row
from tests.fakes.kernel_counts import fake_replica
from tests.fakes.models import tiny_model
from tests.fakes.rewriting import make_faster, merge_projections
from tests.model.test_parallel import needs_mesh

pytestmark = pytest.mark.skipif(
    native.rms_norm is None or not can_tile(torch.float32, 2), reason="no extension, or no AVX2"
)
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "llama": ({}, {"prepacked products": 9, "decoder layers": 2, "RMS norms": 1}),
    "mistral": ({"sliding_window": 9}, {"prepacked products": 9, "decoder layers": 2, "RMS norms": 1}),
    "qwen2": ({}, {"prepacked products": 9, "decoder layers": 2, "RMS norms": 1}),
    "qwen3": ({"head_dim": 24}, {"prepacked products": 9, "decoder layers": 2, "RMS norms": 1}),
    "granite": ({"residual_multiplier": 0.7}, {"prepacked products": 9, "decoder layers": 2, "RMS norms": 1}),
    "gemma": ({"head_dim": 16}, {"prepacked products": 9, "decoder layers": 2, "RMS norms": 1}),
    "mixtral": ({}, {"prepacked products": 5, "decoder layers": 2, "RMS norms": 1}),
    "gemma2": ({"head_dim": 16, "sliding_window": 9}, {"prepacked products": 9, "gated MLPs": 2, "RMS norms": 9}),
    "olmo2": ({}, {"prepacked products": 9, "gated MLPs": 2, "RMS norms": 9}),
    "phi3": ({}, {"prepacked products": 9, "RMS norms": 5}),
    "starcoder2": ({}, {"prepacked products": 9}),
    "gpt2": ({}, {"prepacked products": 1}),
}
"""Per family its sizes, and what is replaced."""
DTYPES = [torch.float32, torch.bfloat16]
TREES = DecodeConfig(window_size=4, trie_nodes=12)
PROMPTS = [[5, 9, 5, 9, 5], [7, 8, 9]]
PARAMS = SamplingParams(max_new_tokens=20)


def logits(model: Any, exact: bool = False) -> torch.Tensor:
    """[n, V] of a prompt and of a tree below it."""
    runner, cache = TreeModel(model, exact=exact), KVCache(1, 64)
    self_check(runner)
    prompt = runner.adapter.logits([Row.chain(0, 0, range(20), 20)], cache)
    tree = runner.adapter.logits([Row(0, 20, [3, 4, 5], [-1, 0, 0], [20, 21, 21], 3)], cache)
    return torch.cat([prompt, tree]).float()


def ids(model: Any, **options: Any) -> list[list[int]]:
    return [each.token_ids for each in Engine.from_model(model, decode=TREES, **options).generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow(first=6)
def test_logits_of_a_family(family: str, dtype: torch.dtype) -> None:
    if not can_tile(dtype, 2):
        pytest.skip("this machine allows no packed bfloat16")
    sizes, counts = FAMILIES[family]
    model = tiny_model(family, **sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    plain = logits(model.to(dtype))
    assert make_faster(model) == counts
    error = (logits(model) - plain).abs().max() / (plain.max() - plain.min())
    assert error < (1e-5 if dtype is torch.float32 else 2e-2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_same_ids(family: str) -> None:
    model = tiny_model(family, **FAMILIES[family][0])
    faster = copy.deepcopy(model)
    make_faster(faster)
    assert ids(faster) == ids(model)


def test_pieces_of_a_prompt_compute_no_logits() -> None:
    model, gemm_rows = tiny_model("llama"), list[int]()
    model.lm_head.register_forward_pre_hook(lambda module, given: gemm_rows.append(given[0].shape[1]))
    engine = Engine.from_model(model, decode=DecodeConfig(window_size=0, trie_nodes=0, prefill_chunk=16))
    gemm_rows.clear()
    engine.generate([list(range(3, 43))], SamplingParams(max_new_tokens=4))
    assert gemm_rows == [0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_mode(dtype: torch.dtype) -> None:
    """The self-check compares bits; packed products agree from two rows on, wherever this was tried."""
    if not can_tile(dtype, 2):
        pytest.skip("this machine allows no packed bfloat16")
    model = tiny_model().to(dtype)
    plain = logits(model)
    make_faster(model)
    assert torch.allclose(logits(model, exact=True), plain, atol=1e-4 if dtype is torch.float32 else 0.3)
    trees = ids(model, exact=True)
    one = Engine.from_model(model, decode=DecodeConfig.autoregressive(), exact=True)
    assert trees == [each.token_ids for each in one.generate(PROMPTS, PARAMS)]


def test_a_packed_product_that_changes_with_its_height_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    multiply = Prepacked.multiply
    monkeypatch.setattr(Prepacked, "multiply", lambda self, x: multiply(self, x) * (1 + 1e-3 * x.shape[-2]))
    model = tiny_model()
    make_faster(model)
    with pytest.raises(InputError, match=r"q_proj \(64, 128\) in float32 rounds otherwise"):
        self_check(TreeModel(model, exact=True))


# A layer as one call.


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
@pytest.mark.slow(first=6)
def test_one_call_has_the_bits_of_the_parts(
    family: str, dtype: torch.dtype, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_tile(dtype, 2):
        pytest.skip(f"this machine allows no tiles of {dtype}")
    model = tiny_model(family, **FAMILIES[family][0])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    make_faster(model.to(dtype))
    runner, calls, found = TreeModel(model, exact=exact), [], []
    in_one_call = DecoderLayer._in_one_call

    def counted(self: DecoderLayer, *args: Any) -> torch.Tensor:
        calls.append(self)
        return in_one_call(self, *args)

    monkeypatch.setattr(DecoderLayer, "_in_one_call", counted)
    if exact:
        self_check(runner)
    for whole in (True, False):
        calls.clear()
        if not whole:
            for layer in model.model.layers:
                object.__setattr__(layer.forward, "run", None)
        cache = KVCache(2, 700)
        steps = [
            [Row.chain(0, 0, range(20), 20), Row.chain(1, 0, range(30, 70), 40)],
            [Row.chain(0, 20, [i % 97 for i in range(500)], 0)],
            [Row(0, 520, [3, 4, 5], [-1, 0, 0], [520, 521, 521], 3), Row.chain(1, 40, [7, 8], 2)],
            [Row.chain(0, 521, [9], 1)],
        ]
        found.append([runner.adapter.logits(rows, cache) for rows in steps])
        assert len(calls) == (3 if whole else 0), "the first step makes the cache's layers"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_layers_of_several_rules_or_with_hooks_are_not_computed_together() -> None:
    if not can_tile(torch.float32, 2):
        pytest.skip("this machine allows no tiles of float32, so no layer is one call")

    def numbers(model: Any) -> list[int]:
        make_faster(model)
        return [len(layer.forward.run.layers) for layer in model.model.layers]

    assert numbers(tiny_model(num_hidden_layers=3)) == [3, 1, 1]
    hooked = tiny_model(num_hidden_layers=3)
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    assert numbers(hooked) == [1, 1, 1]
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    mixed = tiny_model("qwen2", num_hidden_layers=3, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    assert numbers(mixed) == [1, 1, 1]


def test_a_copy_of_a_layer_has_weights_of_its_own() -> None:
    if not can_tile(torch.float32, 2):
        pytest.skip("this machine allows no tiles of float32, so no layer is one call")
    model = tiny_model()
    make_faster(model)
    copied, rows = copy.deepcopy(model), [Row.chain(0, 0, [1, 2, 3], 3)]
    cache = KVCache(1, 64)
    TreeModel(model).adapter.logits(rows, cache)  # makes the cache's layers
    before = TreeModel(copied).adapter.logits(rows, cache)
    for layer in copied.model.layers:
        for pack in (layer.self_attn.q_proj.pack, layer.mlp.down_proj.pack):
            pack.packed._panels.zero_()
        assert layer.forward.whole is None or layer.forward.whole is not model.model.layers[0].forward.whole
    assert torch.equal(TreeModel(model).adapter.logits(rows, cache), before)
    assert not torch.equal(TreeModel(copied).adapter.logits(rows, cache), before)


# Weights.


def test_weights_are_held_once_and_can_be_read() -> None:
    model = tiny_model(attention_bias=True, tie_word_embeddings=True)
    before = copy.deepcopy(model.state_dict())
    make_faster(model)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    held = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert held == {"model.embed_tokens.weight"}
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.pack is attention.v_proj.pack and attention.o_proj.pack is not attention.q_proj.pack
    assert torch.equal(attention.k_proj.weight, before["model.layers.0.self_attn.k_proj.weight"])


def test_what_is_not_plain_is_left_as_it_is() -> None:
    model = tiny_model(num_hidden_layers=3)
    first, second, third = model.model.layers
    first.self_attn.k_proj.register_forward_hook(lambda *_: None)
    second.mlp.forward = second.mlp.forward
    third.self_attn.o_proj.half()
    assert make_faster(model) == {"prepacked products": 13, "RMS norms": 5, "gated MLPs": 2, "decoder layers": 1}
    assert not isinstance(first.self_attn.k_proj, PrepackedLinear)
    assert isinstance(second.__dict__.get("forward"), decoder_layer.DecoderLayer), "it calls the MLP's own forward"


def test_code_that_is_not_known_is_left_as_it_is() -> None:
    model = tiny_model()
    kind = type(model.model.norm)

    class Doubled(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    model.model.norm.__class__ = Doubled
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    assert make_faster(model) == {"prepacked products": 9, "decoder layers": 2}
    assert modules.mlp_of(model.model.layers[0].mlp) is None


# Mutants: what a wrong part does is found by the self-check, and the plain modules take over.


@pytest.mark.parametrize("mutant", ["_in_one_call", "rotate", "norm_heads", "rms_norm", "gate"])
def test_a_wrong_part_is_found(
    mutant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("qwen3", head_dim=16)
    model.model.layers[0].self_attn.q_norm.weight.data.uniform_(0.5, 2)
    if mutant == "_in_one_call" and not can_tile(torch.float32, 2):
        pytest.skip("this machine allows no tiles of float32, so no layer is one call")
    model.save_pretrained(tmp_path)
    expected = ids(model)
    places: dict[str, tuple[Any, Any]] = {
        "_in_one_call": (DecoderLayer, lambda self, states, *_: states),
        "rotate": (decoder_layer, lambda *_: None),
        "norm_heads": (decoder_layer, lambda *_: None),
        "rms_norm": (modules, lambda states, weight, *_, added=None: states * weight),
        "gate": (modules, lambda states, activation: states[..., : states.shape[-1] // 2].contiguous()),
    }
    where, wrong = places[mutant]
    monkeypatch.setattr(where, mutant, wrong)
    with caplog.at_level(logging.WARNING):
        engine = Engine.from_pretrained(str(tmp_path), decode=TREES, dtype="float32", device="cpu")
    found = "attention='native' does not work here" if mutant == "_in_one_call" else "the faster modules do not fit"
    assert found in caplog.text
    assert [each.token_ids for each in engine.generate(PROMPTS, PARAMS)] == expected


# Parts.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 16, 40, 576])
@torch.no_grad()
def test_norms(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    states, added, weight = (torch.randn(*size, width).to(dtype) for size in ((2, 150), (2, 150), (1,)))
    for kind, weighing in zip((LlamaRMSNorm, Gemma2RMSNorm, Olmo2RMSNorm), elementwise.Weighing, strict=True):
        norm = kind(width, eps=1e-5)
        norm.weight.data = weight[0]
        found = elementwise.rms_norm(states, norm.weight, 1e-5, weighing)
        assert torch.allclose(found, norm(states), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)
    total = states.clone()
    found = elementwise.rms_norm(total, norm.weight, 1e-5, weighing, added)
    assert torch.equal(total, states + added)
    assert torch.equal(found, elementwise.rms_norm(states + added, norm.weight, 1e-5, weighing))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [6, 16, 24, 64])
def test_rotary_embedding(width: int, dtype: torch.dtype) -> None:
    states = torch.randn(1, 70, 5 * width).to(dtype)
    cosines, sines = (torch.randn(1, 70, width).to(dtype) for _ in range(2))
    heads = states.unflatten(2, (5, width)).transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(heads[:, :3], heads[:, :1], cosines, sines)
    found = states.clone()
    elementwise.rotate(found, cosines, sines, 3)
    assert torch.equal(found.unflatten(2, (5, width)).transpose(1, 2)[:, :3], expected)
    assert torch.equal(found[..., 3 * width :], states[..., 3 * width :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [5, 16, 96])
def test_gates(width: int, dtype: torch.dtype) -> None:
    """Also of numbers that overflow, and of such that are none."""
    states = torch.randn(1, 40, 2 * width) * 8
    states[0, 0, :5] = torch.tensor([float("nan"), float("inf"), 90.0, -90.0, -200.0])
    states = states.to(dtype)
    gates, values = states.chunk(2, -1)
    for activation, expected in ((0, F.silu(gates)), (1, F.gelu(gates, approximate="tanh"))):
        tolerance = {"rtol": 1e-2 if dtype is torch.bfloat16 else 2e-6, "atol": 1e-5}
        assert torch.allclose(elementwise.gate(states, activation), expected * values, equal_nan=True, **tolerance)


def test_rows_have_the_same_bits_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight = torch.randn(1, 300, 640), torch.rand(640)
    assert states.numel() > 1 << 16, "enough for several threads"
    found = []
    for count in (1, 2):
        monkeypatch.setattr(elementwise, "team_size", lambda count=count: count)
        found.append((elementwise.rms_norm(states, weight, 1e-5, 0), elementwise.gate(states, 0)))
    alone = elementwise.rms_norm(states[:, 7:8].contiguous(), weight, 1e-5, 0)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][0][:, 7:8], alone)


# The dtype.


@pytest.mark.parametrize(("fewest", "has_it", "expected"), [
    (0, True, torch.bfloat16), (10**9, True, torch.float32), (0, False, torch.float32),
])  # fmt: skip
def test_auto_keeps_bfloat16_where_it_is_faster(
    fewest: int, has_it: bool, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().to(torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: has_it)
    monkeypatch.setattr(loader, "FEWEST_HALVED", fewest)
    assert loader.load(str(tmp_path), device="cpu").model.dtype is expected


def test_heights_of_packed_products() -> None:
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    make_faster(model)
    gemm_rows = check.find_gemm_rows(nn.ModuleList([nn.Embedding(3, 3), model]))
    assert isinstance(gemm_rows, check.GemmRows) and gemm_rows.fewest <= check.MOST_FILLED


def test_a_copy_of_a_replaced_module_computes_with_its_own_weights() -> None:
    """Outside a step; its own forward is held by a reference that must not lead to the first module."""
    norm = LlamaRMSNorm(8)
    norm.forward = modules.norm_of(norm)
    copied, states = copy.deepcopy(norm), torch.randn(3, 8)
    copied.weight.data.fill_(2.0)
    assert torch.equal(copied(states), 2 * norm(states))


@needs_mesh
def test_a_ranks_part_is_fused_as_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer has two sums over the ranks, and the results of the layers that it replaces."""
    monkeypatch.setattr("lpr.model.fused.modules.is_available", lambda device: True)
    tiny_model().save_pretrained(tmp_path)
    with fake_replica(2) as mesh:
        assert mesh is not None
        model = load(str(tmp_path), tp=TensorParallel(mesh)).model
        assert merge_projections(model) == 2 * model.config.num_hidden_layers
        lines = rewrite(model, Setting(torch.device("cuda"), tp=True, compile="off"), Stage.FASTER)
        assert {line.name: line.num_modules for line in lines}["decoder layers"] == model.config.num_hidden_layers
        for layer in model.model.layers:
            assert layer.forward.run is None and None not in (layer.forward.out.group, layer.forward.mlp.down.group)
        runner, sums = TreeModel(model), []
        monkeypatch.setattr(sharded_layers.dist, "all_reduce", lambda product, group: sums.append(product.shape))
        self_check(runner)
        sums.clear()
        runner.adapter.logits([Row(0, 0, [1, 2], [-1, 0], [0, 1], 1)], KVCache(1, 32))
        assert len(sums) == 1 + 2 * model.config.num_hidden_layers, "and one for the embedding"
