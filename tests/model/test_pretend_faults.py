"""What the pretend GPU sees of streams, graphs, memory and NCCL: each defect is put back and found."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lpr.dist import nccl
from lpr.dist.errors import CommError
from lpr.dist.group import Download, ProcessGroup
from lpr.engine.exchange import worst_of_replica
from lpr.model import graph_capture
from lpr.model.graph_capture import CudaCapturer
from lpr.model.kv_cache import KVCache
from lpr.model.runner import SharedWeights, TreeModel
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row
from lpr.model.transfer import Upload
from tests.fakes import pretend_nccl
from tests.fakes.models import tiny_model
from tests.fakes.pretend_gpu import CUDA, OnGpu, PretendError, PretendGpu, RaceError, gpu, guard, to_gpu
from tests.fakes.pretend_nccl import HangError, Job, nccl_of
from tests.fakes.pretend_streams import Event, Stream
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks

__all__ = ["gpu", "guard"]

Patch = pytest.MonkeyPatch


def nothing(*_: Any, **__: Any) -> None: ...


# Streams and events.


def two_streams(machine: PretendGpu, waits: bool) -> torch.Tensor:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        made = torch.ones(3, device=CUDA)
    if waits:
        other.wait_stream(one)
    with torch.cuda.stream(other):
        made += 1
    torch.cuda.current_stream().wait_stream(other)
    return made


def test_streams_know_only_what_they_wait_for(gpu: PretendGpu) -> None:
    assert two_streams(gpu, True).tolist() == [2.0] * 3
    with pytest.raises(RaceError, match="has not waited"):
        two_streams(gpu, False)


def test_the_default_stream_waits_for_nobody(gpu: PretendGpu) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        made = torch.ones(3, device=CUDA)
        event = torch.cuda.Event()
        event.record()
    with pytest.raises(RaceError):
        made + 1
    event.synchronize()  # what the host has waited for comes before its next launch
    assert (made + 1).tolist() == [2.0] * 3


def test_memory_that_another_stream_uses_is_freed_with_its_knowledge(gpu: PretendGpu) -> None:
    stream = torch.cuda.Stream()
    for is_recorded in (True, False):
        made = torch.ones(3, device=CUDA)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made += 1
        if is_recorded:
            made.record_stream(stream)  # type: ignore[arg-type]
        del made
        if is_recorded:
            torch.ones(3, device=CUDA)
        else:
            with pytest.raises(PretendError, match="is freed while streams"):
                torch.ones(3, device=CUDA)


@pytest.mark.parametrize("fault", [False, True])
def test_words_are_not_written_while_they_leave(fault: bool, gpu: PretendGpu, monkeypatch: Patch) -> None:
    """An upload waits for its event before the next words; the device would read those of another step."""
    if fault:
        monkeypatch.setattr(Event, "record", nothing)
    there = torch.zeros(4, dtype=torch.int32, device=CUDA)
    upload = Upload(there)
    for value in (1, 2):
        upload.words(4)[:] = value
        upload.send(4)
    if fault:
        with pytest.raises(PretendError, match="pinned memory was written"):
            torch.cuda.synchronize()
    else:
        torch.cuda.synchronize()
        assert there.tolist() == [2] * 4


@pytest.mark.parametrize("fault", [False, True])
def test_results_are_there_when_the_host_has_waited(fault: bool, gpu: PretendGpu, monkeypatch: Patch) -> None:
    if fault:
        monkeypatch.setattr(Event, "synchronize", nothing)
    found = Download().begin(torch.ones(2, dtype=torch.int32, device=CUDA))()
    assert (found.tolist() == [1, 1]) != fault


# Graphs and their pools.


def capturer_of(machine: PretendGpu) -> tuple[CudaCapturer, Any, Any]:
    """A capturer with two graphs of one pool, and their input."""
    given = torch.ones(2, device=CUDA)
    capturer = CudaCapturer(CUDA)
    first, second = (capturer.capture(lambda factor=factor: given * factor) for factor in (2, 3))
    return capturer, (first, second), given


def test_a_replay_takes_the_results_of_other_graphs(gpu: PretendGpu) -> None:
    """They share memory: a step's results are copied on before the next replay."""
    _, (first, second), given = capturer_of(gpu)
    found = first()
    assert found.tolist() == [2.0] * 2
    given += 1
    assert second().tolist() == [6.0] * 2 and found.isnan().all().tolist()
    assert first().tolist() == [4.0] * 2


def test_a_capture_runs_nothing(gpu: PretendGpu) -> None:
    given = torch.ones(2, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        given += 1
        made = given * 2
    torch.cuda.synchronize()
    assert given.tolist() == [1.0] * 2 and made.isnan().all().tolist()
    graph.replay()
    assert given.tolist() == [2.0] * 2 and made.tolist() == [4.0] * 2


def test_a_graph_does_not_keep_its_inputs(gpu: PretendGpu) -> None:
    given = [torch.ones(2, device=CUDA)]
    replay = CudaCapturer(CUDA).capture(lambda: given[0] * 2)
    assert replay().tolist() == [2.0] * 2
    given[0] = torch.zeros(2, device=CUDA)
    with pytest.raises(PretendError, match="freed since its capture"):
        replay()


def one_handle_for_all(patch: Patch) -> None:
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: 1)


def no_wait_for_the_streams_of_captures(patch: Patch) -> None:
    patch.setattr(Stream, "wait_stream", nothing)


@pytest.mark.parametrize("fault", [None, one_handle_for_all, no_wait_for_the_streams_of_captures])
def test_a_tensor_may_outlive_the_graphs_of_a_capturer(
    fault: Callable[[Patch], None] | None, gpu: PretendGpu, monkeypatch: Patch
) -> None:
    """Of one handle for all, the defect, no later graph can be made."""
    if fault is not None:
        fault(monkeypatch)

    def twice() -> Any:
        capturer, (first, _), _ = capturer_of(gpu)
        kept = first()
        capturer.release()
        return kept, capturer.capture(lambda: torch.ones(2, device=CUDA))()

    if fault is None:
        assert twice()[1].tolist() == [1.0] * 2
    else:
        with pytest.raises((PretendError, RaceError)):
            twice()


def test_pools_are_given_back_with_their_graphs(gpu: PretendGpu) -> None:
    capturer, graphs, given = capturer_of(gpu)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    capturer.release()
    del graphs  # with their results
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == held - (2 << 20)


# Memory.


def test_memory_ends_and_has_holes(gpu: PretendGpu) -> None:
    gpu.memory = 100 << 20, 80 << 30
    made = [torch.empty(12 << 18, device=CUDA) for _ in range(8)]
    with pytest.raises(torch.cuda.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(12 << 18, device=CUDA)
    del made[::2]
    assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() == 48 << 20
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(60 << 18, device=CUDA)
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == 52 << 20


def test_new_memory_holds_garbage(gpu: PretendGpu) -> None:
    assert torch.empty(3, device=CUDA).isnan().all().tolist()


# NCCL.


class Replica:
    """A rank of a tensor-parallel replica whose layers end with an all-reduce, as captured on its GPU."""

    def __init__(self, comm: ThreadComm, job: Job, model: Any, agrees: bool) -> None:
        self.group: Any = nccl_of(job)("tp", comm.tp_rank, comm.tp_size)
        worst = (lambda outcome: worst_of_replica(comm, outcome)) if agrees else lambda outcome: outcome
        self.runner = TreeModel(model, attention="sdpa", shared=SharedWeights(worst=worst))
        like = KVCache(1, 32)
        self.runner.adapter.logits([Row.chain(0, 0, [1, 2], 1)], like)
        self.runner.allocate(1, 256, 64, like)
        comm.begin_gather_replica(torch.zeros(1, dtype=torch.int32))()
        self.group.eager_connect_single_device(CUDA)
        forward = model.model.layers[0].mlp.forward

        def reduced(hidden: torch.Tensor) -> torch.Tensor:
            out = forward(hidden).contiguous()
            self.group.allreduce([out]).wait()
            return out / comm.tp_size

        model.model.layers[0].mlp.forward = reduced

    def steps(self) -> list[Any]:
        found = []
        for count in (1, 5, 20):
            row = Row.chain(0, 3, [1] * count, 1)
            found.append(self.runner.evaluate([row], Selection.build([]), 0).tolist())
        return found


def run_replica(agrees: bool, fails: bool, releases: bool = True, patience: float = 30.0) -> list[Any]:
    """Per rank its results, its replays and why it captures no more; if it `fails`, rank 1 captures no second shape."""
    job, model = Job(patience), tiny_model(num_hidden_layers=1)

    def rank(comm: ThreadComm) -> Any:
        with PretendGpu() as machine:
            replica = Replica(comm, job, to_gpu(copy.deepcopy(model)), agrees)
            inner = replica.runner.model.forward

            def forward(**given: Any) -> Any:
                if fails and comm.tp_rank and machine.capturing is not None and machine.num_captures == 2:
                    raise torch.cuda.OutOfMemoryError("CUDA out of memory")
                return inner(**given)

            replica.runner.model.forward = forward
            found = replica.steps(), machine.num_replays, replica.runner.graph_reason
            if releases:
                replica.runner.release()
            replica.group.abort()
            return found

    return run_ranks(ThreadWorld(2, tp=2), rank, timeout=30.0)


@pytest.fixture
def no_registration(monkeypatch: Patch) -> None:
    for name in ("NCCL_GRAPH_REGISTER", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    nccl.prepare_environment(survives=False)


def test_ranks_replay_graphs_with_collectives(gpu: PretendGpu, no_registration: None) -> None:
    one, other = run_replica(agrees=True, fails=False)
    assert one == other and one[1] == 3 and one[2] is None


def test_a_failed_capture_of_one_rank_stops_nobody(gpu: PretendGpu, no_registration: None) -> None:
    one, other = run_replica(agrees=True, fails=True)
    assert one[0] == other[0] == run_replica(agrees=True, fails=False)[0][0]
    assert "another rank" in one[2] and "out of memory" in other[2]


def test_without_agreement_collectives_find_no_other(gpu: PretendGpu, no_registration: None) -> None:
    with pytest.raises((HangError, PretendError)):
        run_replica(agrees=False, fails=True, patience=0.5)


def test_buffers_that_are_registered_in_a_capture_wait_for_all(
    gpu: PretendGpu, no_registration: None, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")  # the default
    with pytest.raises(HangError, match="registration"):
        run_replica(agrees=True, fails=True, patience=0.5)


def test_an_abort_waits_for_graphs(gpu: PretendGpu, no_registration: None) -> None:
    with pytest.raises(HangError, match="abort of rank"):
        run_replica(agrees=True, fails=False, releases=False, patience=3.0)


def test_a_watchdogs_question_ends_a_capture_that_forbids_it(
    gpu: PretendGpu, no_registration: None, monkeypatch: Patch
) -> None:
    """Captures are of this thread alone; with torch's default, another thread's question makes them fail."""
    graph = torch.cuda.graph
    monkeypatch.setattr(graph_capture.torch.cuda, "graph", lambda *args, capture_error_mode, **how: graph(*args, **how))
    assert "watchdog" in run_replica(agrees=True, fails=False)[0][2]


WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"


@pytest.mark.parametrize("kept", [(), WATCHDOG[:1], WATCHDOG[1:], WATCHDOG], ids=["none", "errors", "key", "all"])
def test_the_watchdog_leaves_survivors_alone(kept: tuple[str, ...], gpu: PretendGpu, monkeypatch: Patch) -> None:
    """Rank 2 is lost in a gather; the two others leave the group and meet in another. `kept`: torch's defaults."""
    for name in WATCHDOG:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    nccl.prepare_environment(survives=True)
    for name in kept:
        monkeypatch.delenv(name)
    job = Job()

    def rank(comm: ThreadComm) -> list[int]:
        with PretendGpu():
            made: Any = nccl_of(job)("epoch 0", comm.rank, 3)
            payload = torch.full((1,), comm.rank, dtype=torch.int32, device=CUDA)
            if comm.rank == 2:
                made.eager_connect_single_device(CUDA)
                job.lose(2)
                return []
            work = made._allgather_base(torch.empty(3, dtype=torch.int32, device=CUDA), payload)
            while not work.is_completed():
                time.sleep(0.001)
            with pytest.raises(RuntimeError, match="remote process"):
                work.wait()
            made.abort()
            made = nccl_of(job)("epoch 1", comm.rank, 2)
            found = torch.empty(2, dtype=torch.int32, device=CUDA)
            made._allgather_base(found, payload).wait()
            return found.tolist()

    assert run_ranks(ThreadWorld(3), rank)[:2] == [[0, 1]] * 2
    assert bool(job.ended) == bool(kept), job.ended


def test_a_group_connects_in_its_first_collective(gpu: PretendGpu) -> None:
    """And waits there for all, as long as it takes."""
    lonely: Any = nccl_of(Job(patience=0.1))("epoch 1", 0, 2)
    assert not lonely.is_connected
    with pytest.raises(HangError, match="connect"):
        lonely.eager_connect_single_device(CUDA)


def test_a_result_that_nobody_waited_for_is_a_race(gpu: PretendGpu) -> None:
    alone: Any = nccl_of(Job())("epoch 0", 0, 1)
    payload, found = OnGpu(torch.ones(2)), OnGpu(torch.zeros(2))
    work = alone._allgather_base(found, payload)
    work.finish()
    with pytest.raises(RaceError):
        found.tolist()
    work.wait()
    assert found.tolist() == [1.0] * 2


# The gather of a step.


class Gathering:
    """A rank of two whose gathers go through NCCL, and what its device does, in order."""

    def __init__(self, comm: ThreadComm, job: Job, machine: PretendGpu, timeout: float = 30.0) -> None:
        made: Any = nccl_of(job)("lp", comm.rank, 2)
        made.eager_connect_single_device(CUDA)
        self.looks, self.loss = 0, ""
        self.group, self.machine = ProcessGroup(made, comm.rank, 2, CUDA, timeout, self.find_loss), machine
        self.payload = torch.full((3,), 7 + comm.rank, dtype=torch.int32, device=CUDA)

    def find_loss(self) -> str | None:
        self.looks += 1
        return self.loss or None


def gather_of_two(meet: Callable[[Gathering, int, threading.Event], Any], **how: Any) -> list[Any]:
    """What `meet` returns on two ranks, with an event that they share."""
    job, event = Job(), threading.Event()

    def rank(comm: ThreadComm) -> Any:
        with PretendGpu() as machine:
            return meet(Gathering(comm, job, machine, **how), comm.rank, event)

    return run_ranks(ThreadWorld(2), rank, timeout=30.0)


def copy_after_the_wait(patch: Patch) -> None:
    patch.setattr(Download, "begin", lambda self, words: words.cpu)


def copy_that_nobody_waits_for(patch: Patch) -> None:
    patch.setattr(Event, "synchronize", nothing)


def copy_before_the_collective(patch: Patch) -> None:
    patch.setattr(pretend_nccl.Work, "wait", lambda self: self.is_completed() and self.finish())


@pytest.mark.parametrize("fault", [None, copy_after_the_wait, copy_that_nobody_waits_for, copy_before_the_collective])
def test_a_gathers_copy_is_launched_before_the_others_come(
    fault: Callable[[Patch], None] | None, gpu: PretendGpu, monkeypatch: Patch
) -> None:
    """The device copies what it has gathered by itself; the host only looks for the copy's end."""
    if fault is not None:
        fault(monkeypatch)

    def meet(each: Gathering, rank: int, event: threading.Event) -> Any:
        if rank:
            event.wait(1)  # whose setting a fault may hinder
        found = []
        for _ in range(3):
            wait = each.group.begin_gather(each.payload)
            is_launched = len(each.machine._coming) == 1
            event.set()
            found.append((wait().tolist(), is_launched))
            each.payload += 10
        return found

    expected = [([[7 + step, 7 + step, 7 + step], [8 + step, 8 + step, 8 + step]], True) for step in (0, 10, 20)]
    if fault is None:
        assert gather_of_two(meet) == [expected] * 2
    else:
        with contextlib.suppress(RaceError, PretendError):
            assert gather_of_two(meet) != [expected] * 2


@pytest.mark.parametrize("end", ["lost", "found", "late"])
def test_a_gather_that_cannot_end_raises(end: str, gpu: PretendGpu, monkeypatch: Patch) -> None:
    """NCCL tells that a rank is lost, somebody else does, or nobody does: the copy behind it holds up no host."""
    monkeypatch.setattr("lpr.dist.group.SLICE", 0.02)

    def meet(each: Gathering, rank: int, event: threading.Event) -> Any:
        if rank:
            event.wait(20)
            if end == "lost":
                time.sleep(0.1)
                each.group._group.job.lose(1)
            return None
        wait = each.group.begin_gather(each.payload)
        event.set()
        each.loss = "rank 1 was lost" if end == "found" else ""
        with pytest.raises(CommError) as raised:
            wait()
        return str(raised.value), each.looks > 0

    said, has_looked = gather_of_two(meet, timeout=0.3 if end == "late" else 30.0)[0]
    wanted = {"lost": "another rank has ended", "found": "rank 1 was lost", "late": "no answer for 0 s"}
    assert wanted[end] in said and has_looked
