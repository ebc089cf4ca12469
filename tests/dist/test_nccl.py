"""NCCL's groups without NCCL: their settings, when they connect, and the order in which a rank leaves."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lpr.dist import group, heartbeat, nccl, runtime
from lpr.dist.errors import CommError
from lpr.dist.heartbeat import Heartbeat
from lpr.engine.exchange import worst_of_replica
from lpr.model.graph_capture import CudaCapturer, Program
from lpr.model.runner import SharedWeights, TreeModel
from lpr.model.sampling.selection import Selection
from lpr.model.self_check import self_check
from lpr.model.step_inputs import Row
from lpr.model.transfer import Upload
from tests.fakes.fake_graphs import FakeCapturer
from tests.fakes.models import tiny_model
from tests.fakes.worlds import ThreadComm, ThreadWorld, run_ranks
from tests.model.test_gpu_defects import TWO, FakeGroup, groups

__all__ = ["groups"]

WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING"


# Settings.


@pytest.mark.parametrize("survives", [False, True])
def test_the_watchdog_leaves_a_mesh_that_survives_alone(survives: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default it ends the process of a rank whose group is broken, and those of other ranks."""
    at_first_group: dict[str, str | None] = {}

    def connect(*_: Any, **__: Any) -> Any:
        at_first_group.update({name: os.environ.get(name) for name in (*WATCHDOG, "NCCL_GRAPH_REGISTER")})
        raise RuntimeError("no further")

    for name in (*WATCHDOG, "NCCL_GRAPH_REGISTER", "NCCL_RUNTIME_CONNECT"):
        monkeypatch.setenv(name, "unset")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(runtime, "connect_store", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(runtime, "Rendezvous", lambda *_: None)
    monkeypatch.setattr(runtime, "_count_sharing", lambda *_: (1, 1))
    monkeypatch.setattr(runtime.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(runtime, "Membership", connect)
    monkeypatch.setattr(runtime, "die_with_parent", lambda: None)
    monkeypatch.setenv(runtime.SUPERVISED, str(os.getppid()))
    world = runtime.World(rank=0, size=2, local_rank=0, attempt=0, launched=True, supervised=survives)
    with pytest.raises(runtime.InputError, match="no further"), runtime.join(world, "cuda:0", 5.0):
        pass
    assert [at_first_group[name] for name in WATCHDOG] == ["0" if survives else None] * 3
    assert at_first_group["NCCL_GRAPH_REGISTER"] == "0"


# Groups connect when they are made.


def test_what_the_making_of_a_group_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(*_: Any) -> Any:
        raise ValueError("no such interface")

    monkeypatch.setattr(group, "make_group", make)
    with pytest.raises(ValueError, match="no such interface"):
        group.connect(SimpleNamespace(), 0, 2, torch.device("cpu"), 1.0, lambda: None)  # type: ignore[arg-type]


class FakeNccl(FakeGroup):
    """NCCL as torch has it: the constructor only notes, and the first collective connects."""

    class Options:
        _timeout: timedelta | None = None

    connects = threading.Event()
    """Set while peers answer."""

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        super().__init__([])
        self.options, self.is_connected, self.size = options, False, size

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.done.append(str(device))
        self._connect()

    def _connect(self) -> None:
        self.connects.wait(60)
        self.is_connected = True

    def _allgather_base(self, gathered: torch.Tensor, payload: torch.Tensor) -> FakeGroup:
        if not self.is_connected:
            self._connect()
        self.done.append("gather")
        gathered.copy_(payload.repeat(self.size))
        return self


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch) -> type[FakeNccl]:
    """NCCL and a GPU whose tensors lie on the CPU."""
    monkeypatch.setattr(FakeNccl, "connects", threading.Event())
    FakeNccl.connects.set()
    monkeypatch.setattr(nccl.dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    for name in ("empty", "full"):
        make = getattr(torch, name)
        monkeypatch.setattr(nccl.torch, name, lambda *args, make=make, device=None, **how: make(*args, **how))
    return FakeNccl


def test_gpus_meet_in_connected_nccl_groups_of_their_own(fake_nccl: type[FakeNccl]) -> None:
    """Each epoch's is a new one, has done a collective, and NCCL's time-out never ends it."""
    found = group.make_group("store", 1, 3, torch.device("cuda:1"), 12.0)  # type: ignore[arg-type]
    assert found.done == ["cuda:1", "gather"] and found.options._timeout > timedelta(days=1)
    group.abort_group(found)
    assert found.done[-1] == "abort"


def connects_when_first_used(*_: Any) -> FakeNccl:
    return FakeNccl("store", 0, 2, FakeNccl.Options())


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_second_loss_while_survivors_connect_does_not_block_them(
    is_lazy: bool, fake_nccl: type[FakeNccl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lazy group, the defect, blocks in the first gather, where nothing looks for losses."""
    fake_nccl.connects.clear()
    if is_lazy:
        monkeypatch.setattr(group, "make_group", connects_when_first_used)
    failures: list[str] = []
    device = torch.device("cpu" if is_lazy else "cuda:0")  # where the payload is

    def meet() -> None:
        try:
            made = group.connect("store", 0, 2, device, 60.0, lambda: "rank 1 was lost")  # type: ignore[arg-type]
            made.gather(torch.zeros(1, dtype=torch.int32))
        except CommError as failure:
            failures.append(str(failure))

    kept = len(group.abandoned)
    survivor = threading.Thread(target=meet, daemon=True)
    survivor.start()
    survivor.join(1.0)
    assert survivor.is_alive() == is_lazy
    fake_nccl.connects.set()
    survivor.join(10)
    assert failures == ([] if is_lazy else ["the ranks did not find each other: rank 1 was lost"])
    for left in group.abandoned[kept:]:
        left.join(10)  # while the fakes stand: without them its first tensor would be made on a GPU
    del group.abandoned[kept:]


@pytest.mark.parametrize("world_rank", range(4))
def test_the_group_of_a_replica_holds_its_ranks_alone(
    world_rank: int, groups: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the whole world, the defect, cannot be made again without a replica that is lost."""
    made: list[tuple[Any, ...]] = []

    def no_further(backend: str, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        store.set("seen", str(rank))
        made.append((rank, world_size))
        raise RuntimeError("no further")

    monkeypatch.setattr(group.dist, "init_process_group", no_further)
    world = runtime.World(rank=world_rank, size=4, local_rank=world_rank, attempt=0, launched=True)
    with pytest.raises(runtime.InputError, match="no further"), runtime.join(world, "cpu", 5.0, tp=2):
        pass
    replica, rank = divmod(world_rank, 2)
    assert made == [(rank, 2)]
    assert runtime.connect_store(world, timedelta(0)).get(f"replica/{replica}/seen") == str(rank).encode()


# A rank that fails leaves: graphs first, then communicators, and else the process.


class Captured:
    """A graph that holds a collective."""

    def __init__(self, done: list[Any]) -> None:
        self.done, self.is_reset = done, False

    def reset(self) -> None:
        self.done.append("reset")
        self.is_reset = True


class PollingGroup(FakeGroup):
    """Its abort waits, as NCCL's does, until no graph holds a collective of it."""

    graphs: list[Captured] = []

    def abort(self) -> None:
        while not all(graph.is_reset for graph in self.graphs):
            time.sleep(0.01)
        super().abort()


class Model:
    """What has captured graphs; the traceback of an error keeps it alive."""

    def __init__(self, capturer: CudaCapturer) -> None:
        self.capturer = capturer

    def release(self) -> None:
        self.capturer.release()


@pytest.fixture
def captured(groups: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Callable[[Any], Model]]:
    """What is done, and a function that makes a model whose graph holds a collective of the groups."""
    graph = Captured(groups)
    monkeypatch.setattr(PollingGroup, "graphs", [graph])
    monkeypatch.setattr(runtime.group, "make_group", lambda *_: PollingGroup(groups))
    for name in ("Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: object())

    def make(comm: Any) -> Model:
        model = Model(CudaCapturer(torch.device("cuda", 0)))
        model.capturer._graphs.add(graph)
        comm.before_close(model.release)
        return model

    return groups, make


@pytest.mark.parametrize("ends_well", [False, True])
def test_graphs_go_before_the_communicators_of_their_collectives(
    ends_well: bool, captured: tuple[list[Any], Callable[[Any], Model]]
) -> None:
    done, make = captured
    with contextlib.suppress(ZeroDivisionError), runtime.join(TWO, "cpu", 60.0) as comm:
        model = make(comm)
        assert ends_well or model.capturer.device.index / 0
    assert done == (["gather"] if ends_well else []) + ["reset", "abort"]


def test_a_communicator_that_does_not_end_ends_the_process(
    captured: tuple[list[Any], Callable[[Any], Model]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The defect put back: nobody releases the graphs, and the abort polls for ever."""
    done, make = captured
    codes: list[int] = []
    monkeypatch.setattr(runtime.os, "_exit", codes.append)
    monkeypatch.setattr(runtime, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(Model, "release", lambda _: None)
    with pytest.raises(ZeroDivisionError), runtime.join(TWO, "cpu", 60.0) as comm:
        model = make(comm)
        raise ZeroDivisionError(repr(model))
    said = capsys.readouterr().err
    assert codes == [1] and done == [] and "ZeroDivisionError" in said and "a communicator does not end" in said
    PollingGroup.graphs[0].reset()


def test_a_rank_that_hangs_in_its_device_does_not_beat_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have declared its replica dead, and its main thread never looks."""
    monkeypatch.setattr(heartbeat, "STUCK_AFTER", 0.05)
    monkeypatch.setattr(heartbeat, "BEAT_EVERY", 0.01)
    said: list[str] = []
    ended = threading.Event()

    class Declared:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: {"members": [], "offered": ()}.get(name)

        def check_self(self) -> None:
            raise CommError("replica 0 takes part no more")

    beating = Heartbeat(Declared, lambda failure: (said.append(failure), ended.set())[1])  # type: ignore[arg-type]
    beating.watch(0, [])
    beating.start()
    assert ended.wait(10) and said == ["replica 0 takes part no more"]


# Ranks that share weights agree on what is captured.


class SometimesFailing(FakeCapturer):
    """Cannot capture the program with the number `fails_at`."""

    fails_at = -1
    num_recorded = 0
    """Runs of programs that a GPU only records."""

    def capture(self, program: Program) -> Program:
        if self.num_captures == self.fails_at:
            self.num_captures += 1
            program()
            raise RuntimeError("CUDA error: out of memory")
        self.num_recorded += 1
        return super().capture(program)


def collectives_of_ranks(agrees: bool) -> list[tuple[int, str | None]]:
    """Per rank of a replica, one of which fails to capture its second shape: its runs of the model, and its reason."""

    def rank(comm: ThreadComm) -> tuple[int, str | None]:
        shared = SharedWeights(worst=lambda outcome: worst_of_replica(comm, outcome)) if agrees else None
        runner = TreeModel(tiny_model(), attention="sdpa", shared=shared)
        runner.capturer = captured = SometimesFailing()
        captured.fails_at = 1 if comm.tp_rank else -1
        runner.allocate(1, 256, 64, self_check(runner))
        assert runner.graphs is not None
        runs: list[Any] = []
        inner = runner.model.forward
        runner.model.forward = lambda **given: (runs.append(1), inner(**given))[1]
        for count in (1, 5, 20, 5, 1):
            row = Row(0, 3, [1] * count, list(range(-1, count - 1)), list(range(3, 3 + count)), 1)
            runner.evaluate([row], Selection.build([]), 0)
        return len(runs) + captured.num_replays - captured.num_recorded, runner.graph_reason

    return run_ranks(ThreadWorld(2, tp=2), rank)


def test_ranks_that_share_weights_run_equal_numbers_of_collectives_after_a_failed_capture() -> None:
    """A rank that captures runs the model once more than one that does not, and its all-reduces would find no other."""
    (one, reason), (other, its_own) = collectives_of_ranks(agrees=True)
    assert one == other > 5
    assert its_own == "CUDA error: out of memory" and reason == "another rank of this replica could not capture a step"
    (one, _), (other, _) = collectives_of_ranks(agrees=False)
    assert one != other, "the defect put back"


@pytest.mark.parametrize("asks_for_its_device", [True, False])
def test_an_upload_is_marked_on_its_own_devices_stream(
    asks_for_its_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may have another device current, whose stream, the defect, knows nothing of the copy."""
    recorded: list[Any] = []
    event = SimpleNamespace(record=lambda stream=None: recorded.append(stream), synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    current = "cuda:0"
    stream_of = lambda device=None: f"stream of {device if asks_for_its_device else current}"  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)

    class There:
        """A tensor of the second GPU."""

        device, shape, dtype = torch.device("cuda", 1), (4,), torch.int32

        def __getitem__(self, _: Any) -> Any:
            return torch.zeros(4, dtype=torch.int32)

    Upload(There()).send(4)  # type: ignore[arg-type]
    assert (recorded == ["stream of cuda:1"]) == asks_for_its_device
