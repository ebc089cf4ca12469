"""Attention in C++ over pages (native/paged_attention.h) against the reference, and the bits of its exact form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from lpr import DecodeConfig, Engine, InputError, SamplingParams, native
from lpr.model.attention import in_order
from lpr.model.attention.layer_rules import LayerRule
from lpr.model.attention.native import attend_pages
from lpr.model.input_builder import Row
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from lpr.model.threads import has_team, team_size
from tests.fakes.models import tiny_model

pytestmark = pytest.mark.skipif(native.PagedAttention is None, reason="no extension")
LENGTHS = ((0, 1), (5, 1), (70, 40), (16, 3), (600, 9), (0, 130), (1100, 20))
"""Committed tokens and entries of the rows of a step."""


@dataclass
class Step:
    """Random trees, of which each second one is a chain, and the K, V and queries of one layer."""

    parents: list[list[int]]
    num_cached: list[int]
    positions: list[list[int]]
    pages: list[np.ndarray]
    page_size: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    def rows(self, index: int) -> np.ndarray:
        """The cache rows of a sequence, in order."""
        places = np.arange(self.num_cached[index] + len(self.parents[index]))
        return self.pages[index][places // self.page_size] * self.page_size + places % self.page_size


def make_step(
    heads: tuple[int, int] = (6, 2),
    dims: tuple[int, int] = (32, 32),
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
) -> Step:
    random, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    parents = [
        [int(random.integers(-1, node)) if index % 2 else node - 1 for node in range(count)]
        for index, (_, count) in enumerate(lengths)
    ]
    positions = []
    for (cached, _), each in zip(lengths, parents, strict=True):
        found: list[int] = []
        for parent in each:
            found.append(found[parent] + 1 if parent >= 0 else cached)
        positions.append(found)
    needed = [-(-(cached + count) // page_size) for cached, count in lengths]
    order = random.permutation(sum(needed) + 3)
    pages = np.split(order[: sum(needed)], np.cumsum(needed)[:-1])
    num_rows, total = len(order) * page_size + 1, sum(count for _, count in lengths)
    query = torch.randn(1, total, heads[0], dims[0], generator=generator).to(dtype).transpose(1, 2)
    step = Step(parents, [cached for cached, _ in lengths], positions, pages, page_size, query, query, query)
    sides = [torch.full((num_rows, heads[1], dim), torch.nan, dtype=dtype) for dim in dims]
    for index, (cached, count) in enumerate(lengths):
        for side, dim in zip(sides, dims, strict=True):
            values = torch.randn(cached + count, heads[1], dim, generator=generator)
            side[torch.from_numpy(step.rows(index))] = values.to(dtype)
    return replace(step, key=sides[0].transpose(0, 1), value=sides[1].transpose(0, 1))


def attended(step: Step, num_threads: int = 1, padded: bool = False, **rules: Any) -> torch.Tensor:
    """[N, Hq, Dv] by the extension: all rows one after the other, or each in a row of its own, padded on the left."""
    assert native.PagedAttention is not None
    counts = [len(each) for each in step.parents]
    tables = np.full((len(counts), max(map(len, step.pages))), 10**6, np.int32)
    for table, pages in zip(tables, step.pages, strict=True):
        table[: len(pages)] = pages
    entries = [
        np.array([parents, parents, positions], np.int32)
        for parents, positions in zip(step.parents, step.positions, strict=True)
    ]
    starts = np.cumsum([0, *counts])
    longest = max(counts) + 2
    places = [(index, longest - count) if padded else (0, int(starts[index])) for index, count in enumerate(counts)]
    query = step.query
    if padded:
        query = torch.full((len(counts), longest, *query.shape[1::2]), torch.nan, dtype=query.dtype)
        for index, count in enumerate(counts):
            query[index, longest - count :] = step.query[0, :, starts[index] : starts[index + 1]].transpose(0, 1)
        query = query.transpose(1, 2)
    parts = tables, step.page_size, list(range(len(counts))), step.num_cached, entries, places, num_threads
    rule = LayerRule(rules.pop("window", None), rules.pop("chunk", None))
    found = attend_pages(native.PagedAttention(*parts), query, step.key, step.value, rule, **rules)
    if not padded:
        return found[0]
    assert all(not found[index, : longest - count].any() for index, count in enumerate(counts)), "padding gives 0"
    return torch.cat([found[index, longest - count :] for index, count in enumerate(counts)])


def expected(
    step: Step,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same entry by entry in float64, each over its own path."""
    num_heads, dim = step.query.shape[1], step.query.shape[3]
    group, found, at = num_heads // len(step.key), [], 0
    for index, parents in enumerate(step.parents):
        rows, cached = step.rows(index), step.num_cached[index]
        for entry in range(len(parents)):
            path: list[int] = []
            node = entry
            while node >= 0:
                path.insert(0, cached + node)
                node = parents[node]
            seen = np.array([*range(cached), *path])
            place, mine = np.arange(len(seen)), len(seen) - 1
            keep = np.ones(len(seen), bool)
            keep &= place > mine - window if window else True
            keep &= place // chunk == mine // chunk if chunk else True
            those = torch.from_numpy(rows[seen[keep]])
            keys, values = (each[:, those].double().repeat_interleave(group, 0) for each in (step.key, step.value))
            scores = (keys @ step.query[0, :, at, :, None].double())[..., 0] * (dim**-0.5 if scale is None else scale)
            scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None]], 1)
            weights = torch.softmax(scores, 1)[:, None, : len(those)]
            found.append((weights @ values)[:, 0])
            at += 1
    return torch.stack(found)


def difference(step: Step, found: torch.Tensor, **rules: Any) -> float:
    return float((found.double() - expected(step, **rules)).abs().max())


RULES: dict[str, dict[str, Any]] = {
    "none": {},
    "window": {"window": 37},
    "window of 1": {"window": 1},
    "long window": {"window": 700},
    "chunk": {"chunk": 64},
    "window and chunk": {"window": 50, "chunk": 48},
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0, 9.0, -30.0])},
    "all": {"window": 90, "softcap": 5.0, "sinks": torch.tensor([1.0, -1.0, 2.0, 0.0, 4.0, -3.0]), "scale": 0.3},
}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.slow(first=6)
def test_rules(name: str, exact: bool) -> None:
    step = make_step()
    assert difference(step, attended(step, exact=exact, **RULES[name]), **RULES[name]) < 1e-5


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    "heads, dims",
    [((4, 4), (16, 16)), ((9, 3), (64, 64)), ((5, 1), (128, 128)), ((20, 1), (20, 36)), ((4, 2), (256, 7))],
)
def test_heads_and_dimensions(heads: tuple[int, int], dims: tuple[int, int], exact: bool) -> None:
    step = make_step(heads, dims, lengths=((0, 3), (150, 30), (530, 1)))
    assert difference(step, attended(step, exact=exact)) < 1e-5


def check_half(step: Step, found: torch.Tensor, error: float = 1e-5, **rules: Any) -> None:
    """Sums are in float32, with an `error`, and rounded once."""
    assert found.dtype == torch.bfloat16
    wanted = expected(step, **rules)
    assert bool(((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + error).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.slow(first=24)
def test_few_lanes(name: str, count: int, dtype: torch.dtype) -> None:
    """Up to eleven heads of entries of a group, which short registers compute in another way; trees of 600 tokens."""
    heads, rules = (count, 1) if count > 3 else (3 * count, 3), RULES[name]
    if "sinks" in rules:
        rules = {**rules, "sinks": rules["sinks"].repeat(2)[: heads[0]]}
    lengths = tuple((cached, number) for cached in (0, 31, 33, 600) for number in (1, 2, 3))
    step = make_step(heads, (64, 48), lengths=lengths, dtype=dtype)
    found = attended(step, **rules)
    if dtype is torch.bfloat16:
        check_half(step, found, **rules)
    else:
        assert difference(step, found, **rules) < 1e-5


@pytest.mark.parametrize("heads", [(2, 2), (6, 2)])
@pytest.mark.slow(first=1)
def test_a_chain_sees_its_past_and_no_more(heads: tuple[int, int]) -> None:
    """Wherever a block of 64 keys ends between the entries of a vector of lanes; AMX takes whole blocks of bfloat16."""
    step = make_step(heads, dtype=torch.bfloat16, lengths=tuple((cached, 70) for cached in range(30, 94)))
    chains = [list(range(-1, 69))] * 64
    positions = [list(range(cached, cached + 70)) for cached in range(30, 94)]
    step = replace(step, parents=chains, positions=positions)
    check_half(step, attended(step))


def by_amx(step: Step) -> bool:
    """True if the matrix unit of a core computes this step, where there is one."""
    fits = step.key.shape[2] % 32 == step.value.shape[2] % 16 == step.page_size % 16 == 0
    has_unit = native.can_use_amx is not None and native.can_use_amx()
    return fits and step.key.dtype is torch.bfloat16 and has_unit


@pytest.mark.parametrize("page_size", [8, 16])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dims", [(64, 64), (24, 40), (32, 16), (128, 112)])
@pytest.mark.slow(first=5)
def test_half_precision(dims: tuple[int, int], exact: bool, page_size: int) -> None:
    step = make_step(dims=dims, dtype=torch.bfloat16, page_size=page_size)
    check_half(step, attended(step, exact=exact))


@pytest.mark.parametrize("heads", [(6, 2), (16, 1), (3, 3)])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.slow(first=8)
def test_rules_in_half_precision(name: str, heads: tuple[int, int]) -> None:
    rules = RULES[name]
    if "sinks" in rules:
        rules = {**rules, "sinks": rules["sinks"].repeat(3)[: heads[0]]}
    step = make_step(heads, dtype=torch.bfloat16)
    check_half(step, attended(step, **rules), **rules)


@pytest.mark.parametrize("exact", [False, True])
def test_scores_that_are_far_apart(exact: bool) -> None:
    """All but a few weights are below the least that the exponential of the matrix unit's path makes.

    Of scores of some hundreds float32 has four digits behind the point.
    """
    step = make_step(dims=(64, 64), dtype=torch.bfloat16)
    check_half(step, attended(step, exact=exact, scale=10.0), error=1e-4, scale=10.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entry", [0, 41, 100])
def test_nan_stays_with_its_entry(entry: int, dtype: torch.dtype) -> None:
    step = make_step(dims=(64, 64), dtype=dtype)
    sound = attended(step)
    query = step.query.clone()
    query[0, :, entry] = torch.nan
    found = attended(replace(step, query=query))
    assert bool(found[entry].isnan().all())
    found[entry] = sound[entry]
    assert torch.equal(found, sound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_bits_know_nothing_of_pages_threads_and_padding(exact: bool, dtype: torch.dtype) -> None:
    step = make_step(dtype=dtype)
    bits = attended(step, exact=exact, window=300)
    others = [make_step(dtype=dtype, page_size=size) for size in (1, 3, 64)]
    assert all(torch.equal(other.query, step.query) for other in others)
    found = {by_amx(other) and not exact: attended(other, exact=exact, window=300) for other in others[::2]}
    found.setdefault(by_amx(step) and not exact, bits)
    for other in (step, *others):
        same = attended(other, exact=exact, window=300)
        assert torch.equal(same, found[by_amx(other) and not exact]), other.page_size
    has_team()
    for each in (attended(step, 3, exact=exact, window=300), attended(step, padded=True, exact=exact, window=300)):
        assert torch.equal(each, bits)
    alone = replace(step, parents=step.parents[:1], num_cached=step.num_cached[:1], positions=step.positions[:1],
                    pages=step.pages[:1], query=step.query[:, :, :1])  # fmt: skip
    assert torch.equal(attended(alone, exact=exact, window=300), bits[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dims", [(32, 32), (20, 36)])
def test_exact_bits_are_those_of_gathered_rows(dims: tuple[int, int], dtype: torch.dtype) -> None:
    step = make_step(dims=dims, dtype=dtype)
    found, at = attended(step, exact=True, softcap=4.0), 0
    for index, parents in enumerate(step.parents):
        rows, cached, count = torch.from_numpy(step.rows(index)), step.num_cached[index], len(parents)
        mask = torch.full((count, cached + count), -1.0)
        mask[:, :cached] = 0
        for entry, parent in enumerate(parents):
            if parent >= 0:
                mask[entry, cached:] = mask[parent, cached:]
            mask[entry, cached + entry] = 0
        states = step.query[:, :, at : at + count], step.key[None][:, :, rows], step.value[None][:, :, rows]
        gathered = in_order.attend(*states, [in_order.find_paths(mask)], dims[0] ** -0.5, 4.0)
        assert torch.equal(gathered[0].transpose(0, 1), found[at : at + count])
        at += count


def a_sibling(step: Step, rules: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    parents = [list(each) for each in step.parents]
    parents[3][2] = 1 if parents[3][2] != 1 else 0
    return replace(step, parents=parents), rules


def a_page_too_far(step: Step, rules: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    pages = list(step.pages)
    pages[4] = np.roll(pages[4], 1)
    return replace(step, pages=pages), rules


def a_token_less(step: Step, rules: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    return replace(step, num_cached=[max(0, each - 1) for each in step.num_cached]), rules


def a_window_off_by_one(step: Step, rules: dict[str, Any]) -> tuple[Step, dict[str, Any]]:
    return step, {**rules, "window": rules["window"] + 1}


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("mutant", [a_sibling, a_page_too_far, a_token_less, a_window_off_by_one])
def test_mutants_are_noticed(mutant: Callable[..., tuple[Step, dict[str, Any]]], exact: bool) -> None:
    step, rules = make_step(), {"window": 37} if mutant is a_window_off_by_one else {}
    changed, other = mutant(step, rules)
    found = torch.nan_to_num(attended(changed, exact=exact, **other), nan=1e3)
    assert difference(step, found, **rules) > 1e-3


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 7, "head_dim": 24, "query_pre_attn_scalar": 24},
    "qwen3": {"head_dim": 40},
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_models(family: str) -> None:
    """Steps of unequal rows, without padding, against "sdpa" with its masks."""
    model = tiny_model(family, **FAMILIES[family])
    logits = []
    for choice in ("native", "sdpa"):
        runner = TreeModel(model, choice)
        cache, pages = KVCache(3, 160, 40, 16), np.random.default_rng(1).permutation(40)
        for slot in range(3):
            cache.assign(slot, [int(page) for page in pages[slot * 10 : slot * 10 + 10]])
        tokens = np.random.default_rng(2).integers(0, 97, 200).tolist()
        runner.adapter.logits([Row.chain(slot, 0, tokens[: 30 * slot + 5], 1) for slot in range(3)], cache, packed=True)
        trees = [
            Row(
                slot,
                30 * slot + 5,
                tokens[:5],
                [-1, 0, 0, 1, 2],
                [30 * slot + 5 + depth for depth in (0, 1, 1, 2, 2)],
                4,
            )
            for slot in range(3)
        ]
        logits.append(runner.adapter.logits(trees, cache, packed=True))
    assert logits[0].shape == (12, logits[1].shape[1])
    assert torch.allclose(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def test_the_same_ids_as_with_sdpa() -> None:
    model, prompts = tiny_model(), [[5, 9, 3, 7], [8, 2] * 20, [1]]
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    decode = DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=3)
    found = []
    for choice in ("native", "sdpa"):
        engine = Engine.from_model(model, decode=decode, attention=choice)
        assert engine.model.attention == choice
        found.append([each.token_ids for each in engine.generate(prompts, params)])
    assert found[0] == found[1]


def test_auto_takes_it_where_it_can() -> None:
    for model, choice in (
        (tiny_model(), "native"),
        (tiny_model().bfloat16(), "native"),
        (tiny_model().double(), "sdpa"),
        (tiny_model("xglm", num_layers=2, ffn_dim=96, attention_heads=4), "sdpa"),
        (tiny_model("deepseek_v3", num_hidden_layers=1, first_k_dense_replace=1), "sdpa"),  # keys are computed
    ):
        runner = TreeModel(model)
        self_check(runner)
        assert runner.attention == choice


def test_what_it_cannot_do_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="attention='native' cannot be used: it works in float32 and bfloat16, not"):
        TreeModel(tiny_model().double(), "native")
    with pytest.raises(InputError, match="own attention code, which attention='native' does not reach"):
        TreeModel(tiny_model("xglm", num_layers=2, ffn_dim=96, attention_heads=4), "native")
    monkeypatch.setattr(native, "PagedAttention", None)
    with pytest.raises(InputError, match="attention='native' cannot be used: it needs the extension"):
        TreeModel(tiny_model(), "native")
    assert TreeModel(tiny_model()).attention == "sdpa"


def test_bad_arguments_are_refused() -> None:
    assert native.PagedAttention is not None
    entries, tables = np.array([[1, 2], [-1, 0], [0, 1]], np.int32), np.zeros((1, 2), np.int32)
    for changed, message in (
        ({"slots": [1]}, "no table of this slot"),
        ({"num_cached": [31]}, "longer than its table"),
        ({"places": []}, "of each sequence"),
        ({"entries": [entries[:, ::-1].copy()]}, "a parent stands before"),
    ):
        given = {"slots": [0], "num_cached": [0], "entries": [entries], "places": [(0, 0)], **changed}
        with pytest.raises(ValueError, match=message):
            native.PagedAttention(tables, 16, num_threads=1, **given)


def test_loops_run_in_the_team_of_torch() -> None:
    assert native.share_of_workers is not None
    assert team_size() == (torch.get_num_threads() if has_team() else 1)
    assert sum(native.share_of_workers(1000, 3)) == 1000
    assert native.share_of_workers(5, 1) == [5]
