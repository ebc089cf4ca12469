"""Exact mode: the same bits for every shape of a step, in every dtype."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

import lpr.model.adapter
import lpr.model.self_check
from lpr import DecodeConfig, Engine, InputError, SamplingParams, native
from lpr.dist.comm import Comm
from lpr.engine.exchange import DesyncError
from lpr.model.attention import in_order
from lpr.model.attention import native as native_attention
from lpr.model.exact import check, functions
from lpr.model.input_builder import Row
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.self_check import self_check
from tests.fakes.compared import SHAPES, Group, Worlds
from tests.fakes.models import tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, generate_on, run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"sliding_window": 9, "head_dim": 16},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 1},
}
TEXT = [(7 * i * i + 3 * i) % 97 for i in range(150)]


NATIVE = pytest.param("native", marks=pytest.mark.skipif(native.attend_in_order is None, reason="no extension"))


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention as it is without the extension."""
    monkeypatch.setattr(native, "attend_in_order", None)
    monkeypatch.setattr(native, "PagedAttention", None)


@pytest.fixture(params=[NATIVE])
def attention(request: pytest.FixtureRequest) -> str:
    """The ways to attend; tests/slow has torch's too."""
    if request.param == "torch":
        request.getfixturevalue("by_torch")
    return str(request.param)


def checked(model: PreTrainedModel) -> TreeModel:
    runner = TreeModel(model, exact=True)
    self_check(runner)
    return runner


def chain(start: int, tokens: list[int], num_results: int | None = None) -> Row:
    count = len(tokens)
    results = count if num_results is None else num_results
    return Row(0, start, tokens, list(range(-1, count - 1)), list(range(start, start + count)), results)


def in_pieces(runner: TreeModel, text: list[int], sizes: list[int], kv_bucket: int = 32) -> torch.Tensor:
    """The logits [n, V] of a text that is evaluated in pieces."""
    cache, at, found = KVCache(1, 512), 0, []
    for size in sizes:
        row = chain(at, text[at : at + size])
        found.append(runner.adapter.logits([row], cache, 1, kv_bucket))
        cache.commit(row, range(size))
        at += size
    return torch.cat(found)


def check_trees(runner: TreeModel, num_checked: int = 6) -> None:
    """Nodes of random trees, the last one too, below texts that end before, at and after the border of a block."""
    for start in (62, 64, 140):
        generator = random.Random(start)
        parents = [-1, 0] + [generator.randrange(0, node) for node in range(2, 40)]
        tokens = [generator.randrange(97) for _ in parents]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        cache, prompt = KVCache(1, 512), chain(0, TEXT[:start], 1)
        runner.adapter.logits([prompt], cache)
        cache.commit(prompt, range(start))
        row = Row(0, start, tokens, parents, [start + depth for depth in depths], 40)
        logits = runner.adapter.logits([row], cache)
        for node in (39, *generator.sample(range(39), num_checked - 1)):
            path, at = [], node
            while at >= 0:
                path.insert(0, at)
                at = parents[at]
            text = TEXT[:start] + [tokens[each] for each in path]
            assert torch.equal(in_pieces(runner, text, [start] + [1] * len(path))[-1], logits[node])


def check_pieces(runner: TreeModel) -> None:
    single = in_pieces(runner, TEXT, [1] * 70)
    for sizes in ([70], [60, 3, 7], [40, *[2] * 15], [64, 6]):
        assert torch.equal(in_pieces(runner, TEXT, sizes), single)
    assert torch.equal(in_pieces(runner, TEXT, [70], kv_bucket=512), single), "padding adds nothing"


CASES = [("llama", torch.bfloat16)]
"""By both ways to attend; tests/slow has the rest."""


@pytest.mark.parametrize("family, dtype", CASES, ids=str)
def test_every_shape_of_a_step_gives_the_same_bits(family: str, dtype: torch.dtype, attention: str) -> None:
    runner = checked(tiny_model(family, **FAMILIES[family]).to(dtype))
    check_pieces(runner)
    check_trees(runner, 2)


def test_attention_is_the_usual_one(attention: str) -> None:
    model = tiny_model("gemma2", **FAMILIES["gemma2"])
    usual, same = TreeModel(model), checked(model)
    assert torch.allclose(in_pieces(usual, TEXT, [100, 50]), in_pieces(same, TEXT, [100, 50]), atol=1e-4)


def test_rows_of_a_batch_do_not_change_each_other(attention: str) -> None:
    runner = checked(tiny_model().to(torch.bfloat16))
    alone = in_pieces(runner, TEXT[:40], [30, 10])[30:]
    for packed in (False, True):
        cache = KVCache(3, 512)
        for slot, count in ((0, 30), (1, 70), (2, 5)):
            first = chain(0, TEXT[:count], 1)
            first.slot = slot
            runner.adapter.logits([first], cache)
        rows = [chain(30, TEXT[30:40]), chain(70, TEXT[70:73]), Row(2, 5, [1, 2, 3], [-1, 0, 0], [5, 6, 6], 3)]
        rows[1].slot = 1
        logits = runner.adapter.logits(rows, cache, packed=packed)
        assert torch.equal(logits[:10], alone)


# The whole engine.

PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [2, 4], [50] * 20 + [3, 4], [7, 8, 9] * 5, [(i * i) % 97 for i in range(90)]]
PARAMS = [SamplingParams(max_new_tokens=24, temperature=0.9 * (i % 3 > 0), seed=i) for i in range(len(PROMPTS))]
DECODES = {
    "window": DecodeConfig(window_size=5, trie_nodes=0, max_batch_size=1),
    "trie": DecodeConfig(window_size=0, trie_nodes=24, max_batch_size=1),
    "both in a batch": DecodeConfig(window_size=4, trie_nodes=16, max_batch_size=4, prefill_chunk=32),
}
PLAIN = DecodeConfig.autoregressive(max_batch_size=1)


@pytest.fixture(scope="module")
def half_model() -> PreTrainedModel:
    return tiny_model(spread=0.12).to(torch.bfloat16)


@pytest.fixture(scope="module")
def half_ids(half_model: PreTrainedModel) -> list[list[int]]:
    """By plain decoding in exact mode."""
    plain = Engine.from_model(half_model, decode=PLAIN, exact=True)
    assert plain.model.exact
    return [each.token_ids for each in plain.generate(PROMPTS, PARAMS)]


SHARED_BY = [("window", 2), ("trie", 1), ("both in a batch", 4)]


@pytest.mark.parametrize("decode, num_ranks", SHARED_BY)
@pytest.mark.slow(first=1)
def test_the_same_ids_in_bfloat16(
    decode: str, num_ranks: int, half_model: PreTrainedModel, half_ids: list[list[int]]
) -> None:
    for completions in generate_on(num_ranks, half_model, DECODES[decode], PROMPTS, PARAMS, exact=True):
        assert [each.token_ids for each in completions] == half_ids


def test_without_it_bits_differ(half_model: PreTrainedModel) -> None:
    """What exact mode is for: if this ever fails, the tests above prove nothing."""
    runner = TreeModel(half_model, attention="sdpa", exact=False)  # sums in C++ differ on some processors only
    for fails in (check_pieces, check_trees):
        with pytest.raises(AssertionError):
            fails(runner)


def half_group(exact: bool = True) -> Group:
    """Without exact mode by SDPA, whose sums change with a step; those in C++ do not, in so small a model."""
    params = [replace(each, max_new_tokens=16) for each in PARAMS[2:5]]
    model = tiny_model(spread=0.12).to(torch.bfloat16)
    alone = None if exact else Engine.from_model(model, decode=PLAIN, attention="sdpa")
    return Group(Worlds(model, "bfloat16", exact, alone), PROMPTS[2:5], params)


@pytest.mark.parametrize("exact_mode", [True, False])
@pytest.mark.slow(first=1)
def test_ids_and_logits_of_the_evidence(exact_mode: bool) -> None:
    """What benchmarks.exactness runs for hours: batches, fills, prefixes, restarts and ranks, in a small way."""
    group = half_group(exact_mode)
    names = [name for name in SHAPES if "4 ranks" not in name] if exact_mode else ["both, batch of 4, fills of 32"]
    found = group.run(names)
    for name, counts in found.items():
        assert counts["logits_compared"] >= 3 * 8, name
        assert (counts["outputs_that_differ"], counts["logits_that_differ"] > 0) == (0, not exact_mode), name


def test_a_rank_that_adds_in_another_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_new_tokens=8)]
    model = tiny_model(spread=0.12)
    group = Group(Worlds(model, "float32", exact=True), [TEXT], params)
    group.decode_plainly()
    texts = [TEXT + group.outputs[0]]
    find, attend_pages, step = in_order.find_paths, native_attention.attend_pages, threading.local()

    def pages_by_rank(*given: Any) -> torch.Tensor:
        return attend_pages(*given) * (1 + 2**-23 * (getattr(step, "rank", 0) == 1))

    def by_rank(mask: torch.Tensor) -> in_order.Paths:
        paths = find(mask)
        if getattr(step, "rank", 0) != 1:
            return paths
        ends = zip(paths.starts[:-1], paths.starts[1:], strict=True)
        return in_order.Paths(np.concatenate([paths.rows[start:end][::-1] for start, end in ends]), paths.starts)

    def program(comm: ThreadComm) -> Any:
        step.rank = comm.rank
        engine = Engine.from_model(model, decode=SHAPES["window"].decode, comm=comm, exact=True)
        return group.watched(engine, SHAPES["window"], texts)

    monkeypatch.setattr(in_order, "find_paths", by_rank)
    monkeypatch.setattr(native_attention, "attend_pages", pages_by_rank)
    monkeypatch.setattr(lpr.model.self_check, "_inexact_step", lambda adapter: None)
    found = run_ranks(ThreadWorld(2), program)
    known = [digests[key] == group.digests[key] for _, digests, _ in found for key in digests if key in group.digests]
    assert not all(known)


@pytest.mark.parametrize("turned", [False, True])
def test_results_in_another_order_of_ranks_are_noticed(
    turned: bool, half_model: PreTrainedModel, half_ids: list[list[int]]
) -> None:
    """Results count as the owner's: taken from another rank, the text is not that of plain decoding."""
    decode = replace(DECODES["both in a batch"], home_ranks=0)

    def spoil(engine: Engine) -> None:
        gather = engine.comm.gather
        engine.comm.gather = lambda payload: gather(payload).flip(0) if turned else gather(payload)  # type: ignore[method-assign]

    if turned:
        with pytest.raises((AssertionError, DesyncError, IndexError)):
            found = generate_on(2, half_model, decode, PROMPTS, PARAMS, spoil, exact=True)
            assert any([each.token_ids for each in completions] == half_ids for completions in found)
        return
    found = generate_on(2, half_model, decode, PROMPTS, PARAMS, spoil, exact=True)
    assert all([each.token_ids for each in completions] == half_ids for completions in found)


@pytest.mark.parametrize(
    "part, message",
    [("kind", "another kind of processor or version of torch"), ("kernels", "another result of matrix products")],
)
def test_ranks_of_unlike_machines_are_refused(part: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text would be right on each of them and differ between them, as one continues what another has begun."""
    rank, model = threading.local(), tiny_model()
    capability, linear = torch.backends.cpu.get_cpu_capability, check._linear_alone

    def another(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear(rows, weight, bias) + (1e-6 if rank.number and part == "kernels" else 0.0)

    monkeypatch.setattr(check, "_linear_alone", another)
    name = "get_cpu_capability"
    monkeypatch.setattr(torch.backends.cpu, name, lambda: capability() + "?" * (rank.number and part == "kind"))

    def program(comm: ThreadComm) -> str:
        rank.number = comm.rank
        with pytest.raises(InputError) as refused:
            Engine.from_model(model, decode=PLAIN, comm=cast("Comm", comm), exact=True)
        Engine.from_model(model, decode=PLAIN, comm=cast("Comm", comm))  # without exact mode they may differ
        return str(refused.value)

    assert all(line.startswith(f"rank 1 has {message}") for line in run_ranks(ThreadWorld(2), program))


# What cannot be exact, and seeded faults.


@pytest.mark.parametrize(
    "family, sizes, reason",
    [
        ("xglm", {"num_layers": 2, "ffn_dim": 96, "attention_heads": 4}, "its own code"),
    ],
)
def test_what_cannot_be_exact_is_named(family: str, sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=f"'{family}' cannot be exact: .*{reason}"):
        self_check(TreeModel(tiny_model(family, **sizes), exact=True))


def test_quantised_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    model.hf_quantizer = object()
    with pytest.raises(InputError, match="cannot be exact: its quantised matrix products"):
        self_check(TreeModel(model, exact=True))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_several_threads(dtype: torch.dtype, two_threads: None, attention: str) -> None:
    try:
        runner = checked(tiny_model("llama").to(dtype))
    except (
        InputError
    ) as refused:  # a processor whose bfloat16 products with two threads agree at no two numbers of rows
        assert "rounds otherwise for other numbers of rows" in str(refused)
        return
    assert runner.adapter.gemm_rows is not None and runner.adapter.gemm_rows.num_threads == 2
    check_pieces(runner)
    check_trees(runner, 2)


def test_a_number_of_threads_that_nobody_asked_the_machine_about() -> None:
    runner, before = checked(tiny_model()), torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        with pytest.raises(RuntimeError, match=rf"checked with {before} threads and torch has {before + 1} now"):
            runner.adapter.inputs([chain(0, [1])], KVCache(1, 64))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_asked_from_which_height_on_they_agree(dtype: torch.dtype) -> None:
    """The answer is checked with other rows than those it was found with, of a product whose errors nothing hides."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False)).to(dtype)
    gemm_rows = check.find_gemm_rows(model)
    assert isinstance(gemm_rows, check.GemmRows)
    rows, weight, _ = check.cancelling(64, 48, 120, dtype)
    whole = F.linear(rows[: min(120, gemm_rows.most)], weight)
    assert whole.abs().max() > 0, "errors show"
    for num_rows in range(gemm_rows.fewest, min(40, len(whole))):
        for first in range(0, len(whole) - num_rows, num_rows):
            assert torch.equal(F.linear(rows[first : first + num_rows], weight), whole[first : first + num_rows])


def test_a_product_that_changes_with_its_height_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(rows, weight) * (1 + 1e-3 * len(rows))

    monkeypatch.setattr(check, "_linear_alone", changing)
    with pytest.raises(InputError, match=r"q_proj \(64, 64\) in float32 rounds otherwise"):
        self_check(TreeModel(tiny_model(), exact=True))


def by_gemm_rows(monkeypatch: pytest.MonkeyPatch, *changes: int) -> list[int]:
    """Let products of weights round otherwise from each of `changes` rows on; returns those met from now on."""
    multiply, met = F.linear, []

    def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        count = states.shape[:-1].numel()
        met.append(count)
        return multiply(states, weight, bias) * (1 + sum(2.0**-6 for change in changes if count >= change))

    monkeypatch.setattr(F, "linear", linear)
    return met


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_steps_are_cut_where_a_library_takes_another_kernel(
    dtype: torch.dtype, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As AMX does in bfloat16 behind 32 rows; a step of many more is several products in it."""
    met = by_gemm_rows(monkeypatch, 33, 129)
    runner = checked(tiny_model("llama").to(dtype))
    assert runner.adapter.gemm_rows is not None and runner.adapter.gemm_rows.most == 32
    met.clear()
    check_pieces(runner)
    check_trees(runner, 2)
    assert max(met) == 32 and min(met) >= runner.adapter.gemm_rows.fewest
    monkeypatch.setattr(check.PinnedProducts, "match", lambda *_: iter(()))
    with pytest.raises(InputError, match="cannot be exact: its logits are other bits in a step of many tokens"):
        checked(tiny_model("llama").to(dtype))


def test_the_head_multiplies_no_more_rows_than_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, met, multiply = checked(tiny_model()), [], F.linear
    head = runner.model.get_output_embeddings().weight

    def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        met.extend([states.shape[:-1].numel()] if weight is head else [])
        return multiply(states, weight, bias)

    monkeypatch.setattr(F, "linear", linear)
    assert len(in_pieces(runner, TEXT, [150])) == 150
    assert len(met) > 1 and max(met) <= check.MOST_LOGITS


@pytest.mark.parametrize("multiply", [
    lambda states: torch.einsum("btd,de->bte", states, states[0, :1].T * states[0, :1]),
    lambda states: states @ states[0].T @ states[0],
], ids=["einsum", "matmul"])  # fmt: skip
def test_what_multiplies_by_code_of_its_own_is_refused(multiply: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = tiny_model()
    model.model.layers[0].mlp.forward = multiply
    with pytest.raises(InputError, match="cannot be exact: (einsum in )?its own code (multiplies|adds)"):
        self_check(TreeModel(model, exact=True))


@pytest.mark.parametrize("name", sorted({each.__name__ for each in functions.ELEMENTWISE}))
@pytest.mark.slow(first=4)
def test_functions_round_alike_wherever_a_value_lies(
    name: str, two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tails behind whole vectors, in the parts of threads, and in values that lie apart."""
    torch.set_num_threads(3)
    of_values = getattr(F, name, None) or getattr(torch, name)
    for dtype in DTYPES:
        values = (torch.randn(2 * 64 * 1537, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
        values = values.abs() if name in ("rsqrt", "log1p") else values
        with functions.FixedFunctions(set()), monkeypatch.context() as patch:
            patch.setattr(functions, "current_step", object)
            whole = of_values(values)
            pieces = torch.cat([of_values(each) for each in values[:7000].split(7)])
            apart = of_values(values[:7000].view(70, 100).T).T.flatten()
        assert torch.equal(pieces, whole[:7000]) and torch.equal(apart, whole[:7000])
        torch.testing.assert_close(whole, of_values(values))


def test_a_model_whose_layers_depend_on_the_height_is_refused() -> None:
    model = tiny_model()
    inner = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda hidden: inner(hidden) * (1 + 1e-6 * hidden.shape[1])
    with pytest.raises(InputError, match="cannot be exact: its logits are other bits in a step of many tokens"):
        self_check(TreeModel(model, exact=True))


def gemm_rows_that_vary(patch: pytest.MonkeyPatch, runner: TreeModel) -> None:
    assert runner.adapter.gemm_rows is not None
    runner.adapter.gemm_rows = replace(runner.adapter.gemm_rows, fewest=1)


def paths_from_their_ends(patch: pytest.MonkeyPatch, runner: TreeModel) -> None:
    """The last entry of a step adds from its own position back to the first."""
    runner.adapter.set_attention("sdpa")  # in C++ the order is not given from here
    find = in_order.find_paths

    def mutant(mask: torch.Tensor) -> in_order.Paths:
        paths = find(mask)
        last = paths.starts[-2]
        return in_order.Paths(np.concatenate([paths.rows[:last], paths.rows[last:][::-1]]), paths.starts)

    patch.setattr(in_order, "find_paths", mutant)


def a_sibling_is_seen(patch: pytest.MonkeyPatch, runner: TreeModel) -> None:
    """The last entry of a step sees the row in front of its own, whose entry may be of another branch."""
    find, read = in_order.find_paths, KVCache.read_pages

    def mutant_of_pages(cache: KVCache, rows: Sequence[Row], *rest: Any) -> Any:
        changed = [row.entries.copy() for row in rows]
        for each in changed:
            each[1, -1] = each.shape[1] - 2
        rows = [Row.of(row.slot, row.num_cached, each, 1) for row, each in zip(rows, changed, strict=True)]
        return read(cache, rows, *rest)

    def mutant(mask: torch.Tensor) -> in_order.Paths:
        seen = mask.clone()
        seen[-1, int((mask[-1] == 0).nonzero()[-1]) - 1] = 0
        return find(seen)

    patch.setattr(in_order, "find_paths", mutant)
    patch.setattr(KVCache, "read_pages", mutant_of_pages)


def steps_of_another_rounding(patch: pytest.MonkeyPatch, runner: TreeModel) -> None:
    """A step of several entries rounds otherwise than plain decoding, by one unit of the last place."""
    attend, attend_pages = in_order.attend, native_attention.attend_pages

    def mutant(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = attend(query, *rest)
        return out if query.shape[2] < 16 else out * (1 + 2**-23)

    def mutant_of_pages(pages: Any, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        out = attend_pages(pages, query, *rest)
        return out if query.shape[2] < 16 else out * (1 + 2**-23)

    patch.setattr(in_order, "attend", mutant)
    patch.setattr(native_attention, "attend_pages", mutant_of_pages)


@pytest.mark.parametrize(
    "fault", [gemm_rows_that_vary, paths_from_their_ends, a_sibling_is_seen, steps_of_another_rounding]
)
def test_faults_are_noticed(
    fault: Callable[[pytest.MonkeyPatch, TreeModel], None], monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    runner = checked(tiny_model("qwen3", **FAMILIES["qwen3"], num_attention_heads=2))
    fault(monkeypatch, runner)
    with pytest.raises(AssertionError):
        check_pieces(runner)
        check_trees(runner)
