"""Faults of the CUDA path that show without a GPU: on a pretended one, or in what is asked of torch."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # noqa: TID251 - a store of one process, no group

import lpr.model.adapter
import lpr.model.graphs
from lpr import DecodeConfig, native
from lpr.core.wire import NUM_HEADER
from lpr.dist import runtime
from lpr.dist.rendezvous import Member, Rendezvous
from lpr.dist.runtime import World, memory_of, sharing
from lpr.engine.exchange import Exchange
from lpr.model import loader
from lpr.model.attention import dense, triton_kernels
from lpr.model.graph_capture import Capturer, uncapturable
from lpr.model.graph_inputs import PACKED_BUCKETS, WIDE_KV, StaticShape, static_shape
from lpr.model.graphs import MAX_GRAPHS, MOST_COMMON, GraphForward
from lpr.model.input_builder import Row, build_inputs
from lpr.model.kernels import attention_kernel
from lpr.model.kv_cache import KVCache
from lpr.model.reserve import Steps
from lpr.model.runner import SharedWeights, TreeModel
from lpr.model.sampling.sampler import Sampler
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from tests.fakes.fake_graphs import FakeCapturer
from tests.fakes.models import tiny_model
from tests.fakes.pretend_gpu import PretendGpu, gpu, guard, to_gpu

__all__ = ["gpu", "guard"]


@pytest.mark.slow
def test_the_mask_travels_pinned(gpu: PretendGpu) -> None:
    rows = [Row(0, 5, [1] * 4, [-1, 0, 0, 2], [5, 6, 6, 7], 2), Row(1, 0, [1] * 3, [-1, 0, 1], [0, 1, 2], 1)]
    build_inputs(rows, KVCache(2, 128), torch.device("cuda", 0), 8, 16, tree_bits=True)
    assert gpu.count("pinned") >= 3 and gpu.count("pageable") == gpu.count("wait") == 0


def test_a_model_is_read_straight_to_a_gpu() -> None:
    asked: dict[str, Any] = {}
    loader._read_to(torch.device("cuda", 1), lambda **kwargs: asked.update(kwargs), torch.bfloat16)
    assert asked == {"dtype": torch.bfloat16, "device_map": {"": torch.device("cuda", 1)}}
    asked.clear()
    loader._read_to(torch.device("cpu"), lambda **kwargs: asked.update(kwargs), torch.float32)
    assert asked == {"dtype": torch.float32}


def test_experts_that_do_not_read_the_setting_are_not_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mixtral", num_local_experts=4)
    model.config._experts_implementation = "eager"
    assert "experts" in str(uncapturable(model, True))
    monkeypatch.setattr(type(model), "_can_set_experts_implementation", classmethod(lambda cls: False))
    assert uncapturable(model, True) is None


def test_the_kernel_is_imported_before_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    TreeModel(tiny_model(), attention="triton")
    monkeypatch.setattr(triton_kernels, "import_module", None)
    assert callable(triton_kernels._versions[triton_kernels.TRITON].tree_attention)


class CompilerError(Exception):
    """As Triton's: no RuntimeError."""


class Failing(Capturer):
    num_captures = 0

    def capture(self, program: Any) -> Any:
        self.num_captures += 1
        try:
            raise CompilerError("ptxas is missing")
        except CompilerError:
            raise RuntimeError("the end of the capture failed too") from None


def test_after_a_failed_capture_steps_stay_as_high_as_a_replay(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks of a tensor-parallel replica meet in every layer: the one that failed must not compute fewer rows."""
    gemm_rows = []
    runner, capturer = TreeModel(tiny_model()), Failing()
    runner.capturer = capturer
    runner.allocate(2, 256, 64, self_check(runner))
    inner = runner.model.forward
    runner.model.forward = lambda **given: (gemm_rows.append(given["input_ids"].shape[1]), inner(**given))[1]
    for count in (1, 5, 20):
        row = Row(0, 3, [1] * count, list(range(-1, count - 1)), list(range(3, 3 + count)), 1)
        assert len(runner.evaluate([row], Selection.build([]), 0)) == 1
    assert list(dict.fromkeys(gemm_rows)) == [1, 8, 32] and capturer.num_captures == 1
    assert runner.graph_reason == "ptxas is missing" and "CompilerError" in caplog.text


def test_release_drops_graphs_that_a_command_has_frozen() -> None:
    """A graph that holds a collective keeps its communicator from ending: the process would hang at its exit."""

    class Graphs:
        """In a cycle, as the real ones are."""

        num_captures, capturer = 1, None

    runner = TreeModel(tiny_model())
    graphs: Any = Graphs()
    graphs.itself, gone = graphs, weakref.ref(graphs)
    runner.forward = graphs
    gc.freeze()
    del graphs
    runner.release()
    assert gone() is None


def test_lengths_and_noise_keys_make_few_shapes() -> None:
    shapes = set()
    for cached in range(0, 3900, 7):
        for num_keys in (0, 1, 9, 16):
            selection = Selection.build([])
            if num_keys:
                selection.sampled, selection.num_keys = True, num_keys
            row = Row(0, cached, [1] * 30, list(range(-1, 29)), list(range(cached, cached + 30)), 1)
            found = static_shape([row], selection, 8, 4, 4096, 96, tree_bits=True)
            assert isinstance(found, StaticShape) and found.num_kv >= cached + 30
            shapes.add(found)
    assert len(shapes) == 2 * len([size for size in (*WIDE_KV, 4096) if size <= 4096])


@pytest.mark.parametrize("most, fits", [(MOST_COMMON, True), (10**6, False)])
def test_a_start_captures_no_more_graphs_than_are_kept(most: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share weights have a shape for limits and one without, and trees may be large: 301 shapes."""
    monkeypatch.setattr(lpr.model.graphs, "MOST_COMMON", most)
    runner = TreeModel(tiny_model(max_position_embeddings=1 << 17), attention="triton")
    runner.capturer = FakeCapturer()
    runner.adapter.reads_tables, runner.adapter.packed = True, False
    in_parts: Any = SimpleNamespace(install=lambda wanted: None)
    parts = runner.adapter, Sampler(in_parts), KVCache(128, 1 << 17, 64)
    graphs = GraphForward(*parts, capturer=runner.capturer, model=runner.adapter)
    graphs.limit(512)
    shapes = graphs.common_shapes(8)
    assert (len(set(shapes)) <= MAX_GRAPHS - 64) == fits
    small = [shape for shape in shapes if shape.batch * shape.num_entries <= 512]
    assert {shape.batch for shape in small} == {1, 2, 4, 8, 16, 32, 64, 128}, "small steps of all batches are there"


@pytest.mark.parametrize("slots", [1, 16, 128])
@pytest.mark.parametrize("is_split", [False, True])
def test_packed_steps_of_all_sizes_are_captured_at_the_start(slots: int, is_split: bool) -> None:
    """Up to 2,048 entries, of one sequence and of all, greedy and sampled: no more than are kept."""
    runner = TreeModel(tiny_model(max_position_embeddings=1 << 17), attention="triton")
    in_parts: Any = SimpleNamespace(install=lambda wanted: None) if is_split else None
    parts = runner.adapter, Sampler(in_parts), KVCache(slots, 1 << 17, 64)
    graphs = GraphForward(*parts, capturer=FakeCapturer(), model=runner.adapter)
    graphs.limit(64)
    shapes = graphs.common_shapes(8)
    assert len(set(shapes)) == len(shapes) <= MAX_GRAPHS - 64 and all(shape.num_kept for shape in shapes)
    for is_sampled in (False, True):
        wanted = [each for each in shapes if each.num_entries >= 256 or (each.num_keys > 0) == is_sampled]
        found = {shape.num_entries for shape in wanted}
        assert found >= set(PACKED_BUCKETS if not is_split else PACKED_BUCKETS[:12])
    assert {shape.batch for shape in shapes} == {min(each, slots) for each in (1, 4, 16, 64, 256)}
    told = Steps(batch=slots, num_ahead=64, prompt=1, packed=True)
    assert max(shape.num_entries for shape in shapes) <= told.num_entries
    assert max(shape.num_kept for shape in shapes) <= told.num_results


@pytest.mark.parametrize("most, is_few", [(8, True), (64, False)])
def test_attention_makes_few_partial_sums(most: int, is_few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """7B, 64 nodes on 132 processors: 8.4 MB a layer, and twice that with as many splits as fit."""
    monkeypatch.setattr(attention_kernel, "MOST_SPLITS", most)
    tiles = attention_kernel.choose_tiles(64, 128, torch.bfloat16, 32, 1 << 17, 132)
    assert (32 * 64 * tiles.num_splits * 128 * 4 < 9e6) == is_few
    one_head = attention_kernel.choose_tiles(8, 128, torch.bfloat16, 1, 1 << 15, 132)
    assert one_head.num_splits == 64, "of one K/V head a GPU would be idle"


@pytest.mark.parametrize("uuids, expected", [("ab", [(1, 1), (1, 1)]), ("aa", [(2, 2), (2, 2)])])
def test_ranks_that_see_one_gpu_each_do_not_share_it(
    uuids: str, expected: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SLURM shows every task its own GPU as "cuda:0": only the GPU's name tells how many ranks are on it."""
    memories = []
    for uuid in uuids:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, uuid=uuid: SimpleNamespace(uuid=uuid))
        memories.append(memory_of("cuda:0"))
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: sharing(store, World(rank, 2, rank, 0, True), memories[rank]), range(2)))
    assert found == expected
    assert memory_of(None) == memory_of(None), "on a CPU all ranks of a machine share its memory"


class FakeGroup:
    """A torch process group of two ranks that always answers; notes what is done to it."""

    def __init__(self, done: list[Any]) -> None:
        self.done = done

    def _allgather_base(self, gathered: torch.Tensor, payload: torch.Tensor) -> FakeGroup:
        self.done.append("gather")
        gathered.copy_(payload.repeat(2))
        return self

    def wait(self, *limit: timedelta) -> None:
        """It has ended."""

    def is_completed(self) -> bool:
        return True

    def abort(self) -> None:
        self.done.append("abort")


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A world of two ranks in which nothing meets: what is done to the process groups, in order."""
    done: list[Any] = []
    store = HashStore()

    def make_group(store: object, rank: int, size: int, device: torch.device, timeout: float) -> FakeGroup:
        done.append((size, device.type, timeout))
        return FakeGroup(done)

    monkeypatch.setattr(runtime, "connect_store", lambda *_, **__: store)
    monkeypatch.setattr(runtime, "sharing", lambda *_: (2, 2))
    monkeypatch.setattr(runtime, "die_with_parent", lambda: None)
    monkeypatch.setattr(runtime.group, "make_group", make_group)
    return done


TWO = World(rank=0, size=2, local_rank=0, attempt=0, launched=True)


def test_an_error_on_one_rank_does_not_wait_for_the_others(groups: list[Any]) -> None:
    """A collective at the end would hang: the others do not come to it."""
    with pytest.raises(ZeroDivisionError), runtime.join(TWO, "cpu", 60.0):
        raise ZeroDivisionError
    assert groups[1:] == ["abort"]
    groups.clear()
    with runtime.join(TWO, "cpu", 60.0):
        pass
    assert groups[1:] == ["gather", "abort"], "who ends well waits for the others"


def test_a_lost_rank_is_written_down_for_the_others(groups: list[Any]) -> None:
    with pytest.raises(ZeroDivisionError), runtime.join(TWO, "cpu", 60.0):
        raise ZeroDivisionError
    other = Rendezvous(runtime.connect_store(TWO, timedelta(0)), Member(1))
    assert other.loss(0, [0, 1]) == "replica 0 was lost: rank 0 failed: ZeroDivisionError"


def test_loading_has_a_time_out_of_its_own(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    monkeypatch.setattr(runtime.group.ProcessGroup, "limit", lambda self, timeout: limits.append(timeout))
    with runtime.join(TWO, "cpu", 30.0, load_timeout=3600.0) as comm:
        assert groups == [(2, "cpu", 3600.0)] and not limits
        comm.loaded()
        assert limits == [30.0]


def test_the_payload_is_that_of_the_running_batch() -> None:
    """At lp 8 a full batch of 8 is eight times a single tree, whichever runs."""
    sizes = DecodeConfig(window_size=8, trie_nodes=64).resolved(8)
    comm: Any = SimpleNamespace(size=8, num_serving=8, tp_size=1, rank=0, gather=lambda payload: payload[None])
    exchange = Exchange(sizes, 8, comm, torch.device("cpu"))
    words = [exchange.payload_words(count) - NUM_HEADER for count in range(9)]
    assert words[0] == 0 and words[8] == 8 * words[1] > 0
    assert words[3] == words[4] == 4 * words[1] and exchange.payload_bytes == 4 * (words[8] + NUM_HEADER)


def test_drafting_a_large_tree_is_native() -> None:
    """Every rank drafts the whole tree of every request: 512 nodes took Python 6 ms, longer than a step of 7B."""
    assert native.draft_step.__module__.endswith("_native"), "tests/native compares it with the specification"


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_are_compared_while_the_step_is_prepared(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a replica ask each other before every forward: the answer travels while the inputs are made."""
    events: list[str] = []

    def noted(name: str, inner: Any) -> Any:
        return lambda *args, **kwargs: (events.append(name), inner(*args, **kwargs))[1]

    def ask(rows: Any) -> Any:
        events.append("ask")
        return lambda: events.append("answer")

    model = tiny_model()
    runner = TreeModel(model, attention="sdpa", shared=SharedWeights(check_rows=ask))
    runner.capturer = FakeCapturer() if graphs else None
    runner.allocate(1, 64, 8, self_check(runner))
    monkeypatch.setattr(StaticShape, "place", noted("inputs", StaticShape.place))
    monkeypatch.setattr(lpr.model.adapter, "build_inputs", noted("inputs", build_inputs))
    model.forward = noted("forward", model.forward)
    row = Row(0, 0, [1, 2, 3], [-1, 0, 1], [0, 1, 2], 3)
    for _ in range(2):
        events.clear()
        runner.evaluate([row], Selection.build([]), 0)
        assert events[:3] == ["ask", "inputs", "answer"] and "ask" not in events[1:] and "answer" not in events[3:]
    events.clear()
    runner.fill([row])
    assert events == ["ask", "inputs", "answer", "forward"]


def test_a_compilers_error_is_no_runtime_error_and_sdpa_takes_over(
    gpu: PretendGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise CompilerError("ptxas is missing")

    monkeypatch.setattr("lpr.model.kernels.attention_kernel.tree_attention", broken)
    runner = TreeModel(to_gpu(tiny_model()))
    assert runner.attention == "triton"
    self_check(runner)
    assert runner.attention == "sdpa" and "using 'sdpa': ptxas is missing" in caplog.text


@pytest.mark.parametrize("scaled_after", [False, True])
def test_soft_capped_scores_stay_within_float16(scaled_after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of a query and a key of 256 dimensions exceeds 65504 where the scaled one does not.

    Scaled afterwards, the defect, both scores are infinite, and neither key is preferred.
    """
    if scaled_after:
        with_extras = dense._attend_with_extras

        def mutant(query: Any, key: Any, value: Any, mask: Any, scoring: Any) -> Any:
            cap = scoring.softcap / scoring.scale
            return with_extras(query, key, value, mask, scoring._replace(scale=1.0, softcap=cap))

        monkeypatch.setattr(dense, "_attend_with_extras", mutant)
    query, key = torch.full((1, 1, 1, 256), 20.0).half(), torch.full((1, 1, 2, 256), 20.0).half()
    key[:, :, 1] = 18.0
    value = torch.tensor([1.0, 3.0]).half()[None, None, :, None].expand(1, 1, 2, 256)
    found, _ = dense.tree_attention(None, query, key, value, None, scaling=256**-0.5, softcap=1e4)  # type: ignore[arg-type]
    assert torch.equal(found, torch.ones_like(found)) == (not scaled_after)
