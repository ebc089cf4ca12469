"""The long tests of tests/dist/test_supervisor.py."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.dist.test_supervisor import PATIENCE, await_fact, check_outputs, children, place_of, supervised


def test_a_killed_rank_of_a_sharded_replica_is_its_replicas_loss(tmp_path: Path) -> None:
    """Two replicas of two ranks: the other replica goes on, and a new one of two ranks joins it."""
    (tmp_path / "hold").touch()
    with supervised(tmp_path, "2", "2", "tests.fakes.supervised_worker", str(tmp_path), "80", "2") as job:
        first = await_fact(tmp_path, lambda fact: fact.get("tokens", 0) > 20)
        before = children(job.pid)
        os.kill(next(pid for pid in before if place_of(pid) == (0, 1)), signal.SIGKILL)
        killed = time.time()
        second = await_fact(tmp_path, lambda fact: "drives" in fact and fact["epoch"] > 0)
        assert second["drives"] == 2 and second["size"] == 1 and not Path(f"/proc/{first['pid']}/fd").exists()
        full = await_fact(tmp_path, lambda fact: fact.get("size") == 2, after=killed)
        assert full["epoch"] > second["epoch"] and len(set(children(job.pid)) - set(before)) == 2
        (tmp_path / "hold").unlink()
        assert job.wait(timeout=PATIENCE) == 0
    check_outputs(tmp_path)
