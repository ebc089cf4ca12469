"""The parts of a mesh that survives: the rendezvous, groups that break, and what the supervisor makes of exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lpr.dist import group, heartbeat, rendezvous
from lpr.dist.comm import ProcessComm
from lpr.dist.errors import CommError, DesyncError
from lpr.dist.group import FindLoss
from lpr.dist.membership import Membership
from lpr.dist.places import DOOR, process_state, rank_environment
from lpr.dist.rendezvous import Arrival, Decision, Evaluated, Member, Rendezvous
from lpr.dist.supervisor import BACKOFF, Replica, Restarts, Supervisor
from lpr.engine.exchange import check_replica
from lpr.model.step_inputs import Row
from lpr.protocol import MeshError
from tests.fakes.elastic_world import DirectHeartbeat, hash_store
from tests.fakes.paths import ROOT


@pytest.fixture
def members() -> list[Rendezvous]:
    store = hash_store()
    return [Rendezvous(store, Member(replica)) for replica in range(3)]


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except CommError as failure:
            results[index] = failure

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    return results


def test_survivors_agree_on_who_is_left(members: list[Rendezvous]) -> None:
    members[1].mark_dead(1, "it was killed")
    first, third = in_threads(
        [
            lambda: members[0].meet(1, [0, 1, 2], Arrival(7), 30),
            lambda: members[2].meet(1, [0, 1, 2], Arrival(8), 30),
        ]
    )
    assert first == third == Decision([0, 2])
    assert members[0].arrivals(1, [0, 2]) == {Member(0): Arrival(7), Member(2): Arrival(8)}
    with pytest.raises(CommError, match="takes part no more: it was killed"):
        members[1].meet(1, [0, 1, 2], Arrival(7), 30)


def test_who_does_not_come_is_declared_dead(members: list[Rendezvous]) -> None:
    assert members[0].meet(1, [0, 1], Arrival(0), 0.1) == Decision([0])
    assert "did not come to epoch 1" in str(members[2].dead_reason(1))


def test_the_first_decision_counts(members: list[Rendezvous]) -> None:
    planned = Decision([0, 1, 5], planned=True)
    assert members[0].decide(3, planned) == planned
    assert members[1].decide(3, Decision([1])) == planned
    assert members[2].meet(3, [0, 1, 2], Arrival(4), 30) == planned, "also for one that comes late"


def test_a_rank_of_a_replica_is_missed_like_all_of_it() -> None:
    store = hash_store()
    pair = Rendezvous(store, Member(0, 1), tp_size=2)
    with pytest.raises(CommError, match="replica 0 takes part no more"):
        pair.meet(1, [0], Arrival(0), 0.1)  # its other rank does not come


def test_ranks_that_wait_for_each_other_in_a_layer_name_the_one_with_other_rows() -> None:
    """On a GPU nobody else does, if they have replayed steps of other shapes: their gather never begins."""
    store = hash_store()
    ranks = [Rendezvous(store, Member(1, tp_rank), tp_size=3) for tp_rank in range(3)]

    def wait(rank: int) -> None:
        fake: Any = FakeGroup(["Operation timed out!"])
        looks = iter([lambda: None, lambda: "the test is over"])
        find_loss = lambda: ranks[rank].check_rows() or next(looks)()  # type: ignore[func-returns-value]  # noqa: E731
        group.ProcessGroup(fake, 0, 2, torch.device("cpu"), 60, find_loss).gather(torch.zeros(1, dtype=torch.int32))

    for rank, (num_forwards, digest) in enumerate([(7, 40), (8, 50), (7, 40)]):
        ranks[rank].evaluated = Evaluated(num_forwards, digest)
    for rank in range(3):
        with pytest.raises(CommError, match="the test is over"):  # one of them has not come as far
            wait(rank)
    ranks[1].evaluated = Evaluated(7, -50)
    for rank in (1, 0, 2):
        with pytest.raises(DesyncError, match="state of rank 4 differs from that of the other 2 of 3"):
            wait(rank)
    ranks[1].evaluated = Evaluated(7, 40)
    with pytest.raises(CommError, match="the test is over"):
        wait(1)


@pytest.mark.parametrize("survives", [False, True])
@pytest.mark.parametrize("differ", [False, True])
def test_a_gather_that_does_not_begin_ends_by_the_rows_or_by_its_time_out(survives: bool, differ: bool) -> None:
    """Both ranks of a replica have launched their steps, and no layer of them ends."""
    store = hash_store()

    def rank(tp_rank: int) -> Any:
        rendezvous = Rendezvous(store, Member(0, tp_rank), 2)
        fake: Any = FakeGroup(["Operation timed out!"])
        connect = lambda name, rank, size, find_loss, is_start: group.ProcessGroup(  # noqa: E731
            fake, rank, size, torch.device("cpu"), 1.0, find_loss
        )
        members = Membership(rendezvous, DirectHeartbeat(rendezvous), connect, 1, survives=survives)
        comm = ProcessComm(members, tp_rank, 2)
        check_replica(comm, [Row.chain(0, 4, [5, 6 + tp_rank * differ], 1)], at_once=False)
        try:
            comm.gather(torch.zeros(1, dtype=torch.int32))
        except MeshError as failure:
            return type(failure), str(failure).partition(" differs")[0]

    named = DesyncError, "the replicated state of rank 1"
    late = CommError, "another rank hangs: no answer for 1 s"
    assert in_threads([lambda: rank(0), lambda: rank(1)]) == [named if differ else late] * 2


def test_long_messages_come_in_pieces(members: list[Rendezvous]) -> None:
    data = os.urandom(2 * rendezvous.PIECE_BYTES + 17)
    members[0].store.put("state", data)
    assert members[1].store.get("state", 5, lambda: None) == data
    for number in range(rendezvous.MOST_MESSAGES):
        members[0].store.put(f"later {number}", b"")
    with pytest.raises(CommError, match="state was not written: rank 0 was lost"):
        members[1].store.get("state", 5, lambda: "rank 0 was lost")


def test_silence_is_noticed_and_a_pause_of_ones_own_is_not_blamed_on_others(
    members: list[Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    watch = heartbeat.Watch(members[0])

    def silent_after(seconds: float, *beating: Rendezvous) -> list[int]:
        now[0] += seconds
        for number, each in enumerate(beating):
            each.beat(int(10 * now[0]) + number)
        return watch.silent([0, 1])

    assert [silent_after(1, *members[:2]) for _ in range(3)] == [[]] * 3
    assert [silent_after(1, members[0]) for _ in range(6)] == [[], [], [], [], [1], [1]]
    assert silent_after(60) == [], "this process stood still"
    assert [silent_after(1, members[0]) for _ in range(6)][-1] == [1]


class FakeGroup:
    """A torch process group that says what is asked of it."""

    def __init__(self, outcome: list[Any]) -> None:
        self.outcome = outcome
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1

    def _allgather_base(self, gathered: torch.Tensor, payload: torch.Tensor) -> FakeGroup:
        gathered.copy_(payload.repeat(2))
        return self

    def wait(self, limit: timedelta | None = None) -> None:
        if self.outcome[0] is not None:
            raise RuntimeError(self.outcome[0])

    def is_completed(self) -> bool:
        return self.outcome[0] != "Operation timed out!"


def test_a_wait_ends_when_a_member_is_lost() -> None:
    """Whatever the backend does: gloo's aborted collectives, for one, wait for their own time-out."""
    outcome: list[Any] = [None]
    fake, looks = FakeGroup(outcome), iter([None, None, "rank 1 was lost"])
    ranks = group.ProcessGroup(fake, 0, 2, torch.device("cpu"), 60, lambda: next(looks))
    first = ranks.gather(torch.tensor([4, 5], dtype=torch.int32))
    outcome[0] = "Operation timed out!"
    with pytest.raises(CommError, match="rank 1 was lost"):
        ranks.gather(torch.tensor([6, 7], dtype=torch.int32))
    assert first.tolist() == [[4, 5], [4, 5]], "a failed gather leaves the one before, which may have to be handed on"
    kept = len(group.abandoned)
    ranks.close()
    assert fake.aborted == 1 and len(group.abandoned) == kept + 1, "destroying it would wait for the collective"
    group.abandoned.pop()


def test_a_failed_collective_is_one_line() -> None:
    fake = FakeGroup(["Connection closed by peer\nat line 3"])
    ranks = group.ProcessGroup(fake, 0, 2, torch.device("cpu"), 60, lambda: None)
    with pytest.raises(CommError, match="^another rank has ended or hangs: Connection closed by peer$"):
        ranks.gather(torch.zeros(1, dtype=torch.int32))


def test_a_collective_that_ends_at_the_end_of_a_slice_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo's wait has timed out, and the collective ends before the rank looks: its mesh fell apart there."""
    monkeypatch.setattr(group, "SLICE", 0.001)
    store = hash_store()
    device = torch.device("cpu")
    ranks = in_threads([lambda r=rank: group.connect(store, r, 2, device, 30, lambda: None) for rank in (0, 1)])
    turns = threading.Barrier(2)

    def gather_often(rank: int) -> int:
        for number in range(400):
            turns.wait(30)
            if rank:
                time.sleep(0.0008 + number % 16 * 0.00004)
            found = ranks[rank].gather(torch.full((1,), rank, dtype=torch.int32))
            assert found.tolist() == [[0], [1]]
        return 400

    assert in_threads([lambda: gather_often(0), lambda: gather_often(1)]) == [400, 400]


def test_a_wait_on_a_gpu_gives_nccl_no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that timed out would end the communicator, though the others may just be filling a long prompt."""
    looks = iter([False] * 5 + [True])
    work = SimpleNamespace(is_completed=lambda: next(looks), wait=lambda *limit: asked.append(limit))
    asked: list[Any] = []
    ranks = group.ProcessGroup(None, 0, 2, torch.device("cuda", 0), 60, lambda: None)
    monkeypatch.setattr(group, "SLICE", 0.0)
    ranks.wait(work)
    assert asked == [()] and next(looks, None) is None


def test_a_rank_that_never_comes_does_not_hold_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for the members of a group ends as soon as one of them is known to be lost."""
    began = time.monotonic()
    with pytest.raises(CommError, match="did not find each other: it was killed"):
        group.connect(hash_store(), 0, 2, torch.device("cpu"), 60.0, lambda: "it was killed")
    assert time.monotonic() - began < 40
    group.abandoned.pop()


class NotedGroup(group.Group):
    """Notes when it is closed."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Meshes:
    """Replica 0, alone in its mesh, and groups with others that connect when a test says so."""

    def __init__(self) -> None:
        self.store = hash_store()
        self.connected: dict[str, threading.Event] = {}
        self.ended: dict[str, str] = {}
        """By a group's name, the loss that ended its search for its ranks."""
        self.losses: list[FindLoss] = []
        rendezvous = Rendezvous(self.store, Member(0))
        rendezvous.decide(0, Decision([0]))
        self.driver = Membership(rendezvous, DirectHeartbeat(rendezvous), self.connect, 1, connects_beside=True)
        self.driver._is_loaded = True

    def connect(self, name: str, rank: int, size: int, find_loss: FindLoss, is_start: bool) -> group.Group:
        self.losses.append(find_loss)
        connected = self.connected.setdefault(name, threading.Event())
        while name.startswith("beside/") and not connected.wait(0.001):
            if loss := find_loss():
                self.ended[name] = loss
                raise CommError(loss)
        return NotedGroup()

    def offer(self, *newcomers: int) -> None:
        self.driver._rendezvous.offer(newcomers)

    def invited(self, *newcomers: int) -> Any:
        return self.driver.invite(newcomers, lambda replica: False)

    def is_over(self) -> None:
        until = time.monotonic() + 30
        while not self.driver._beside.is_over:  # type: ignore[union-attr]
            assert time.monotonic() < until
            time.sleep(0.001)


def test_newcomers_are_taken_in_once_they_are_connected() -> None:
    """The old group stays open until the first gather of the new mesh: others may still receive the command from it."""
    meshes = Meshes()
    meshes.offer(1)
    driver, old = meshes.driver, meshes.driver._group
    assert meshes.invited(1) is None and meshes.invited(1) is None, "they connect"
    driver.run(lambda ranks: ranks.gather(torch.zeros(1, dtype=torch.int32)))
    assert not old.is_closed, "meanwhile the mesh works in its group"  # type: ignore[union-attr]
    meshes.connected["beside/1"].set()
    meshes.is_over()
    assert meshes.invited(1) == ([1], 1)
    driver.take_in([1], beside=1)
    assert driver.adopt() == [0, None]
    driver.meet(b"state")
    new = driver._group
    assert new is not old and list(meshes.connected) == ["epoch/0", "beside/1"], "no group is connected in the pause"
    assert meshes.losses[1]() is None
    driver._rendezvous.mark_dead(1, "it was killed")
    assert "it was killed" in str(meshes.losses[1]()), "a group that is taken asks for the losses of its own mesh"
    assert not old.is_closed and driver._expected == [1]  # type: ignore[union-attr]
    driver.run(lambda ranks: ranks.gather(torch.zeros(1, dtype=torch.int32)))
    assert old.is_closed and not driver._expected and not new.is_closed  # type: ignore[union-attr]


def test_a_newcomer_that_dies_while_it_connects_holds_nobody() -> None:
    """Its group is dropped; the next newcomer has another."""
    meshes = Meshes()
    meshes.offer(1, 2)
    assert meshes.invited(1, 2) is None
    meshes.offer(2)
    assert meshes.invited(2) == ([2], 0), "one that lives is taken in as without such a group"
    meshes.offer(3)
    assert meshes.invited(3) is None
    meshes.connected["beside/2"].set()
    meshes.is_over()
    assert meshes.invited(3) == ([3], 2) and meshes.ended == {"beside/1": "the mesh has changed"}


def test_a_group_of_another_mesh_is_not_taken() -> None:
    """Replica 1 has come by itself when the command for replica 2 arrives: their group has no place for it."""
    meshes = Meshes()
    meshes.offer(2)
    assert meshes.invited(2) is None
    meshes.connected["beside/1"].set()
    meshes.is_over()
    driver = meshes.driver
    driver._enter(1, [0, 1])
    driver.take_in([2], beside=1)
    driver.meet(b"state")
    assert driver.replicas == [0, 1, 2] and list(meshes.connected)[-1] == "epoch/2"


# The supervisor.


def supervise(tmp_path: Path, code: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
    (tmp_path / "ranked.py").write_text(code)
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "GROUP_RANK": "7"}
    return subprocess.run(
        [sys.executable, "-m", "lpr.dist.supervisor", str(num_ranks), "1", "ranked"],
        env=variables, capture_output=True, text=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip


def test_a_place_is_not_given_up_while_a_replica_works() -> None:
    """Replicas that are killed again and again while they load are replaced in the end."""
    restarts = Restarts(2)
    for _ in range(7):
        assert restarts.plan(0)
        assert restarts.due.pop(0) <= time.monotonic() + BACKOFF[-1]
    assert restarts.plan(0, is_last=True), "place 1 has not been tried again"
    assert [restarts.plan(1, is_last=True) for _ in range(3)] == [True, True, False]
    assert Restarts(1).plan(0, had_loaded=True, is_last=True)
    assert not Restarts(1).plan(0, is_refused=True, is_last=True)
    restarts = Restarts(2)
    restarts.drafting.add(1)
    assert [restarts.plan(0, is_last=True) for _ in range(3)] == [True, True, False], "place 1 cannot serve alone"


def test_a_replica_that_only_drafts_begins_no_mesh(members: list[Rendezvous]) -> None:
    supervisor, drafts = Supervisor(["rank"], 2), Rendezvous(members[0].store._store, Member(3))
    supervisor._rendezvous = members[0]
    members[0].decide(0, Decision([0, 1]))
    supervisor._replicas = {2: Replica(2, 0), 3: Replica(3, 1)}
    for serving, expected in ((False, None), (True, Decision([2]))):
        if serving:
            members[2].mark_ready()
        else:
            drafts.mark_ready(serves=False)
        supervisor._note_ready()
        supervisor._found_or_offer()
        assert members[0].decision(1) == expected
    supervisor._found_or_offer()
    assert members[0].offered() == (3,) and members[2].welcomed() == 1 and drafts.welcomed() is None


def test_a_supervisor_leaves_no_rank_behind(tmp_path: Path) -> None:
    """Nor when it is killed: ranks that are loading notice before they meet, the others at once."""
    code = "from lpr.dist.places import die_with_parent\nimport os, time\ndie_with_parent()\n"
    (tmp_path / "ranked.py").write_text(code + "open(str(os.getpid()) + '.pid', 'w').close()\ntime.sleep(300)\n")
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    for number in (signal.SIGTERM, signal.SIGKILL):
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "lpr.dist.supervisor", "2", "1", "ranked"], env=variables, cwd=tmp_path
        )
        until = time.monotonic() + 100
        while len(list(tmp_path.glob("*.pid"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        ranks = [int(path.stem) for path in tmp_path.glob("*.pid")]
        assert len(ranks) == 2
        supervisor.send_signal(number)
        assert supervisor.wait(timeout=100) == (128 + number if number == signal.SIGTERM else -number)
        while any(process_state(pid) not in ("", "Z") for pid in ranks) and time.monotonic() < until:
            time.sleep(0.05)
        assert all(process_state(pid) in ("", "Z") for pid in ranks)
        for path in tmp_path.glob("*.pid"):
            path.unlink()


def test_ranks_do_not_see_another_launcher() -> None:
    theirs = {"TORCHELASTIC_RUN_ID": "x", "GROUP_RANK": "3", "MASTER_PORT": "1"}
    ours = {"HOME": "/h", "OMP_NUM_THREADS": "5", "NCCL_SOCKET_IFNAME": "eth1"}
    found = rank_environment(theirs | ours, rank=7, local_rank=3, num_ranks=4, door=12)
    assert ours.items() <= found.items() and not theirs.keys() & found.keys()
    assert [found[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", DOOR)] == ["7", "3", "4", "12"]
    assert found["GLOO_SOCKET_IFNAME"] in ("lo", "lo0"), "the ranks' sockets stay on this machine"
