"""Tree attention by bits: the reference against single paths, the GPU versions against the reference.

Without a GPU the Triton kernel runs in Triton's interpreter (conftest.py switches it on) and is compiled for GPUs all
the same; on a machine with one these tests run the compiled kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils

import lpr.model.attention.layer_rules
import lpr.model.tree_mask
from lpr import DecodeConfig, InputError, native
from lpr.core.tree import ancestor_bits
from lpr.model.attention.layer_rules import LayerRule, layer_rule
from lpr.model.input_builder import Row, build_inputs
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.model.tree_mask import TreeMask, ancestor_words, build_mask
from tests.fakes import attention_reference
from tests.fakes.models import tiny_model

# Triton's interpreter in NumPy 2, on every kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HAS_TRITON = find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs the package triton")
if HAS_TRITON:
    from lpr.model.kernels import attention_kernel
    from lpr.model.kernels.attention_kernel import Tiles


@dataclass
class Case:
    """Random K, V and queries for rows of random trees."""

    parents: list[list[int]]
    num_cached: list[int]
    mask: TreeMask
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_case(
    parents: list[list[int]],
    num_cached: list[int],
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    spare: int = 3,
    seed: int = 0,
) -> Case:
    """Rows padded on the left; K and V are views of a larger cache, and NaN behind each row's last entry."""
    generator = torch.Generator().manual_seed(seed)
    batch = len(parents)
    length = max(1, max(map(len, parents)) + padding)
    num_kv = max(map(sum, zip(num_cached, map(len, parents), strict=True))) + spare
    positions = torch.zeros(batch, length, dtype=torch.int64)
    for row, each in enumerate(parents):
        depths: list[int] = []
        for parent in each:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        positions[row, length - len(each) :] = torch.tensor(depths, dtype=torch.int64) + num_cached[row]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = normal(batch, length, heads[0], dims[0])
    caches = [normal(batch, num_kv + 7, heads[1], dim) for dim in dims]
    for row, each in enumerate(parents):
        for cache in caches:
            cache[row, num_cached[row] + len(each) :] = torch.nan
    mask = build_mask(parents, num_cached, positions.to(DEVICE), DEVICE)
    views = [each.to(DEVICE).transpose(1, 2) for each in (query, *(cache[:, :num_kv] for cache in caches))]
    return Case(parents, num_cached, mask, *views)


def random_parents(random: np.random.Generator, count: int) -> list[int]:
    return [int(random.integers(-1, node)) for node in range(count)]


def by_paths(case: Case, window: int | None, chunk: int | None, softcap: float | None, scale: float, sinks: Any) -> Any:
    """Each real entry's attention over its committed tokens and its path, one by one, in float64."""
    batch, num_heads, length, _ = case.query.shape
    group = num_heads // case.key.shape[1]
    out = torch.zeros(batch, num_heads, length, case.value.shape[3], dtype=torch.float64)
    for row, parents in enumerate(case.parents):
        cached = case.num_cached[row]
        for entry in range(len(parents)):
            path, node = [], entry
            while node >= 0:
                path.append(node)
                node = parents[node]
            held = [(token, token) for token in range(cached)]
            held += [(cached + node, cached + depth) for depth, node in enumerate(path[::-1])]
            mine = held[-1][1]
            if window is not None:
                held = [(at, position) for at, position in held if position > mine - window]
            if chunk is not None:
                held = [(at, position) for at, position in held if position // chunk == mine // chunk]
            rows = [at for at, _ in held]
            token = length - len(parents) + entry
            for head in range(num_heads):
                keys, values = (each[row, head // group, rows].double().cpu() for each in (case.key, case.value))
                scores = keys @ case.query[row, head, token].double().cpu() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double().cpu()[None]])
                out[row, head, token] = torch.softmax(scores, 0)[: len(rows)] @ values
    return out


def clean(case: Case) -> tuple[torch.Tensor, ...]:
    """The case for the reference, which multiplies what it does not see by 0."""
    return case.query, case.key.nan_to_num(), case.value.nan_to_num()


def check_against_reference(version: Callable[..., torch.Tensor], case: Case, **rules: Any) -> None:
    tiles = {"tiles": rules.pop("tiles")} if "tiles" in rules else {}
    expected = attention_reference.tree_attention(*clean(case), case.mask, **rules).float()
    actual = version(case.query, case.key, case.value, case.mask, **rules, **tiles).float()
    key, value, pages = attention_reference.in_pages(case.key, case.value, 16)
    by_table = version(case.query, key, value, case.mask, pages, **rules, **tiles).float()
    assert torch.equal(by_table, actual), "keys in pages give the same bits"
    check_joined(version, by_table, case.query, key, value, case.mask, pages, **rules, **tiles)
    tolerance = 1e-5 if case.query.dtype == torch.float32 else 1e-2
    assert actual.shape == expected.shape and bool(actual.isfinite().all())
    assert ((actual - expected).abs() <= tolerance * expected.abs().clamp(min=1)).all()


def check_joined(version: Callable[..., torch.Tensor], expected: torch.Tensor, *given: Any, **how: Any) -> None:
    """Programs that combine the splits themselves: twice, as in the layers of a step, and counts are 0 behind each."""
    *states, pages = given
    arrived = torch.zeros(1 << 10, dtype=torch.int32, device=DEVICE)
    found = [version(*states, pages._replace(arrived=arrived), **how).float() for _ in range(2)]
    assert torch.equal(*found) and not arrived.any()
    tolerance = 1e-5 if states[0].dtype == torch.float32 else 1e-2
    assert ((found[0] - expected).abs() <= tolerance * expected.abs().clamp(min=1)).all()


def packed(case: Case, padding: int) -> tuple[torch.Tensor, TreeMask, list[int]]:
    """Query and mask of the same sequences one after the other, in slots of another order, and where they were."""
    counts, (_, _, length, _) = [len(each) for each in case.parents], case.query.shape
    places = [row * length + length - count + i for row, count in enumerate(counts) for i in range(count)]
    width = padding + len(places)
    starts = [0, *(padding + sum(counts[: row + 1]) for row in range(len(counts)))]
    index = torch.tensor([0] * padding + places, device=DEVICE)

    def flat(states: torch.Tensor) -> torch.Tensor:
        return states.flatten(0, 1)[index][None]

    query = flat(case.query.transpose(1, 2)).transpose(1, 2)
    numbers = [torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (starts, range(len(counts))[::-1])]
    mask = case.mask
    bits = torch.nn.functional.pad(flat(mask.bits), (0, -(-width // 64) - mask.bits.shape[2]))
    return query, TreeMask(bits, mask.num_cached, mask.num_entries, flat(mask.positions), *numbers), places


def check_packed(
    version: Callable[..., torch.Tensor], case: Case, padding: int, tiles: Any = None, **rules: Any
) -> None:
    """Packed sequences have what they have in rows of their own, and padding has zeros."""
    expected = attention_reference.tree_attention(*clean(case), case.mask, **rules).float()
    key, value, pages = attention_reference.in_pages(case.key, case.value, 16)
    query, mask, places = packed(case, padding)
    pages = pages._replace(table=pages.table.flip(0).contiguous())
    for each in (version, attention_reference.tree_attention):
        more = {"tiles": tiles} if each is version else {}
        states = (key, value) if each is version else (key.nan_to_num(), value.nan_to_num())
        found = each(query, *states, mask, pages, **rules, **more).float().transpose(1, 2)[0]
        wanted = expected.transpose(1, 2).flatten(0, 1)[places]
        tolerance = 1e-5 if case.query.dtype == torch.float32 else 1e-2
        assert not found[:padding].any() and bool(found.isfinite().all())
        if each is version:
            by_table = found.transpose(0, 1)[None]
            check_joined(version, by_table, query, *states, mask, pages, **rules, **more)
        assert ((found[padding:] - wanted).abs() <= tolerance * wanted.abs().clamp(min=1)).all()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, dict[str, Any]]:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=2))
    heads = draw(st.sampled_from([(2, 2), (4, 1), (8, 1), (6, 2)]))
    dims = draw(st.sampled_from([(16, 16), (24, 24), (24, 16), (16, 40)]))
    rules: dict[str, Any] = {
        "window": draw(st.none() | st.integers(1, 30)),
        "chunk": draw(st.none() | st.integers(1, 30)),
        "softcap": draw(st.sampled_from([None, 0.7, 30.0])),
        "scale": draw(st.sampled_from([dims[0] ** -0.5, 1.0])),
        "sinks": draw(st.sampled_from([None, torch.linspace(-2, 2, heads[0], device=DEVICE)])),
    }
    parents = [random_parents(random, count) for count, _ in rows]
    case = make_case(
        parents, [cached for _, cached in rows], heads, dims, padding=draw(st.integers(0, 3)), seed=len(rows[0])
    )
    return case, rules


@settings(max_examples=20, deadline=None)
@given(cases())
def test_the_reference_is_attention_along_every_path(drawn: tuple[Case, dict[str, Any]]) -> None:
    case, rules = drawn
    actual = attention_reference.tree_attention(*clean(case), case.mask, **rules)
    assert torch.allclose(actual.double().cpu(), by_paths(case, **rules), atol=1e-5)


@needs_triton
@settings(max_examples=8, deadline=None)
@given(cases(), st.sampled_from([None, (16, 16, 1), (16, 16, 2), (64, 16, 4), (32, 32, 8), (64, 64, 1), (128, 64, 2)]))
def test_the_kernel_equals_the_reference(drawn: tuple[Case, dict[str, Any]], blocks: tuple[int, int, int]) -> None:
    case, rules = drawn
    tiles = None if blocks is None else Tiles(*blocks, num_warps=4, num_stages=1)
    check_against_reference(attention_kernel.tree_attention, case, tiles=tiles, **rules)
    if any(case.parents):
        check_packed(attention_kernel.tree_attention, case, len(case.parents[0]) % 5, tiles, **rules)


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 9},
    "softcap and sinks": {"softcap": 20.0, "sinks": torch.linspace(-2, 2, 2, device=DEVICE)},
}


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "rules", "num_splits"),
    [
        (torch.float32, "softcap and sinks", 1),
    ],
    ids=str,
)
def test_trees_of_several_words_in_a_ragged_batch(dtype: torch.dtype, rules: str, num_splits: int) -> None:
    random = np.random.default_rng(5)
    parents = [random_parents(random, 100), list(range(-1, 69)), []]
    case = make_case(parents, [130, 0, 40], heads=(2, 1), dims=(32, 16), dtype=dtype, padding=2)
    # Of 128 rows as `choose_tiles` has them: with 4 warps and 1 stage Triton 3.6 made wrong code for an H200.
    tiles = Tiles(128, 64, num_splits, num_warps=8, num_stages=1 if dtype == torch.float32 else 2)
    check_against_reference(attention_kernel.tree_attention, case, tiles=tiles, **RULES[rules])
    check_packed(attention_kernel.tree_attention, case, 23, tiles, **RULES[rules])


@needs_triton
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dimensions(dim: int) -> None:
    case = make_case([[-1, 0, 0, 1, 1, 4]], [70], heads=(2, 1), dims=(dim, dim))
    check_against_reference(attention_kernel.tree_attention, case)


@needs_triton
def test_lengths_are_read_where_the_kernel_runs() -> None:
    """The same tensors with other contents, as in the replay of a captured graph."""
    case = make_case([[-1, 0, 1, 0]], [60], spare=40)
    case.key.nan_to_num_(), case.value.nan_to_num_()
    other = make_case([[-1, -1]], [81], padding=2)
    for name in ("bits", "num_cached", "num_entries", "positions"):
        getattr(case.mask, name).copy_(getattr(other.mask, name))
    check_against_reference(attention_kernel.tree_attention, case, window=50)


@given(st.integers(1, 200), st.integers(0, 2), st.integers(0, 2**32))
def test_ancestor_words_are_the_ancestor_bits(count: int, spare_words: int, seed: int) -> None:
    parents = random_parents(np.random.default_rng(seed), count)
    for each in (parents, list(range(-1, count - 1)), [-1] * count):
        words = ancestor_words(each, -(-count // 64) + spare_words)
        assert [int.from_bytes(row.astype("<u8").tobytes(), "little") for row in words] == ancestor_bits(each)


def test_bits_say_what_the_dense_mask_says() -> None:
    rows = [
        Row(0, 5, [1] * 4, [-1, 0, 0, 2], [5, 6, 6, 7], 2),
        Row(1, 0, [1] * 70, list(range(-1, 69)), [*range(70)], 1),
    ]
    dense = build_inputs(rows, KVCache(3, 128), DEVICE, 8, 16).blocks[0]
    packed = build_inputs(rows, KVCache(3, 128), DEVICE, 8, 16, tree_bits=True).blocks[0]
    assert packed.visible is None and packed.tree_mask is not None and dense.visible is not None
    real = packed.tree_mask.real()
    assert real.sum(1).tolist() == [4, 70]
    assert torch.equal(packed.tree_mask.visible(dense.num_kv)[real], dense.visible[real])
    held = dense.visible.any(1)
    assert torch.equal(packed.tree_mask.kv_positions(dense.num_kv)[held], dense.kv_positions[held])


def test_rules_are_read_off_known_mask_functions_only() -> None:
    causal, both = masking_utils.causal_mask_function, masking_utils.and_masks
    none = torch.zeros(1, dtype=torch.int64)

    def sizes(function: Callable[..., Any]) -> tuple[int | None, int | None] | None:
        rule = layer_rule(function)
        return None if rule is None else (rule.window, rule.chunk)

    assert sizes(causal) == (None, None)
    assert sizes(masking_utils.sliding_window_causal_mask_function(7)) == (7, None)
    assert sizes(masking_utils.chunked_causal_mask_function(16, none)) == (None, 16)
    assert sizes(both(causal, masking_utils.sliding_window_causal_mask_function(5))) == (5, None)
    unknown = [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_overlay(7),
        masking_utils.or_masks(causal, masking_utils.sliding_window_overlay(7)),
        both(causal, masking_utils.padding_mask_function(torch.ones(1, 4, dtype=torch.bool))),
        both(causal, lambda batch, head, query, key: key % 2 == 0),
    ]
    assert [layer_rule(function) for function in unknown] == [None] * len(unknown)


FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"head_dim": 16, "sliding_window": 9},
}
DECODE = DecodeConfig(window_size=3, ngram_size=3, guess_set_size=3, trie_nodes=10)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [(3 * i) % 89 for i in range(20)]]


@needs_triton
def test_an_unknown_rule_takes_the_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lpr.model.attention.layer_rules, "layer_rule", lambda function: None)
    runner = TreeModel(tiny_model("mistral", sliding_window=9), attention="triton")
    self_check(runner)
    assert runner.attention == "triton"


def reversed_bits(patch: pytest.MonkeyPatch) -> None:
    def mutant(parents: list[int], num_words: int) -> np.ndarray:
        words = ancestor_words(parents, num_words)
        return np.packbits(np.unpackbits(words.view(np.uint8), axis=1), axis=1, bitorder="little").view(np.uint64)

    patch.setattr(lpr.model.tree_mask, "ancestor_words", mutant)


def off_by_one(change: int) -> Callable[[pytest.MonkeyPatch], None]:
    def apply(patch: pytest.MonkeyPatch) -> None:
        def mutant(parents: Any, num_cached: list[int], *rest: Any) -> TreeMask:
            mask = build_mask(parents, num_cached, *rest)
            return replace(mask, num_cached=(mask.num_cached + change).clamp(min=0))

        patch.setattr(lpr.model.input_builder, "build_mask", mutant)

    return apply


def no_window(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lpr.model.attention.layer_rules, "layer_rule", lambda function: LayerRule())


def wider_window(patch: pytest.MonkeyPatch) -> None:
    def mutant(function: Callable[..., Any]) -> LayerRule:
        rule = layer_rule(function)
        assert rule is not None and rule.window is not None
        return replace(rule, window=rule.window + 1)

    patch.setattr(lpr.model.attention.layer_rules, "layer_rule", mutant)


def siblings_visible(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lpr.model.tree_mask, "ancestor_words", lambda parents, num_words: ancestor_words(
        list(range(-1, len(parents) - 1)), num_words))  # fmt: skip


MUTANTS = {
    "bit order": reversed_bits,
    "num_cached + 1": off_by_one(1),
    "num_cached - 1": off_by_one(-1),
    "no window": no_window,
    "wider window": wider_window,
    "siblings visible": siblings_visible,
}


SMALL = {"sliding_window": 9, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
"""The interpreter runs a program for each head."""


@needs_triton
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.slow(first=3)
def test_the_self_check_notices(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = TreeModel(tiny_model("mistral", **SMALL).to(DEVICE), attention="triton")
    MUTANTS[mutant](monkeypatch)
    with pytest.raises(InputError, match="its logits differ"):
        self_check(runner)


@needs_triton
def test_a_kernel_that_lpr_chose_is_replaced_where_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    runner = TreeModel(tiny_model("llama", head_dim=512, hidden_size=64).to(DEVICE), attention="triton")
    runner.adapter.may_fall_back = True  # as "auto" on a GPU
    with caplog.at_level(logging.WARNING):
        self_check(runner)
    assert runner.attention == "sdpa"
    assert "using 'sdpa': attention='triton' takes heads of at most 256 dimensions, not 512" in caplog.text


@needs_triton
def test_choices_that_cannot_work_are_refused_in_one_line() -> None:
    assert TreeModel(tiny_model()).attention == ("sdpa" if native.PagedAttention is None else "native")
    with pytest.raises(InputError, match="attention='fast' is none of auto, sdpa, triton, native"):
        TreeModel(tiny_model(), attention="fast")
    own_code = tiny_model("xglm", num_layers=2, ffn_dim=96, attention_heads=4)
    with pytest.raises(InputError, match="'xglm' has its own attention code"):
        TreeModel(own_code, attention="triton")
    with pytest.raises(InputError, match="heads of at most 256 dimensions, not 512"):
        self_check(TreeModel(tiny_model("llama", head_dim=512).to(DEVICE), attention="triton"))
    with pytest.raises(InputError, match=r"float32, bfloat16 and float16, not torch\.float64"):
        self_check(TreeModel(tiny_model().double().to(DEVICE), attention="triton"))
