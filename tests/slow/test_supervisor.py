"""The supervisor and real processes: ranks are killed and stopped, and the job goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.fakes.supervised_job import PATIENCE, await_fact, check_outputs, children, place_of, supervised


@pytest.mark.timeout(900)
def test_a_killed_driver_and_a_stopped_rank_change_nothing(tmp_path: Path) -> None:
    """Three ranks. SIGKILL to the driver in the middle, SIGSTOP to another; replacements join, outputs are equal."""
    (tmp_path / "hold").touch()
    with supervised(tmp_path, "3", "1", "tests.fakes.supervised_worker", str(tmp_path), "80", "1") as job:
        first = await_fact(tmp_path, lambda fact: fact.get("tokens", 0) > 20)
        os.kill(first["pid"], signal.SIGKILL)
        killed = time.time()
        second = await_fact(tmp_path, lambda fact: "drives" in fact and fact["epoch"] > 0)
        assert second["drives"] == 1 and second["size"] == 2
        assert second["at"] - killed < 20, "0.1 s on a machine of its own"
        other = next(pid for pid in children(job.pid) if pid != second["pid"])
        os.kill(other, signal.SIGSTOP)
        stopped = time.time()
        full = await_fact(tmp_path, lambda fact: fact.get("size") == 3, after=stopped)
        assert full["epoch"] > second["epoch"] and full["beside"], "its group was connected while the mesh worked"
        (tmp_path / "hold").unlink()
        assert job.wait(timeout=PATIENCE) == 0
        assert other not in children(os.getpid()) and not Path(f"/proc/{other}").exists(), "no process is left"
    check_outputs(tmp_path)


def test_a_killed_rank_of_a_sharded_replica_is_its_replicas_loss(tmp_path: Path) -> None:
    """Two replicas of two ranks: the other replica goes on, and a new one of two ranks joins it."""
    (tmp_path / "hold").touch()
    with supervised(tmp_path, "2", "2", "tests.fakes.supervised_worker", str(tmp_path), "80", "2") as job:
        first = await_fact(tmp_path, lambda fact: fact.get("tokens", 0) > 20)
        before = children(job.pid)
        os.kill(next(pid for pid in before if place_of(pid) == (0, 1)), signal.SIGKILL)
        killed = time.time()
        second = await_fact(tmp_path, lambda fact: "drives" in fact and fact["epoch"] > 0)
        assert second["drives"] == 2 and second["size"] == 1
        gone = Path(f"/proc/{first['pid']}/fd")
        while gone.exists():  # it is killed at once, and a busy machine takes its time
            assert time.time() - killed < 20
            time.sleep(0.02)
        full = await_fact(tmp_path, lambda fact: fact.get("size") == 2, after=killed)
        assert full["epoch"] > second["epoch"] and full["beside"] and len(set(children(job.pid)) - set(before)) == 2
        (tmp_path / "hold").unlink()
        assert job.wait(timeout=PATIENCE) == 0
    check_outputs(tmp_path)
