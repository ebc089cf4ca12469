"""Captured steps against direct ones, on a CPU with a capturer that replays recorded operators (fake_graphs)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lpr.model.step_inputs
from lpr import DecodeConfig, Engine, SamplingParams
from lpr.dist.comm import Comm
from lpr.model.graph_capture import Capturer, NoWaiting, Program, uncapturable
from lpr.model.graph_inputs import KV_BUCKETS, NODE_BUCKETS, StaticShape, static_shape
from lpr.model.graphs import GraphForward
from lpr.model.input_builder import Row, build_inputs
from lpr.model.kv_cache import KVCache
from lpr.model.runner import TreeModel
from lpr.model.sampling.selection import Selection
from tests.fakes.fake_graphs import FakeCapturer
from tests.fakes.models import tiny_model
from tests.fakes.worlds import generate_on

PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [2, 4], [50] * 20 + [3, 4], [7, 8, 9] * 5, [(i * i) % 97 for i in range(90)]]
GREEDY = [SamplingParams(max_new_tokens=30)] * len(PROMPTS)
MIXED = [
    SamplingParams(max_new_tokens=30, temperature=0.8 * (i % 2), top_p=(1.0, 0.9)[i // 2 % 2], seed=i)
    for i in range(len(PROMPTS))
]
DECODE = DecodeConfig(window_size=5, trie_nodes=24, max_batch_size=3)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model(spread=0.12)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> dict[str, list[list[int]]]:
    engine = Engine.from_model(model, decode=DecodeConfig.autoregressive())
    return {name: ids(engine, params) for name, params in (("greedy", GREEDY), ("mixed", MIXED))}


def ids(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    return [each.token_ids for each in engine.generate(PROMPTS, params)]


def captured(engine: Engine, decode: DecodeConfig = DECODE, capturer: Any = None) -> FakeCapturer:
    """Let `engine` decode by graphs from now on."""
    capturer = capturer or FakeCapturer()
    adapter = engine.model.adapter
    engine.model.capturer, adapter.packed, adapter.kv_bucket = capturer, False, 256  # as on a GPU
    engine.configure(decode)
    return capturer


@pytest.mark.parametrize("batch", [3])
def test_the_same_text_as_without_graphs(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], batch: int
) -> None:
    engine = Engine.from_model(model, decode=DECODE)
    capturer = captured(engine, DecodeConfig(window_size=5, trie_nodes=24, max_batch_size=batch))
    assert ids(engine, GREEDY) == expected["greedy"]
    assert ids(engine, MIXED) == expected["mixed"]
    assert engine.model.graph_reason is None
    assert capturer.num_replays > 20


def test_no_two_entries_of_a_captured_step_are_written_to_one_row(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for padding: a GPU writes them in any order, and the check of the cached length finds other logits."""
    update, written = KVCache.update, []

    def watched(cache: KVCache, *parts: Any, **others: Any) -> Any:
        step = lpr.model.step_inputs.current_step()
        assert step is not None
        written.append([row for row in step.write_rows.tolist() if row < cache.num_rows - 1])
        return update(cache, *parts, **others)

    engine = Engine.from_model(model, decode=DECODE)
    monkeypatch.setattr(KVCache, "update", watched)
    captured(engine)
    assert max(map(len, written)) > 16
    assert all(len(rows) == len(set(rows)) for rows in written)


@pytest.mark.parametrize("num_ranks", [2])
def test_the_same_text_on_several_ranks(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], num_ranks: int
) -> None:
    capturers = []

    def prepare(engine: Engine) -> None:
        capturers.append(captured(engine))

    for completions in generate_on(num_ranks, model, DECODE, PROMPTS, MIXED, prepare):
        assert [each.token_ids for each in completions] == expected["mixed"]
    assert len(capturers) == num_ranks and all(each.num_replays > 10 for each in capturers)


FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"sliding_window": 9, "head_dim": 16}),
    ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ("mistral", {"sliding_window": 7}),
    ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
]


def test_static_inputs_say_what_direct_inputs_say() -> None:
    generator = torch.Generator().manual_seed(3)
    rows = []
    for slot, (cached, count) in enumerate([(40, 70), (0, 5), (300, 1)]):
        parents = [-1] + [int(torch.randint(0, i, (), generator=generator)) for i in range(1, count)]
        depths = [0] * count
        for node in range(1, count):
            depths[node] = depths[parents[node]] + 1
        tokens = torch.randint(0, 97, (count,), generator=generator).tolist()
        rows.append(Row(slot, cached, tokens, parents, [cached + depth for depth in depths], min(count, 4)))
    params = [SamplingParams(temperature=0.7, top_k=4, top_p=0.8, seed=2**40 + 1), SamplingParams(), SamplingParams()]
    results = [row.positions[-row.num_results :].tolist() for row in rows]
    selection = Selection.build(list(zip(params, results, strict=True)))
    shape = static_shape(rows, selection, 2, num_slots=8, rows_per_slot=640, max_entries=128)
    assert shape is not None and (shape.batch, shape.num_entries, shape.num_kv, shape.num_keys) == (4, 96, 512, 64)
    words = torch.empty(shape.num_words, dtype=torch.int32)
    cache = KVCache(8, 640)
    shape.place(words.numpy(), rows, selection, cache)
    inputs, chosen_by = shape.read(words, cache)
    direct = build_inputs(rows, cache, torch.device("cpu"), node_bucket=96, kv_bucket=512)
    assert torch.equal(inputs.tokens[:3], direct.tokens) and torch.equal(inputs.positions[:3], direct.positions)
    assert torch.equal(inputs.write_rows.view(4, 96)[:3], direct.write_rows.view(3, 96))
    assert inputs.write_rows.view(4, 96)[3].tolist() == [8 * 640] * 96, "an empty row writes to the spare row"
    static, plain = inputs.blocks[0], direct.blocks[0]
    assert torch.equal(static.visible[:3], plain.visible)
    assert torch.equal(static.kv_positions[:3][plain.visible.any(1)], plain.kv_positions[plain.visible.any(1)])
    start = 0
    for index, row in enumerate(rows):
        place = index * 96 + 96 - row.num_results
        for name in ("temperature", "top_k", "top_p", "min_p"):
            given, placed = getattr(selection, name), getattr(chosen_by, name)
            assert torch.equal(given[start : start + row.num_results], placed[place : place + row.num_results])
        keys = chosen_by.keys[chosen_by.key_of[place : place + row.num_results]]
        assert torch.equal(keys, selection.keys[selection.key_of[start : start + row.num_results]])
        start += row.num_results
    assert int((chosen_by.temperature > 0).sum()) == rows[0].num_results, "all other entries are greedy"


def test_shapes_are_few_and_hold_their_steps() -> None:
    nothing = Selection.build([])

    def shape(num_cached: int, count: int, batch: int = 1, max_entries: int = 512) -> StaticShape | None:
        rows = [Row(slot, num_cached, [0] * count, list(range(-1, count - 1)), [0] * count, 1) for slot in range(batch)]
        return static_shape(rows, nothing, 8, num_slots=6, rows_per_slot=5000, max_entries=max_entries)

    def sizes(*args: int) -> tuple[int, int, int]:
        found = shape(*args)
        assert found is not None
        return found.batch, found.num_entries, found.num_kv

    assert sizes(10, 1) == (1, 1, 256)
    assert sizes(255, 1) == (1, 1, 256)
    assert sizes(255, 2) == (1, 8, 512)
    assert sizes(700, 65, 3) == (4, 96, 768)
    assert sizes(704, 65, 5) == (6, 96, 1024), "no more rows than slots"
    assert sizes(4900, 64) == (1, 64, 5000), "no longer than a slot"
    assert shape(0, 129, max_entries=128) is None
    assert len({sizes(cached, count) for cached in range(4400) for count in (1, 60, 500)}) <= 3 * 9
    assert list(NODE_BUCKETS) == sorted(NODE_BUCKETS) and list(KV_BUCKETS) == sorted(KV_BUCKETS)
    apart = [Row(slot, 0, [1], [-1], [0], 1) for slot in (2, 0)]
    assert static_shape(apart, nothing, 8, 6, 5000, 512) is None, "not neighbours in order"


@pytest.mark.slow
def test_no_more_graphs_than_allowed(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lpr.model.graphs.MAX_GRAPHS", 2)
    engine = Engine.from_model(model, decode=DECODE)
    capturer = captured(engine)
    graphs, sizes = engine.model.graphs, []
    assert graphs is not None
    evaluate = graphs.evaluate

    def counted(*args: Any) -> Any:
        result = evaluate(*args)
        sizes.append(len(graphs))
        return result

    monkeypatch.setattr(graphs, "evaluate", counted)
    assert ids(engine, MIXED) == expected["mixed"]
    assert max(sizes) == 2 and capturer.num_captures > 4, "graphs were captured again after others took their place"


def test_graphs_captured_at_load_are_those_of_greedy_decoding(model: PreTrainedModel) -> None:
    engine = Engine.from_model(model, decode=DECODE)
    decode = DecodeConfig(window_size=5, trie_nodes=24, max_batch_size=1)
    capturer = captured(engine, decode)
    graphs = engine.model.graphs
    assert graphs is not None
    at_load = capturer.num_captures
    assert at_load == len(graphs.common_shapes(decode.num_candidates)) == len(graphs) > 4
    first = engine.generate(PROMPTS[:2], GREEDY[:2])
    assert capturer.num_captures <= at_load + 1, "only the step with the prompt may be larger than a tree"
    num_captures = capturer.num_captures
    engine.configure(DecodeConfig.autoregressive(max_batch_size=1, num_candidates=1))
    assert engine.model.graphs is graphs, "a cache of the same size is kept with its graphs"
    engine.generate(PROMPTS[:1], GREEDY[:1])
    assert capturer.num_captures <= num_captures + 2, "a step without candidates, at two cached lengths at most"
    engine.model.capturer = None
    engine.configure(decode)
    again = engine.generate(PROMPTS[:2], GREEDY[:2])
    assert [each.token_ids for each in again] == [each.token_ids for each in first], "captures leave nothing behind"


# What cannot be captured.


class Refusing(Capturer):
    """A capturer that fails as CUDA does."""

    def capture(self, program: Program) -> Program:
        program()
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nsecond line")


class Waiting(torch.nn.Module):
    """A layer whose host waits for the device."""

    def __init__(self, inner: torch.nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.kind == "item":
            hidden = hidden * float(hidden.abs().max() < 1e30)
        else:
            hidden = hidden + hidden.nonzero().sum() * 0
        return self.inner(hidden)


@pytest.mark.parametrize("kind, name", [("item", "_local_scalar_dense"), ("nonzero", "nonzero")])
def test_a_forward_that_waits_is_named_and_evaluated_directly(kind: str, name: str) -> None:
    model = tiny_model(spread=0.12)
    plain = ids(Engine.from_model(model, decode=DECODE), GREEDY)
    model.model.layers[1].mlp = Waiting(model.model.layers[1].mlp, kind)
    engine = Engine.from_model(model, decode=DECODE)
    capturer = captured(engine)
    assert ids(engine, GREEDY) == plain
    assert engine.model.graph_reason is not None and name in engine.model.graph_reason
    assert capturer.num_captures == 0


def test_a_failed_capture_is_named_and_tried_once(model: PreTrainedModel, expected: dict[str, list[list[int]]]) -> None:
    engine = Engine.from_model(model, decode=DECODE)
    captured(engine, capturer=Refusing())
    assert ids(engine, MIXED) == expected["mixed"]
    assert engine.model.graph_reason == "CUDA error: operation not permitted when stream is capturing"
    assert engine.model.num_captures == 1


def test_a_forward_that_computes_with_the_cached_length_is_noticed(model: PreTrainedModel) -> None:
    """The host's number would be frozen in the graph; on a replay it is another step's."""
    fresh = tiny_model(spread=0.12)
    engine = Engine.from_model(fresh, decode=DECODE)
    embed = fresh.model.embed_tokens
    inner = embed.forward

    def shifted(tokens: torch.Tensor) -> torch.Tensor:
        step = lpr.model.step_inputs.current_step()
        return inner(tokens) * (1 + 0.001 * (step.length if step is not None else 0))

    embed.forward = shifted
    engine.replica.watch.note()
    captured(engine)
    engine.generate(PROMPTS[:1], GREEDY[:1])
    assert engine.model.graph_reason is not None and "cached length" in engine.model.graph_reason


@pytest.mark.parametrize(
    "family, sizes, word",
    [
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("mixtral", {"num_local_experts": 4, "experts_implementation": "eager"}, "experts"),
        ("mamba", {}, "positions"),
    ],
)
def test_models_that_cannot_be_captured_are_named_by_their_configuration(
    family: str, sizes: dict[str, Any], word: str
) -> None:
    model = tiny_model(family, **sizes)
    runner = TreeModel(model)
    reason = uncapturable(model, runner.adapter.accepts_positions)
    assert reason is not None and word in reason and "\n" not in reason


def test_nothing_is_held_against_ordinary_models(model: PreTrainedModel) -> None:
    assert uncapturable(model, True) is None
    assert TreeModel(model).graphs is None, "a CPU captures nothing"


# Seeded faults: what a replay must read anew, and what it must do.


@pytest.mark.parametrize("part", ["tokens", "bits", "num_cached", "write_rows", "selection"])
@pytest.mark.slow(first=3)
def test_a_part_that_is_not_refreshed_changes_the_text(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, before = StaticShape.place, {}

    def stale(self: StaticShape, words: np.ndarray, *args: Any) -> None:
        place(self, words, *args)
        start = 0
        for name, size in self.sizes.items():
            if name == part:
                here = slice(start, start + int(np.prod(size)))
                words[here] = before.setdefault(self, words[here].copy())
            start += int(np.prod(size))

    monkeypatch.setattr(StaticShape, "place", stale)
    engine = Engine.from_model(model, decode=DECODE)
    captured(engine)
    assert ids(engine, MIXED) != expected["mixed"]


@pytest.mark.parametrize("operator", ["index_copy_", "max", "gather", "_to_copy"])
@pytest.mark.slow(first=2)
def test_an_operator_that_is_not_replayed_changes_the_text(
    model: PreTrainedModel, expected: dict[str, list[list[int]]], operator: str
) -> None:
    engine = Engine.from_model(model, decode=DECODE)
    captured(engine, capturer=FakeCapturer(drop=operator))
    assert ids(engine, MIXED) != expected["mixed"]


# One synchronisation per step.


class BlindComm(Comm):
    """A world that reads no payload on the device: what comes back is made up."""

    size: int = 1

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.num_gathers = 0

    def gather(self, payload: torch.Tensor) -> torch.Tensor:
        if payload.device.type == "cpu":
            return payload.expand(self.size, -1)
        self.num_gathers += 1
        return torch.zeros(self.size, len(payload), dtype=torch.int32)


class Watch(NoWaiting):
    """Raises at an operator that waits, and at a copy between host and device that does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        if name == "aten::_to_copy" and str(kwargs.get("device", "")) == "meta" and args[0].device.type == "cpu":
            assert kwargs.get("non_blocking"), "a copy to the device that the host waits for"
            return func(*args, **kwargs)
        if name == "aten::copy_" and args[0].is_meta and args[1].device.type == "cpu":
            assert args[2], "a copy to the device that the host waits for"
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


def to_meta(engine: Engine) -> None:
    """Move model and cache to a device without data: whoever reads from it fails."""
    engine.model.model.to("meta")
    engine.model.device = engine.model.adapter.device = torch.device("meta")
    engine.model.cache = None
    layers = engine.replica.like.layer_tensors
    layers.update({layer: (pair[0].to("meta"), pair[1].to("meta")) for layer, pair in layers.items()})
    engine.replica.watch.note()


@pytest.mark.parametrize("num_ranks, graphs", [(1, True), (2, False)])
def test_a_step_waits_for_the_device_once(num_ranks: int, graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    comm = BlindComm(num_ranks)
    # Every rank drafts every tree, as results that are made up hold none.
    decode = DecodeConfig(window_size=5, trie_nodes=16, max_batch_size=3, max_length=256, home_ranks=0)
    engine = Engine.from_model(
        tiny_model(num_hidden_layers=1), decode=decode, comm=comm, attention="sdpa", swap_space=0
    )
    to_meta(engine)
    moved = []
    move = KVCache.move

    def counted(self: KVCache, rows: np.ndarray) -> None:
        moved.extend(rows[0])
        move(self, rows)

    monkeypatch.setattr(KVCache, "move", counted)
    monkeypatch.setattr(GraphForward, "_check_length", lambda *args: None)  # reads logits, once at the first capture
    capturer = captured(engine, decode) if graphs else None
    engine.configure(decode)
    for params in (GREEDY[:3], MIXED[:3]):
        requests = [engine.submit(prompt, each) for prompt, each in zip(PROMPTS[:3], params, strict=True)]
        comm.num_gathers = num_steps = 0
        with Watch():
            while any(request.finish_reason is None for request in requests):
                engine.step()
                num_steps += 1
        assert comm.num_gathers == num_steps > 1
    assert moved or num_ranks > 1, "accepted paths were moved into place"
    if capturer is not None:
        assert engine.model.graph_reason is None and capturer.num_replays >= 4


@pytest.mark.parametrize("fault", ["item", "blocking", "unique"])
def test_the_watch_notices(fault: str) -> None:
    there = torch.zeros(3, device="meta")
    with Watch(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        if fault == "item":
            there.sum().item()
        elif fault == "blocking":
            torch.zeros(3).to("meta")
        else:
            torch.unique(torch.zeros(3))
