"""The CUDA path on the pretend GPU: the CPU's ids, one wait a step, no pageable copy, and nothing that fell back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import lpr.model.moves
import lpr.model.sampling.sampler
import lpr.model.sampling.specification
from lpr import DecodeConfig, Engine, InputError, SamplingParams
from lpr.dist.errors import DesyncError
from lpr.dist.group import Download
from lpr.engine import prepare
from lpr.model.graph_capture import CudaCapturer
from lpr.model.graphs import GraphForward
from lpr.model.host_pages import HostPages
from lpr.model.kv_cache import KVCache
from lpr.model.runner import SharedWeights, TreeModel
from lpr.model.sampling.choice import gpu_pick
from lpr.model.sampling.processors import ROW_BY_ROW, OutputPenalty, Pick, ProcessorPath, Processors
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from lpr.model.step_inputs import Row
from lpr.model.tree_mask import TreeMask
from tests.fakes.models import left_of_an_engine, tiny_model
from tests.fakes.pretend_gpu import (
    OnGpu,
    PretendError,
    PretendGpu,
    gpu,
    guard,
    held,
    quick_start,
    sampling_kernel,
    short_steps,
    to_gpu,
)
from tests.fakes.pretend_streams import Event
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

__all__ = ["gpu", "guard", "quick_start", "short_steps"]

PROMPTS = [[3, 5, 7, 9, 11, 13, 5, 7], [2, 4], [7, 8, 9] * 5, [(i * i) % 97 for i in range(90)]]
DECODE = DecodeConfig(window_size=5, trie_nodes=16, max_batch_size=2, prefill_chunk=64, max_length=128, kv_tokens=512)
GREEDY = [SamplingParams(max_new_tokens=16)] * len(PROMPTS)
MIXED = [
    SamplingParams(
        max_new_tokens=16, temperature=0.8 * (i % 2), top_p=(1.0, 0.9)[i // 2 % 2], top_k=9 * (i % 2), seed=i
    )
    for i in range(len(PROMPTS))
]
PROCESSED = [
    SamplingParams(
        max_new_tokens=12, repetition_penalty=1.2, no_repeat_ngram_size=3, frequency_penalty=0.3 * (i % 2),
        min_new_tokens=4, stop_token_ids=(95, 96), logit_bias=((5, 1.5), (9, -2.0)), temperature=0.8 * (i % 2),
        top_p=(1.0, 0.9)[i // 2 % 2], seed=i,
    )
    for i in range(len(PROMPTS))
]  # fmt: skip
PLAIN = DecodeConfig.autoregressive()
SETS = {"greedy": GREEDY, "mixed": MIXED, "processed": PROCESSED}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Of one layer: a start captures more than ten graphs. The families below have two."""
    return tiny_model(spread=0.12, num_hidden_layers=1)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> dict[str, list[list[int]]]:
    engine = Engine.from_model(copy.deepcopy(model), decode=PLAIN)
    return {name: ids(engine, params) for name, params in SETS.items()}


def ids(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    return [each.token_ids for each in engine.generate(PROMPTS, params)]


def check(
    machine: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]], names: Any,
    decode: DecodeConfig = DECODE, **options: Any,
) -> Engine:  # fmt: skip
    """Decode on the pretend GPU and compare with the CPU; count what a step may do."""
    # Pages that go to host memory are read, too, though nobody waits for them.
    engine = Engine.from_model(to_gpu(copy.deepcopy(model)), decode=decode, swap_space=0, **options)
    assert engine.model.attention == options.get("attention", "triton"), "fell back"
    assert (engine.model.graphs is not None) == options.get("graphs", True)
    assert gpu_pick(engine.model.device) is sampling_kernel, "sampling fell back"
    gathers = []
    begin_gather = engine.comm.begin_gather

    def counted(payload: torch.Tensor) -> Any:
        gathers.append(1)
        return begin_gather(payload)

    engine.comm.begin_gather = counted  # type: ignore[method-assign]
    engine.comm.gather = lambda payload: counted(payload)()  # type: ignore[method-assign]
    for name in names:
        machine.events.clear()
        gathers.clear()
        assert ids(engine, SETS[name]) == expected[name]
        assert machine.count("wait") == 0, machine.events
        assert machine.count("pageable") == 0, machine.events
        assert machine.count("read") == len(gathers) > 3, "exactly one wait a step"
        assert machine.count("unpinned") == 0, machine.events
    assert engine.model.graph_reason is None
    return engine


@pytest.mark.usefixtures("short_steps")
def test_kernel_and_graphs(gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]]) -> None:
    engine = check(gpu, model, expected, ("greedy", "mixed"))
    assert gpu.num_kernels and gpu.num_replays > 10
    graphs = engine.model.graphs
    assert graphs is not None and gpu.num_captures == len(graphs.common_shapes(DECODE.num_candidates)) < 100
    assert gpu.num_captures == engine.model.num_captures, "nothing was captured after the start"


@pytest.mark.usefixtures("short_steps")
def test_prompts_and_trees_are_one_captured_step(
    gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries are padded to a bucket of their sum, whatever the longest row has, and nothing is evaluated directly."""
    steps: list[tuple[int, int, bool]] = []
    evaluate = GraphForward.evaluate

    def noted(self: GraphForward, rows: Any, *how: Any) -> Any:
        before = self.num_computed
        found = evaluate(self, rows, *how)
        chunks = {row.num_results > 0 for row in rows}
        steps.append((sum(row.num_entries for row in rows), self.num_computed - before, len(chunks) == 2))
        return found

    monkeypatch.setattr(GraphForward, "evaluate", noted)
    how = {"max_batch_size": 4, "prefill_chunk": 32, "max_length": 128, "kv_tokens": 512}
    decode = DecodeConfig(window_size=5, trie_nodes=16, **how)
    engine = Engine.from_model(to_gpu(copy.deepcopy(model)), decode=decode, swap_space=0)
    captured = gpu.num_captures
    assert ids(engine, MIXED) == expected["mixed"]
    assert gpu.num_captures == captured and engine.model.graph_reason is None
    assert any(is_mixed for _, _, is_mixed in steps), "a piece of a prompt beside trees"
    assert all(wanted <= computed <= max(8, 2 * wanted) for wanted, computed, _ in steps)
    assert sum(computed for _, computed, _ in steps) <= 1.3 * sum(wanted for wanted, _, _ in steps)


@pytest.mark.parametrize("options", [{"graphs": False}, {"attention": "sdpa"}], ids=str)
@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow(first=1)
def test_without_graphs_and_without_the_kernel(
    options: dict[str, Any], gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]]
) -> None:
    check(gpu, model, expected, ("mixed",), SMALL, **options)


@pytest.mark.usefixtures("quick_start")
def test_processors(gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]]) -> None:
    """One wait a step, as every other step has. The faults below are looked for in such an engine."""
    replays = gpu.num_replays
    check(gpu, model, expected, ("processed", "mixed"), SMALL)
    assert gpu.num_replays > replays + 5


def a_processor_that_waits(patch: pytest.MonkeyPatch) -> None:
    penalty = OutputPenalty.__call__

    def mutant(self: OutputPenalty, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        torch.bincount(input_ids[0])
        return penalty(self, input_ids, scores)

    patch.setattr(OutputPenalty, "__call__", mutant)


def processors_along_the_path(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Processors, "are_row_by_row", False)


def paths_of_other_nodes(patch: pytest.MonkeyPatch) -> None:
    call = Processors.__call__
    patch.setattr(Processors, "__call__", lambda self, ids, scores: call(self, ids.flip(0), scores))


def choices_in_the_order_of_depths(patch: pytest.MonkeyPatch) -> None:
    choose_all = ProcessorPath.choose_all

    def mutant(self: ProcessorPath, logits: torch.Tensor, chosen: torch.Tensor, pick: Pick) -> bool:
        return choose_all(self, logits, chosen, lambda scores, rows: pick(scores, np.sort(rows)))

    patch.setattr(ProcessorPath, "choose_all", mutant)


@pytest.mark.parametrize(
    "fault",
    [a_processor_that_waits, processors_along_the_path, paths_of_other_nodes, choices_in_the_order_of_depths],
)
@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow(first=2)
def test_faults_of_processors_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None],
    gpu: PretendGpu,
    model: PreTrainedModel,
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check(gpu, model, expected, ("processed",), graphs=False)


def test_a_processor_that_fails_for_all_nodes_is_asked_along_the_path(gpu: PretendGpu, model: PreTrainedModel) -> None:
    """A node that no chosen text leads to may fail without anybody hearing of it; one on the path is named."""
    prompt = PROMPTS[0]
    whole = Engine.from_model(copy.deepcopy(model), decode=PLAIN).generate([prompt], PROCESSED[0])[0].token_ids

    class Failing(OutputPenalty):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            ids = held(input_ids)[:, len(prompt) :]
            if input_ids.shape[1] > len(prompt) + 7 or (ids != torch.tensor(whole)[: ids.shape[1]]).any():
                raise ValueError("no such path")
            return scores

    engine = Engine.from_model(to_gpu(copy.deepcopy(model)), decode=DECODE, graphs=False)
    for are_known in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("lpr.model.sampling.processors.ROW_BY_ROW", ROW_BY_ROW | ({Failing} if are_known else set()))
            done = engine.generate([prompt], PROCESSED[0], [Failing(len(prompt), 0, 0)])[0]
        assert done.token_ids == whole[:8] and done.error == "logits processor Failing failed: ValueError: no such path"


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow(first=1)
def test_a_dropped_engine_frees_graphs_and_cache_at_once(is_closed: bool, gpu: PretendGpu) -> None:
    model = to_gpu(tiny_model(num_hidden_layers=1))
    assert left_of_an_engine(lambda: Engine.from_model(model, decode=SMALL), is_closed) == ["Model"]
    assert gpu.num_replays


SMALL = DecodeConfig(window_size=3, trie_nodes=12, max_batch_size=1, prefill_chunk=64, max_length=128, kv_tokens=512)
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9, "head_dim": 16},
    "qwen3": {"head_dim": 16},
    "gpt_neox": {},
}


def fails(*_: Any) -> torch.Tensor:
    raise StrangeError("no such instruction")


class StrangeError(Exception):
    """As compilers and drivers raise them."""


@pytest.mark.usefixtures("quick_start")
def test_ranks_with_a_gpu_each(gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]]) -> None:
    def rank(comm: ThreadComm) -> list[list[int]]:
        with PretendGpu() as machine:
            machine.memory = machine.memory[0] * 2, machine.memory[1] * 2  # which two ranks of one process share
            engine = Engine.from_model(to_gpu(copy.deepcopy(model)), decode=SMALL, comm=comm)
            assert engine.model.graphs is not None
            machine.events.clear()
            comm.gathered_bytes.clear()
            found = ids(engine, MIXED)
            assert machine.count("wait") == machine.count("pageable") == 0, machine.events
            assert machine.count("read") == len(comm.gathered_bytes) > 3, "exactly one wait a step"
            assert engine.model.graph_reason is None and machine.num_captures == engine.model.num_captures > 3
            return found

    for found in run_ranks(ThreadWorld(2), rank):
        assert found == expected["mixed"]


# What goes wrong in a capture.


def test_a_failed_capture_leaves_the_stream_and_names_its_cause(
    gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]], caplog: pytest.LogCaptureFixture
) -> None:
    broken = copy.deepcopy(model)
    inner = broken.model.layers[0].mlp.forward

    def waiting(hidden: torch.Tensor) -> torch.Tensor:
        if gpu.capturing is not None:
            hidden.sum().item()
        return inner(hidden)

    broken.model.layers[0].mlp.forward = waiting
    engine = Engine.from_model(to_gpu(broken), decode=DECODE)
    assert ids(engine, GREEDY) == expected["greedy"], "evaluated without graphs"
    assert "not permitted when stream is capturing" in str(engine.model.graph_reason)
    assert gpu.streams.current is gpu.streams.default and gpu.num_captures == 1
    assert "without CUDA graphs" in caplog.text


def test_a_capture_restores_the_stream(gpu: PretendGpu) -> None:
    with pytest.raises(RuntimeError):
        CudaCapturer(torch.device("cuda", 0)).capture(lambda: 1 / 0 if gpu.capturing else torch.zeros(1))  # type: ignore[arg-type, return-value]
    assert gpu.streams.current is gpu.streams.default and gpu.capturing is None


# Seeded faults.


def selection_on_the_host(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Selection, "to", lambda self, device: self)


def move_by_host_indices(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: KVCache, rows: np.ndarray) -> None:
        source, target = torch.from_numpy(rows)
        for pool in self._moved if len(source) else ():
            pool.index_copy_(1, target, pool.index_select(1, source))

    patch.setattr(KVCache, "move", mutant)


def mask_on_the_host(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: TreeMask) -> torch.Tensor:
        length = self.positions.shape[1]
        return torch.arange(length) >= length - self.num_entries[:, None]

    patch.setattr(TreeMask, "real", mutant)


def a_choice_that_waits(patch: pytest.MonkeyPatch) -> None:
    inner = lpr.model.sampling.sampler.choose

    def mutant(*args: Any) -> torch.Tensor:
        chosen = inner(*args)
        assert bool((chosen > -10).all())
        return chosen

    patch.setattr(lpr.model.sampling.sampler, "choose", mutant)


def a_constant_of_the_host(patch: pytest.MonkeyPatch) -> None:
    inner = lpr.model.sampling.sampler.candidates

    def mutant(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, scores = inner(logits, k)
        return tokens, scores * torch.tensor([1] * scores.shape[1], dtype=scores.dtype, device=logits.device)

    patch.setattr(lpr.model.sampling.sampler, "candidates", mutant)


def pageable_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lpr.model.moves, "to_device", lambda array, device: torch.from_numpy(array).to(device))


def results_in_new_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Download, "begin", lambda self, words: words.cpu)


def results_nobody_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Event, "synchronize", lambda _: None)


@pytest.mark.parametrize(
    "fault, options",
    [
        (results_in_new_memory, {}),
        (results_nobody_waited_for, {}),
        (selection_on_the_host, {"graphs": False}),
        (move_by_host_indices, {}),
        (mask_on_the_host, {"attention": "sdpa"}),
        (a_choice_that_waits, {}),
        (a_constant_of_the_host, {}),
        (pageable_copies, {}),
    ],
)
@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow(first=5)
def test_faults_are_noticed(
    fault: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    gpu: PretendGpu,
    model: PreTrainedModel,
    expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, PretendError, RuntimeError, InputError)):
        check(gpu, model, expected, ("mixed",), SMALL, **options)


@pytest.mark.parametrize("fault", [False, True])
def test_the_specification_of_sampling_stays_on_the_device(
    fault: bool, gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the kernel's place where that does not work."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02)
    expected = lpr.model.sampling.specification.pick(logits, Selection.build([(params, range(6))]))
    inner = lpr.model.sampling.specification.gumbel
    if fault:
        noise = lambda keys, ids: inner(keys, torch.arange(ids.shape[1])[None])  # noqa: E731
        monkeypatch.setattr(lpr.model.sampling.specification, "gumbel", noise)
    there = OnGpu(logits)
    selection = Selection.build([(params, range(6))], there.device)
    gpu.events.clear()
    if fault:
        with pytest.raises((PretendError, RuntimeError)):
            lpr.model.sampling.specification.pick(there, selection)
    else:
        assert held(lpr.model.sampling.specification.pick(there, selection)).tolist() == expected.tolist()
        assert gpu.count("wait") == gpu.count("pageable") == 0, gpu.events


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.usefixtures("quick_start")
@pytest.mark.slow(first=1)
def test_memory_for_pages_on_the_host_is_pinned_before_the_first_request(
    fault: bool, gpu: PretendGpu, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinning more while requests run would stop the device. Requests take each other's pages."""
    if fault:
        monkeypatch.setattr(HostPages, "take", lambda *_: None)
    monkeypatch.setattr("lpr.model.host_pages.HostPages.__init__.__defaults__", (1 << 14,))
    decode = DecodeConfig(window_size=3, trie_nodes=8, max_batch_size=2, max_length=112, kv_tokens=144)
    engine = Engine.from_model(to_gpu(copy.deepcopy(model)), decode=decode, swap_space=300e3 / 2**30)
    expected = Engine.from_model(copy.deepcopy(model), decode=PLAIN)
    params = SamplingParams(max_new_tokens=20)
    pinned: list[int] = []
    pin = PretendGpu.pin
    noted = lambda self, made: (pinned.append(made.numel() * made.element_size()), pin(self, made))[1]  # noqa: E731
    monkeypatch.setattr(PretendGpu, "pin", noted)
    prompts = [[(seed * i + seed) % 97 for i in range(40)] for seed in range(3, 9)]
    for _ in range(2):  # the prompts' pages come back
        done = [each.token_ids for each in engine.generate(prompts, params)]
        assert done == [each.token_ids for each in expected.generate(prompts, params)]
    assert engine.scheduler.limits.num_host_pages > 20
    assert engine.scheduler.placement.swapped[2] > 3, "pages came back"
    assert (max(pinned) > 1 << 13) == fault


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.usefixtures("quick_start")
def test_copies_to_the_device_are_few(
    fault: bool, gpu: PretendGpu, model: PreTrainedModel, expected: dict[str, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A step's words with the changes of block tables, the header with the nodes' places, and what a commit moves."""
    place = GraphForward._place
    apart = lambda self, *how: (self.cache.device_tables(self.adapter.device), place(self, *how))[1]  # noqa: E731
    monkeypatch.setattr(GraphForward, "_place", apart if fault else place)
    decode = DecodeConfig(window_size=5, trie_nodes=16, max_batch_size=4, prefill_chunk=64, max_length=128)
    engine = Engine.from_model(to_gpu(copy.deepcopy(model)), decode=decode, swap_space=0)
    commits: list[int] = []
    move = KVCache.move
    noted = lambda self, rows: (commits.append(rows.shape[1] > 0), move(self, rows))[1]  # noqa: E731
    monkeypatch.setattr(KVCache, "move", noted)
    gpu.events.clear()
    assert ids(engine, MIXED) == expected["mixed"]
    num_steps = gpu.count("read")
    assert num_steps > 5 and (gpu.count("pinned") - sum(commits) <= 2 * num_steps) != fault, gpu.events


@pytest.mark.usefixtures("quick_start")
def test_a_hook_that_captured_steps_would_not_call_is_refused(gpu: PretendGpu, model: PreTrainedModel) -> None:
    there = to_gpu(copy.deepcopy(model))
    engine = Engine.from_model(there, decode=SMALL, swap_space=0)
    ids(engine, GREEDY)
    assert gpu.num_captures
    there.model.layers[0].mlp.register_forward_hook(lambda module, given, output: -output)
    with pytest.raises(InputError, match="it has other hooks"):
        ids(engine, GREEDY)


# Ranks that share weights.


class Pair(ThreadComm):
    """One of two ranks that share weights; each holds all of them. Counts their gathers on the host."""

    num_sharing, tp_mesh = 1, object()  # type: ignore[assignment]
    num_asked = 0

    def begin_gather_replica(self, payload: torch.Tensor) -> Any:
        self.num_asked += 1
        return super().begin_gather_replica(payload)


def as_pair(program: Callable[[Engine, Pair, PretendGpu], Any]) -> list[Any]:
    """Run a program as two ranks of a replica, each with an engine on its GPU."""
    model = tiny_model(num_hidden_layers=1)

    def rank(comm: ThreadComm) -> Any:
        with PretendGpu() as machine:
            machine.memory = 60 << 30, 80 << 30
            pair = Pair(comm.world, comm.tp_rank)
            pair.num_sharing = 1
            return program(Engine.from_model(to_gpu(copy.deepcopy(model)), decode=SMALL, comm=pair), pair, machine)

    return run_ranks(ThreadWorld(2, tp=2), rank)


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.usefixtures("quick_start", "gpu")
def test_a_captured_step_of_ranks_that_share_weights_has_no_gather_on_the_host(
    fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture has two, before it and behind it. The rows travel with the results."""
    if fault:  # the host waits in every step
        monkeypatch.setattr(GraphForward, "_place", lambda self, *how, place=GraphForward._place: (
            place(self, *how), self.before_launch()))  # fmt: skip

    def program(engine: Engine, pair: Pair, machine: PretendGpu) -> Any:
        asked, captures = pair.num_asked, machine.num_captures
        found = [each.token_ids for each in engine.generate(PROMPTS[:3], GREEDY[:3])]
        return found, pair.num_asked - asked, machine.num_captures - captures, machine.num_replays

    (one, asked, captures, replays), other = as_pair(program)
    assert one == other[0] and replays > 2 * captures > 0 and (asked == 2 * captures) != fault


@pytest.mark.parametrize("is_compared", [True, False])
@pytest.mark.usefixtures("quick_start", "gpu")
def test_a_captured_step_of_other_rows_ends_both_ranks_before_its_commit(
    is_compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the digest of the rows nobody notices: the first rank's results count."""
    if not is_compared:
        monkeypatch.setattr(prepare, "check_replica", lambda comm, rows, at_once: lambda: None)

    def program(engine: Engine, pair: Pair, machine: PretendGpu) -> Any:
        engine.generate(PROMPTS[:1], GREEDY[0])
        evaluate = engine.replica.model.evaluate

        def spoiled(rows: Any, *how: Any) -> torch.Tensor:
            if pair.tp_rank and rows[0].num_cached > 20:
                rows = [Row(each.slot, each.num_cached, (each.tokens + 1) % 97, *each.entries[1:], each.num_results)
                        for each in rows]  # fmt: skip
            return evaluate(rows, *how)

        engine.replica.model.evaluate = spoiled  # type: ignore[method-assign]
        request, known, asked, captures = engine.submit(PROMPTS[2], MIXED[2]), [], 0, 0
        try:
            while not engine.is_idle:
                known, asked, captures = request.token_ids, pair.num_asked, machine.num_captures
                engine.step()
        except DesyncError as failure:
            assert request.token_ids == known and (pair.num_asked, machine.num_captures) == (asked, captures)
            return str(failure)
        return len(request.token_ids)

    named = "the replicated state of rank 1 differs from that of the other 1 of 2 ranks: "
    named += "their drafts or tokens are not the same"
    assert as_pair(program) == [named if is_compared else 16] * 2


@pytest.mark.parametrize("reads", ["nothing", "logits", "drafts"])
def test_results_that_the_host_reads_before_the_gather_wait_for_the_other_ranks(
    reads: str, gpu: PretendGpu, model: PreTrainedModel
) -> None:
    """The host waits for logits that it processes, and for results to draft from; other ranks may have other steps."""
    events: list[str] = []
    shared = SharedWeights(check_rows=lambda rows: (events.append("ask"), lambda: events.append("answer"))[1])
    runner = TreeModel(to_gpu(copy.deepcopy(model)), shared=shared)
    runner.allocate(1, 96, 8, self_check(runner))
    selection = Selection.build([])
    selection.num_logprobs = 2 if reads == "logits" else None
    if reads == "drafts":
        runner.self_drafter = object()  # type: ignore[assignment]
    for expected in (["ask", "answer"], ["ask"] if reads == "nothing" else ["ask", "answer"]):
        events.clear()
        runner.evaluate([Row.chain(0, 0, [3] * 8, 8)], selection, 0)
        assert events == expected
