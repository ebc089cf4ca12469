"""Tree forms of recurrent layers as Triton kernels, interpreted without a GPU: they equal the torch forms."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.model.kv_cache import KVCache
from lpr.model.recurrent import scans
from lpr.model.recurrent.selective import Selective
from lpr.model.recurrent.states import States
from lpr.model.recurrent.tree import Tree
from lpr.model.runner import TreeModel
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row
from lpr.model.tree_mask import build_mask
from tests.fakes import pretend_gpu
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, to_gpu
from tests.fakes.pretend_graphs import Graph
from tests.fakes.pretend_kernels import without_a_check
from tests.model.recurrent.test_recurrent import KINDS, hybrid

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
from lpr.model.kernels import recurrent_code, scan_code, scan_kernel, walk_code
from lpr.model.kernels.scan_kernel import Options, Places

__all__ = ["gpu", "guard"]
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CHAIN, STAR = list(range(-1, 32)), [-1] + [0] * 6
LAST = [40, 4, -1, 36]
"""Entries to which states advance."""


def wide_tree(count: int, seed: int = 0) -> list[int]:
    random = np.random.default_rng(seed)
    return [-1] + [int(random.integers(max(0, entry - 6), entry)) for entry in range(1, count)]


def nothing(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), torch.nan, dtype=dtype, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(DEVICE, dtype)


@dataclass
class World:
    """Four padded rows: a wide tree, a star on a new sequence, a chain that stays, a chain that ends in a tree."""

    trees: list[list[int]]
    places: Places

    @classmethod
    def make(cls, with_trunk: bool = True) -> World:
        torch.manual_seed(0)
        trees = [wide_tree(45), STAR, CHAIN, [*CHAIN, 32, 32, 33, 34, 34]]
        mask = build_mask(trees, [5, 0, 3, 9], torch.zeros(4, 47, dtype=torch.int64), DEVICE)
        slots, trunk = (torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in ([2, 0, 4, 1], [0, 0, 1, 2]))
        return cls(trees, scan_kernel.place(mask, slots, trunk if with_trunk else None))

    def differences(
        self, out: Tensor, advance: scan_kernel.Advance, states: Tensor, dim: int, expected: Callable[..., Any]
    ) -> tuple[float, float]:
        """The largest of outputs, entries at `dim`, and of states that have advanced to LAST.

        `expected` gives a row's outputs and what it writes, from its index, a slice of real entries, state and tree.
        """
        before, worst_state = states.clone(), 0.0
        advance(torch.tensor(LAST, dtype=torch.int32, device=DEVICE), states)
        worst = 0.0 if out.isfinite().all() else torch.inf
        for row, parents in enumerate(self.trees):
            slot, start = int(self.places.slots[row]), out.shape[dim] - len(parents)
            state = before[slot : slot + 1] if self.places.mask.num_cached[row] else torch.zeros_like(before[:1])
            tree = Tree(np.array([parents]), DEVICE)
            wanted, written = expected(row, slice(start, None), state, tree)
            worst = max(worst, float((out[row : row + 1].narrow(dim, start, len(parents)) - wanted).abs().max()))
            assert not out[row].narrow(dim - 1, 0, start).any(), "padding is 0"
            path, entry = [], LAST[row]
            while entry >= 0:
                path.insert(0, entry)
                entry = parents[entry]
            if path:
                along = torch.tensor([path], device=DEVICE)
                wanted = written.after(state, scans.Path(along, along >= 0, along[:, -1]))[0]
            else:
                wanted = before[slot]
            worst_state = max(worst_state, float((states[slot] - wanted).abs().max()))
        others = [slot for slot in range(len(states)) if slot not in self.places.slots.tolist()]
        assert torch.equal(states[others], before[others])
        return worst, worst_state


def linear(
    world: World, kind: str, dim: int, dim_v: int, dtype: torch.dtype = torch.float32, exact: bool = False
) -> tuple[float, float]:
    """Differences from the torch forms for a rule, with 2 heads that share a key (1 with decay per channel)."""
    heads = 1 if kind == "per channel" else 2
    shape = len(world.trees), 47
    query, key = normal(*shape, 1, dim, dtype=dtype), normal(*shape, 1, dim, dtype=dtype)
    value, beta = normal(*shape, heads, dim_v, dtype=dtype), torch.rand(*shape, heads).to(DEVICE, dtype)
    decay = -torch.rand(*shape, heads, *([dim] if kind == "per channel" else [])).to(DEVICE)
    states, skip, rate = normal(6, heads, dim, dim_v), normal(heads), -normal(heads).exp()
    options = Options(solve=True, norm=True, scale=0.3)
    if kind == "ssd":
        options = Options(rate=rate, bias=skip, softplus=True, limits=(0.1, 1.5), skip=skip)
    given = None if kind == "ssd" else decay
    out, advance = scan_kernel.linear_scan(
        query, key, value, given, beta, states, world.places, nothing, options, exact
    )  # fmt: skip

    def expected(row: int, real: slice, state: Tensor, tree: Tree) -> Any:
        q, k, v, g, b = (each[row : row + 1, real].float() for each in (query, key, value, decay, beta))
        if kind == "ssd":
            b = F.softplus(b + skip).clamp(0.1, 1.5)
            q, k = (each.repeat_interleave(heads, 2) for each in (q, k))
            found, written = scans.decayed_attention([q, k, v * b[..., None], rate * b], state, tree)
            return found + skip[:, None] * v, written
        q, k = (each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        q, k = (each.repeat_interleave(heads, 2) for each in (q * 0.3, k))
        return scans.delta_rule([q, k, v, g, b], state, tree)

    return world.differences(out, advance, states, 1, expected)


@pytest.mark.parametrize(
    ("kind", "dim", "dim_v", "with_trunk"),
    [
        ("delta", 24, 40, False),
        ("per channel", 64, 16, True),
    ],
)
def test_linear_attention(kind: str, dim: int, dim_v: int, with_trunk: bool) -> None:
    assert max(linear(World.make(with_trunk), kind, dim, dim_v)) < 1e-5 * dim**0.5


def test_inputs_in_bfloat16() -> None:
    outputs, states = linear(World.make(), "delta", 32, 16, torch.bfloat16)
    assert outputs < 0.02 and states < 1e-5, "states are float32"


@pytest.mark.parametrize("kind", ["delta", "ssd", "per channel"])
@pytest.mark.slow(first=1)
def test_exact_linear_attention(kind: str) -> None:
    assert max(linear(World.make(), kind, 16, 24, exact=True)) < 1e-5 * 4


def walked(parents: Sequence[int], inputs: Sequence[Tensor], state: Tensor, trunk: int = 0) -> tuple[Tensor, Any]:
    """Outputs of a tree of one row, and the advance of `state` [1, H, K, V]."""
    mask = build_mask([parents], [1], torch.zeros(1, len(parents), dtype=torch.int64), DEVICE)
    slots, trunks = (torch.tensor([each], dtype=torch.int32, device=DEVICE) for each in (0, trunk))
    places = scan_kernel.place(mask, slots, trunks)
    options = Options(solve=True, norm=True, scale=0.3)
    return scan_kernel.linear_scan(*inputs, state, places, nothing, options, exact=True)


def test_equal_keys_along_a_chain_keep_their_digits() -> None:
    """The inverse of the delta rule's system by powers of its matrix differs by more than 1e9 here."""
    torch.manual_seed(0)
    parents = list(range(-1, 63))
    mask = build_mask([parents], [1], torch.zeros(1, 64, dtype=torch.int64), DEVICE)
    places = scan_kernel.place(mask, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    key, value = normal(1, 1, 1, 16).expand(1, 64, 1, 16), normal(1, 64, 1, 16)
    beta, decay = torch.ones(1, 64, 1, device=DEVICE), torch.zeros(1, 64, 1, device=DEVICE)
    states = normal(1, 1, 16, 16)
    options = Options(solve=True, norm=True)
    out, _ = scan_kernel.linear_scan(key, key, value, decay, beta, states, places, nothing, options)
    assert (out - value).abs().max() < 1e-4, "an entry reads what it has just written"


def convolution(world: World, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    x, weight, bias = normal(4, 47, 20, dtype=dtype).transpose(1, 2), normal(20, 4), normal(20)
    states = normal(6, 20, 3, dtype=dtype)
    out, advance = scan_kernel.convolve(x, weight, bias, True, states, world.places, nothing)
    assert out.stride() == x.stride()

    def expected(row: int, real: slice, state: Tensor, tree: Tree) -> Any:
        part = x[row : row + 1, :, real]
        return scans.convolve(part, state, tree, weight, bias, F.silu), scans.Convolved(part, tree)

    return world.differences(out, advance, states, 2, expected)


def test_convolutions() -> None:
    assert max(convolution(World.make())) < 1e-5
    outputs, states = convolution(World.make(with_trunk=False), torch.bfloat16)
    assert outputs < 0.1 and states == 0.0


def selective(world: World) -> tuple[float, float]:
    x, steps, gate = (normal(4, 20, 47) for _ in range(3))
    keys, queries, rates, skip, bias = normal(4, 47, 8), normal(4, 8, 47), -normal(20, 8).exp(), normal(20), normal(20)
    states = normal(6, 20, 8)
    out, advance = scan_kernel.selective_scan(
        x, steps, rates, keys.transpose(1, 2), queries, states, world.places, nothing,
        bias=bias, softplus=True, skip=skip, gate=gate,
    )  # fmt: skip

    def expected(row: int, real: slice, state: Tensor, tree: Tree) -> Any:
        mine, its_gate = x[row : row + 1, :, real], gate[row : row + 1, :, real]
        dt = F.softplus(steps[row : row + 1, :, real] + bias[:, None])
        inputs = mine.transpose(1, 2), dt.transpose(1, 2), keys[row : row + 1, real], queries[row : row + 1, :, real].mT
        found, written = Selective(rates).scan(inputs, state, tree)
        return (found.mT + mine * skip[:, None]) * F.silu(its_gate), written

    return world.differences(out, advance, states, 2, expected)


def test_selective_scans() -> None:
    assert max(selective(World.make())) < 2e-5


def test_parents_in_trees_of_several_words() -> None:
    trees = [wide_tree(200), list(range(-1, 130)), [-1] * 70, [-1] + [0] * 150]
    mask = build_mask(trees, [1] * 4, torch.zeros(4, 203, dtype=torch.int64), DEVICE)
    found = scan_kernel.place(mask, torch.arange(4, dtype=torch.int32, device=DEVICE)).parents
    for row, parents in enumerate(trees):
        assert found[row, : len(parents)].tolist() == parents


# Seeded faults.

FAULTS: dict[str, tuple[Any, str, str, str]] = {
    "the tree is taken for a chain": (
        scan_code,
        "    return ((word[:, None] >>",
        "    return 0 == 0 * ((word[:, None] >>",
        "delta",
    ),
    "decay not along the path": (
        scan_code,
        "inside = within.to(",
        "inside = (lane[:, None] >= lane[None, :]).to(",
        "delta",
    ),
    "decay of another branch": (
        scan_code,
        "tl.where(earlier, column[None, :], -1)",
        "tl.where(column[None, :] < begin, column[None, :], -1)",
        "ssd",
    ),
    "one depth too few": (
        scan_code,
        "0) - 1):",
        "0) - 2):",
        "delta",
    ),
    "a state without decay": (
        scan_code,
        "state *= tl.exp(end)\n",
        "state *= 1.0\n",
        "ssd",
    ),
    "decays of the first channels": (
        scan_code,
        "_rows(decay_at, row, held, decay_t, dims, K))\n                sums = mine",
        "_rows(decay_at, row, held, decay_t, channel, K))\n                sums = mine",
        "per channel",
    ),
    "a rejected branch in the state": (
        scan_code,
        "held = (((word >> (entry % 64).to(tl.int64)) & 1) != 0) & (entry >= first)",
        "held = (entry <= last) & (entry >= first)",
        "delta",
    ),
    "a window across branches": (
        recurrent_code,
        "at = tl.where(is_entry, above, at - 1)\n    if SILU",
        "at = at - 1\n    if SILU",
        "convolution",
    ),
    "inputs of another branch kept": (
        recurrent_code,
        "at = tl.where(at >= 0, above, at - 1)",
        "at = at - 1",
        "convolution",
    ),
    "a rejected branch in an exact state": (
        walk_code,
        "if ((word >> (entry % 64)) & 1) != 0:",
        "if word != 0:",
        "exact delta",
    ),
    "the exact state of the entry before": (
        walk_code,
        "is_next = parent == entry - 1",
        "is_next = parent >= -1",
        "exact delta",
    ),
    "the state of the entry before": (
        recurrent_code,
        "is_next = parent == entry - 1",
        "is_next = parent >= -1",
        "selective",
    ),
}


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the interpreter reads the changed source")
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow(first=5)
def test_faults_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, old, new, kind = FAULTS[name]
    source = Path(module.__file__).read_text()
    assert source.count(old) == 1
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    assert spec is not None and spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    for kernel in KERNELS:
        if hasattr(mutant, kernel) and hasattr(module, kernel):
            monkeypatch.setattr(scan_kernel, kernel, getattr(mutant, kernel))
    run = {"convolution": convolution, "selective": selective}.get(kind)
    world = World.make()
    if run is not None:
        differences = run(world)
    else:
        size, is_exact = 32 if kind == "per channel" else 16, kind.startswith("exact ")
        differences = linear(world, kind.removeprefix("exact "), size, 16, exact=is_exact)
    assert not max(differences) < 1e-3


KERNELS = (
    "scan_tree", "advance_scan", "find_parents", "convolve_tree", "advance_convolution", "select_tree",
    "advance_selective", "walk_tree", "advance_walk",
)  # fmt: skip


# In an engine.

PROMPTS = [[3, 5, 7, 9, 5, 7], [(i * i) % 89 + 2 for i in range(11)]]
DECODE = DecodeConfig(
    window_size=2, ngram_size=3, guess_set_size=2, trie_nodes=6, max_batch_size=2, max_length=64, kv_tokens=512
)


@pytest.fixture
def few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs one after the other."""
    few = {"linear_num_value_heads": 2, "linear_num_key_heads": 1, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    kinds = {"layer_types": ["linear_attention", "full_attention"]}
    monkeypatch.setitem(KINDS, "qwen3_next", {**kinds, **few})
    monkeypatch.setitem(KINDS, "olmo_hybrid", {**kinds, **few, "linear_num_key_heads": 2})
    monkeypatch.setitem(KINDS, "mamba2", {**KINDS["mamba2"], "num_heads": 4, "expand": 1})
    monkeypatch.setattr("lpr.engine.prepare.self_check", without_a_check)
    # The kernels that sample have their own tests; the interpreter takes ten seconds to try them.
    monkeypatch.setattr("lpr.model.sampling.choice.tried_logits", lambda _: iter(()))


@pytest.mark.parametrize("name", ["jamba"])
def test_an_engine_emits_the_same_ids(name: str, few_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lpr.model.recurrent.states.KERNEL_DEVICES", ("cuda", "cpu"))
    params = SamplingParams(max_new_tokens=4)
    model = hybrid(name).to(DEVICE)
    expected = [each.token_ids for each in Engine.from_model(model, decode=DECODE).generate(PROMPTS, params)]
    engine = Engine.from_model(model, decode=DECODE, attention="triton")
    assert [each.token_ids for each in engine.generate(PROMPTS, params)] == expected
    assert engine.model.cache is not None and engine.model.cache.states.kernels is not None


def check_that_others_advance(name: str, attention: str) -> None:
    """States that a step's advance into, those of the slots themselves, and those behind a part of a chain."""
    runner = TreeModel(hybrid(name).to(DEVICE), attention=attention)
    text, cache = [(7 * at) % 89 + 2 for at in range(40)], KVCache(2, 64)

    def evaluate(row: Row) -> Row:
        runner.adapter.logits([row], cache)
        return row

    def difference(found: States, right: States) -> float:
        pairs = zip(found.of(1).values(), right.of(1).values(), strict=True)
        return max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)

    cache.commit(evaluate(Row.chain(1, 0, text[:4], 1)), range(4))
    others, before = cache.states.resized(2), cache.states.resized(2)
    before.copy(1, 1, cache.states)
    row = evaluate(Row(1, 4, [9, *text[4:7]], [-1, -1, 1, 2], [4, 4, 5, 6], 4))
    cache.states.advance([row], [[1, 2]], into=others)
    assert difference(cache.states, before) == 0.0 and difference(others, before) > 0.01
    cache.states.advance([row], [[1, 2]])
    assert difference(others, cache.states) == 0.0
    before.copy(1, 1, cache.states)
    cache.commit(evaluate(Row.chain(1, 6, text[6:9], 1)), range(3))
    others.copy(1, 1, cache.states)
    cache.states.copy(1, 1, before)
    cache.states.splits = False
    cache.states.advance([evaluate(Row.chain(1, 6, text[6:], 1))], [range(3)])
    assert difference(cache.states, others) < 1e-4
    assert (cache.states.kernels is not None) == (attention == "triton")


@pytest.mark.parametrize("name", ["lfm2", "jamba"])
def test_other_states_advance(name: str, few_heads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_that_others_advance(name, "sdpa")
    monkeypatch.setattr("lpr.model.recurrent.states.KERNEL_DEVICES", ("cuda", "cpu"))
    check_that_others_advance(name, "triton")


def launches_of_a_graph(num_recurrent: int, gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches in the graph of a step of 5 entries, by kernel; "all" counts torch's operators, too."""
    kinds = {"layer_types": ["linear_attention"] * num_recurrent + ["full_attention"]}
    monkeypatch.setitem(KINDS, "olmo_hybrid", {**KINDS["olmo_hybrid"], **kinds, "num_hidden_layers": 1 + num_recurrent})
    found: Counter[str] = Counter()
    add = Graph.add

    def counted(self: Graph, run: Any, args: Any, kwargs: Any, fresh: Any, reads: Any, writes: Any) -> None:
        found["all"] += bool(reads or writes)  # an allocation has neither
        add(self, run, args, kwargs, fresh, reads, writes)

    class Noted:
        def __init__(self, name: str, kernel: Any) -> None:
            self.name, self.launched = name, pretend_gpu.Launched(kernel)

        def __getitem__(self, grid: Any) -> Any:
            found[self.name] += gpu.capturing is not None
            return self.launched[grid]

    with monkeypatch.context() as patch:
        patch.setattr(Graph, "add", counted)
        for kernel in KERNELS:
            patch.setattr(scan_kernel, kernel, Noted(kernel, getattr(scan_kernel, kernel)))
        runner = TreeModel(to_gpu(hybrid("olmo_hybrid")), attention="triton")
        runner.allocate(1, 64, 8, without_a_check(runner))
        runner.evaluate([Row.chain(0, 3, [1] * 5, 5)], Selection.build([]), 0)
    assert gpu.num_captures == 1 and runner.graph_reason is None
    return +found
