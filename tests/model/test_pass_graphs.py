"""Passes of a low-bit copy as graphs, on the pretend GPU: what passes find that are launched directly, at one wait."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from lpr import DecodeConfig, Engine, SamplingParams
from lpr.model import pass_graphs, reserve
from lpr.model.graph_capture import CudaCapturer
from lpr.model.graphs import CAPTURED, FAILED, MAX_GRAPHS, GraphForward
from lpr.model.heads.guesses import likeliest
from lpr.model.low_bit.copy import make_copy
from lpr.model.low_bit.products import FORMS, CodedRows, Form, LowBitPack, Rounded
from lpr.model.pass_graphs import MOST_ENTRIES, PassGraphs, PassShape, common_shapes
from lpr.model.rewrite.base import Setting, Stage
from lpr.model.rewrite.table import rewrite
from lpr.model.sampling.choice import pick
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row
from tests.engine.test_self_draft import copied, fix, ids
from tests.fakes.models import left_of_an_engine, plain_ids, tiny_model
from tests.fakes.pretend_gpu import OnGpu, PretendGpu, guard, held, quick_start, short_steps, to_gpu
from tests.fakes.pretend_gpu import gpu as small_gpu
from tests.fakes.pretend_graphs import Graph
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

__all__ = ["guard", "quick_start", "short_steps", "small_gpu"]

PROMPTS = [[(7 * i + 3 * j * j + j) % 97 for j in range(6 + 20 * (i % 2))] for i in range(3)]
MIXED = [SamplingParams(max_new_tokens=14 + i, temperature=0.8 * (i % 2), seed=i) for i in range(3)]
SIZES: dict[str, Any] = {"window_size": 0, "trie_nodes": 16, "max_batch_size": 2, "prefill_chunk": 64}
DECODE = DecodeConfig(**SIZES, max_length=96, kv_tokens=512)


@cache
def model_of(num_layers: int = 1) -> Any:
    return tiny_model(seed=3, spread=0.12, num_hidden_layers=num_layers)


@cache
def expected(*params: SamplingParams) -> list[list[int]]:
    return plain_ids(model_of(), PROMPTS[: len(params)], params)


@pytest.fixture
def gpu(small_gpu: PretendGpu) -> PretendGpu:
    """With room for the graphs of passes; ids of plain decoding are known before, as a CPU has its own checks."""
    small_gpu.memory = 4 << 30, 6 << 30
    return small_gpu


def drafting(decode: DecodeConfig = DECODE, form: str = "int8", num_layers: int = 1, **more: Any) -> Engine:
    model = to_gpu(copy.deepcopy(model_of(num_layers)))
    engine = Engine.from_model(model, decode=decode, swap_space=0, self_draft=form, **more)
    fix(engine)
    assert engine.model.graphs is not None and engine.model.graph_reason is None
    return engine


class Compared:
    """Each pass of an engine beside the same one launched directly, and what the host did for it."""

    def __init__(self, gpu: PretendGpu, patch: pytest.MonkeyPatch) -> None:
        self.pairs: list[tuple[Any, Any]] = []
        self.shapes: Counter[tuple[int, int]] = Counter()
        self.num_replays = 0
        choices = PassGraphs.choices

        def both(graphs: PassGraphs, model: Any, rows: Sequence[Row], asked: Any) -> Any:
            forward, replays, before = graphs._forward, gpu.num_replays, len(gpu.events)
            captures, changed = forward.num_captures, bool(forward.cache._changed)
            found = choices(graphs, model, rows, asked)
            assert found is not None
            if captures == forward.num_captures:
                assert gpu.num_replays == replays + 1 and graphs.lost == 0.0
                kinds = Counter(kind for kind, _ in gpu.events[before:] if kind != "unpinned")
                assert kinds == {"pinned": 1 + changed, "read": 1}, "one upload, one download"
            else:
                assert graphs.lost > 0.0
            self.num_replays += gpu.num_replays - replays
            self.shapes[len(rows), sum(row.num_entries for row in rows)] += 1
            adapter = forward.adapter
            logits = adapter.forward(adapter.step_inputs(rows, forward.cache), forward.cache, model=model)
            selection = Selection.build(asked, logits.device)
            tokens, odds = likeliest(logits, selection)
            self.pairs.append((found, (pick(logits, selection).tolist(), tokens.tolist(), odds.tolist())))
            return found

        patch.setattr(PassGraphs, "choices", both)

    @property
    def are_equal(self) -> bool:
        return all(
            mine[0] == direct[0]
            and np.allclose(mine[2], direct[2], atol=1e-4)
            and [each[0] for each in mine[1]] == [each[0] for each in direct[1]]
            for mine, direct in self.pairs
        )


Fault = Callable[[pytest.MonkeyPatch], None]


def words_of_the_capture(patch: pytest.MonkeyPatch) -> None:
    """The graph reads words that nobody writes any more."""
    graph, held = GraphForward._graph, list[torch.Tensor]()

    def mutant(self: GraphForward, shape: Any, program: Any = None) -> Any:
        if isinstance(shape, PassShape):
            held.append(program.args[-1].clone())
            program = partial(program.func, *program.args[:-1], held[-1])
        return graph(self, shape, program)

    patch.setattr(GraphForward, "_graph", mutant)


def _old_words(patch: pytest.MonkeyPatch, part: Callable[[Any], slice]) -> None:
    run, known = GraphForward.run_program, dict[Any, Any]()

    def mutant(self: GraphForward, shape: Any, program: Any, words: Any, states: Any) -> Any:
        if isinstance(shape, PassShape):
            last, known[shape] = known.get(shape, words), words
            words = words.copy()
            words[part(shape)] = last[part(shape)]
        return run(self, shape, program, words, states)

    patch.setattr(GraphForward, "run_program", mutant)


def tokens_of_the_pass_before(patch: pytest.MonkeyPatch) -> None:
    _old_words(patch, lambda shape: slice(begin := prod(shape.sizes["bits"]), begin + shape.num_entries))


def noise_of_the_pass_before(patch: pytest.MonkeyPatch) -> None:
    _old_words(patch, lambda shape: slice(shape.num_words - shape.num_keys, shape.num_words))


@pytest.mark.parametrize("fault", [None, words_of_the_capture, tokens_of_the_pass_before, noise_of_the_pass_before])
@pytest.mark.usefixtures("quick_start", "short_steps")
@pytest.mark.slow(first=1)
def test_a_pass_is_one_replay_and_finds_what_a_direct_one_does(
    fault: Fault | None, gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedily and sampled, of one sequence and of two. Drafts that are wrong change no token."""
    wanted = expected(*MIXED)
    if fault is not None:
        fault(monkeypatch)
    engine = drafting()
    compared = Compared(gpu, monkeypatch)
    gpu.events.clear()
    done = engine.generate(PROMPTS, MIXED)
    assert ids(done) == wanted
    assert compared.num_replays == len(compared.pairs) > 12 and {1, 2} <= {rows for rows, _ in compared.shapes}
    assert compared.are_equal == (fault is None)
    assert engine.model.graph_reason is None and gpu.count("wait") == gpu.count("pageable") == 0
    if fault is None:
        assert copied(done)[1] > 12


@pytest.mark.usefixtures("quick_start", "short_steps")
@pytest.mark.slow
def test_launches_of_a_layer(gpu: PretendGpu) -> None:
    """As many as of the model's: four products, two norms, the rotation, attention and the gate."""
    launches = []
    for num_layers in (2, 3):
        engine = drafting(num_layers=num_layers)
        engine.generate(PROMPTS[:1], MIXED[1])
        graphs = engine.model.graphs
        assert graphs is not None
        kept: Any = next(kept for shape, kept in graphs._graphs.items() if isinstance(shape, PassShape))
        [graph] = [cell.cell_contents for cell in kept.replay.__closure__ if isinstance(cell.cell_contents, Graph)]
        names = [getattr(run, "__qualname__", str(run)).partition(".")[0] for run, *_ in graph.steps]
        launches.append(Counter(name for name in names if name != "PretendGpu"))  # which makes room
    layer = launches[1] - launches[0]
    assert layer == {"multiply_codes": 4, "rms_norm": 2, "place": 1, "_launch": 1, "gate": 1}


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.usefixtures("quick_start", "short_steps")
@pytest.mark.slow(first=1)
def test_results_of_a_step_outlive_the_passes(fault: bool, gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks gather them after the copy's replays, which write to the memory that all graphs share."""
    wanted = expected(*MIXED[:1])
    if fault:
        monkeypatch.setattr(GraphForward, "_kept", lambda self, name, values: values)
    done = ids(drafting().generate(PROMPTS[:1], MIXED[:1]))
    assert (done == wanted) == (not fault)


MANY = [[(seed * i + seed) % 97 for i in range(8 + seed)] for seed in range(3, 10)]


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.usefixtures("quick_start", "short_steps")
@pytest.mark.slow
def test_batches_that_come_and_go(form: Form, gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """While pages run out, requests end at other lengths, and texts repeat, which passes evaluate too."""
    params = [SamplingParams(max_new_tokens=8 + 5 * i, temperature=0.8 * (i % 2), seed=i) for i in range(len(MANY))]
    monkeypatch.setattr("lpr.core.passes.LEAST_TEXT", 0.0)
    wanted = plain_ids(model_of(2), MANY, params)
    engine = drafting(replace(DECODE, max_batch_size=4, kv_tokens=192), form, num_layers=2)
    compared = Compared(gpu, monkeypatch)
    for _ in range(2):
        assert ids(engine.generate(MANY, params)) == wanted
    assert compared.are_equal and len(compared.pairs) > 40
    assert {1, 2, 3} <= {rows for rows, _ in compared.shapes} and max(count for _, count in compared.shapes) > 4
    assert engine.scheduler.counts.preemptions > 0 and engine.model.graph_reason is None
    graphs = engine.model.graphs
    assert graphs is not None and engine.model.num_captures == len(graphs) < MAX_GRAPHS


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_processors_look_at_the_logits_of_a_replay(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [replace(each, repetition_penalty=1.3, no_repeat_ngram_size=3) for each in MIXED[:2]]
    wanted = expected(*params)
    engine = drafting()
    shapes, replays, logits = list[PassShape](), list[int](), PassGraphs.logits

    def counted(graphs: PassGraphs, model: Any, rows: Sequence[Row]) -> Any:
        before, found = gpu.num_replays, logits(graphs, model, rows)
        replays.append(gpu.num_replays - before)
        return found

    monkeypatch.setattr(PassGraphs, "logits", counted)
    done = engine.generate(PROMPTS[:2], params)
    assert ids(done) == wanted and copied(done)[1] > 8
    graphs = engine.model.graphs
    assert graphs is not None and set(replays) == {1} and len(replays) > 8
    shapes += [each for each in graphs._graphs if isinstance(each, PassShape)]
    assert shapes and all(each.only_logits for each in shapes)


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_a_copy_that_waits_is_launched_directly(
    gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And steps keep their graphs."""
    multiply, wanted = CodedRows.multiply, expected(*MIXED[:1])

    def waits(self: CodedRows, given: torch.Tensor, bias: Any) -> torch.Tensor:
        assert given.sum().item() != 1.0
        return multiply(self, given, bias)

    monkeypatch.setattr(CodedRows, "multiply", waits)
    engine = drafting()
    replays = gpu.num_replays
    done = engine.generate(PROMPTS[:1], MIXED[:1])
    assert ids(done) == wanted and copied(done)[1] > 4
    assert engine.model.graph_reason is None and gpu.num_replays > replays
    assert "passes of the copy are no CUDA graphs: its forward waits" in caplog.text
    graphs = engine.model.graphs
    assert graphs is not None and not any(isinstance(each, PassShape) for each in graphs._graphs)


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_a_pass_that_cannot_be_captured_takes_no_graph_from_steps(
    gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, wanted = pass_graphs._pass, expected(*MIXED[:1])

    def fails(*how: Any) -> torch.Tensor:
        if gpu.capturing is not None:
            raise RuntimeError("no such instruction")
        return inner(*how)

    monkeypatch.setattr(pass_graphs, "_pass", fails)
    engine = drafting()
    assert engine.model.self_drafter is not None and engine.model.self_drafter.graphs is None
    replays = gpu.num_replays
    done = engine.generate(PROMPTS[:1], MIXED[:1])
    assert ids(done) == wanted and copied(done)[1] > 4
    assert engine.model.graph_reason is None and gpu.num_replays > replays


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_a_pass_that_another_rank_cannot_capture_is_launched_directly(gpu: PretendGpu) -> None:
    """Of ranks that share weights: passes have collectives."""
    outcomes, wanted = list[int](), expected(*MIXED[:1])
    engine = drafting()
    graphs = engine.model.graphs
    assert graphs is not None
    graphs._worst = lambda outcome: outcomes.append(outcome) or FAILED
    done = engine.generate(PROMPTS[:1], MIXED[:1])
    assert ids(done) == wanted and copied(done)[1] > 4
    assert outcomes == [CAPTURED] and "another rank" in str(engine.model.graph_reason)
    assert any(isinstance(shape, PassShape) for shape in graphs._graphs)
    assert not any(kept for shape, kept in graphs._graphs.items() if isinstance(shape, PassShape))


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_times_at_the_start_are_those_of_replays(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture takes longer, at the start and while passes are counted. Its graphs are gone when steps have theirs."""
    capture, counted = CudaCapturer.capture, list[float]()

    def slow(self: CudaCapturer, program: Any) -> Any:
        time.sleep(0.5)
        return capture(self, program)

    monkeypatch.setattr(CudaCapturer, "capture", slow)
    engine = drafting()
    drafter = engine.model.self_drafter
    assert drafter is not None and drafter.first_ms.keys() == {1, 4} and max(drafter.first_ms.values()) < 450
    assert drafter.graphs is not None and engine.model.num_captures == 1 < gpu.num_captures
    count = drafter.passes.count_pass
    drafter.passes.count_pass = lambda size, ms: (counted.append(ms), count(size, ms))[0]  # type: ignore[method-assign]
    engine.generate(PROMPTS[:1], replace(MIXED[0], max_new_tokens=6))
    assert counted and max(counted) < 450 and engine.model.num_captures > 2


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_a_copy_that_is_made_anew_has_new_graphs(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old ones read weights that are gone."""
    engine = drafting()
    wanted = expected(*MIXED[:1])
    assert ids(engine.generate(PROMPTS[:1], MIXED[:1])) == wanted
    drafter, graphs = engine.model.self_drafter, engine.model.graphs
    assert drafter is not None and graphs is not None and any(isinstance(each, PassShape) for each in graphs._graphs)
    steps = {each for each in graphs._graphs if not isinstance(each, PassShape)}
    drafter.renew()
    assert graphs._graphs.keys() == steps
    assert ids(engine.generate(PROMPTS[:1], MIXED[:1])) == wanted


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_common_passes_are_captured_at_the_start(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_graphs, "MOST_PREPARED", 32)
    wanted = expected(*MIXED[:1])
    engine = drafting(replace(DECODE, max_batch_size=1))
    graphs = engine.model.graphs
    assert graphs is not None and engine.model.num_captures == len(graphs) == 1 + 4 * 2
    before = {each for each in graphs._graphs if isinstance(each, PassShape)}
    assert ids(engine.generate(PROMPTS[:1], MIXED[:1])) == wanted
    assert {each for each in graphs._graphs if isinstance(each, PassShape)} == before


def test_passes_of_batches_are_common() -> None:
    """Of a sequence with text, and of an entry of each of several ones."""
    for num_slots, count in ((1, 16), (2, 22), (16, 24), (64, 30), (191, 30)):
        shapes = common_shapes(num_slots, 2048, 8)
        sizes = [(each.batch, each.num_entries) for each in shapes]
        assert len(shapes) == len(set(shapes)) == count <= pass_graphs.MOST_PREPARED
        assert {(1, size) for size in (1, 2, 4, 8)} <= set(sizes) and sizes[-1][1] == max(
            8, min(MOST_ENTRIES, num_slots)
        )


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_memory_of_passes_is_told(gpu: PretendGpu) -> None:
    """Of their graphs and logits; none where attention packs nothing."""
    engine = drafting()
    on = engine.model.memory_needs(2, 16, 16, 64, 0)
    engine.model.self_drafter = None
    off = engine.model.memory_needs(2, 16, 16, 64, 0)
    assert on is not None and off is not None
    assert on.graphs - off.graphs == (MAX_GRAPHS - reserve.MOST_COMMON) * reserve.GRAPH_BYTES
    assert on.logits - off.logits == 2 * 8 * 97 * (4 + 4 + 4)


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.usefixtures("quick_start", "short_steps")
@pytest.mark.slow(first=1)
def test_a_dropped_engine_frees_graphs_and_cache_at_once(is_closed: bool, gpu: PretendGpu) -> None:
    model = to_gpu(copy.deepcopy(model_of()))
    make = partial(Engine.from_model, model, decode=DECODE, self_draft="int8")
    assert left_of_an_engine(make, is_closed) == ["Model"]


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_graphs_are_gone_before_the_communicator(gpu: PretendGpu) -> None:
    engine = drafting()
    engine.generate(PROMPTS[:1], replace(MIXED[0], max_new_tokens=6))
    drafter, runner = engine.model.self_drafter, engine.model
    assert drafter is not None and drafter.graphs is not None and runner.forward is not None
    forward: Any = runner.forward
    replays = [kept.replay for shape, kept in forward._graphs.items() if isinstance(shape, PassShape)]
    assert replays
    runner.release()
    assert drafter.graphs is None
    for each in replays:
        with pytest.raises(Exception, match="after its reset"):
            each()


@pytest.mark.usefixtures("quick_start", "short_steps")
def test_a_rank_that_drafts_replays_its_passes(gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It captures no step, and common passes at the start."""
    monkeypatch.setattr(pass_graphs, "MOST_PREPARED", 3)
    wanted = expected(*MIXED[:2])

    compared = list[Compared]()

    def rank(comm: ThreadComm) -> tuple[list[list[int]], int]:
        with PretendGpu() as machine:
            machine.memory = 8 << 30, 12 << 30
            model = to_gpu(copy.deepcopy(model_of()))
            options = {"draft_ranks": 1, "swap_space": 0, "self_draft": "int8"}
            engine = Engine.from_model(model, decode=DECODE, comm=comm, **options)
            drafter = engine.model.self_drafter
            assert (drafter is not None) == (not comm.serves)
            if drafter is not None:
                fix(engine)
                assert drafter.graphs is not None and engine.model.num_captures == 3
                compared.append(Compared(machine, monkeypatch))
            done = engine.generate(PROMPTS[:2], MIXED[:2])
            assert engine.model.graph_reason is None
            if drafter is not None:
                graphs = engine.model.graphs
                assert graphs is not None and all(isinstance(each, PassShape) for each in graphs._graphs)
                assert machine.num_replays > 10
            return ids(done), copied(done)[1]

    for found, accepted in run_ranks(ThreadWorld(2), rank):
        assert found == wanted and accepted > 10
    assert len(compared[0].pairs) > 10 and compared[0].are_equal


@pytest.mark.parametrize("form", FORMS)
def test_products_read_codes(form: Form, gpu: PretendGpu) -> None:
    """Of few rows by the kernel; for many a weight is widened."""
    generator = torch.Generator().manual_seed(1)
    weight, given = torch.randn(24, 70, generator=generator), torch.randn(65, 70, generator=generator)
    bias, rounded = torch.randn(24, generator=generator), Rounded(weight, form)
    pack = LowBitPack(OnGpu(weight), OnGpu(bias), [24], form)
    assert isinstance(pack.packed, CodedRows) and pack.num_bytes < weight.nbytes / (4 if form == "int4" else 3)
    torch.testing.assert_close(held(pack.weight_of(0)), rounded.to_dense(torch.float32))
    for count, kernels in ((1, 1), (64, 1), (65, 0)):
        before, wanted = gpu.num_kernels, rounded.multiply(given[:count], bias)
        torch.testing.assert_close(held(pack.multiply(OnGpu(given[:count]))), wanted)
        assert gpu.num_kernels == before + kernels


def test_a_copy_of_a_model_with_known_layers_copies_none_of_their_tensors(gpu: PretendGpu) -> None:
    model = to_gpu(copy.deepcopy(model_of(2)))
    rewrite(model, Setting(model.device), Stage.FASTER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "__deepcopy__", lambda *_: pytest.fail("a tensor was copied"))
        made = make_copy(model, "int8")
    found, wanted = dict(made.model.named_parameters()), dict(model.named_parameters())
    assert found and all(wanted[name] is each for name, each in found.items())
    assert vars(made.model.model.norm)["forward"] is not vars(model.model.norm)["forward"]
