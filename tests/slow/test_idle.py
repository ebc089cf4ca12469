"""Ranks without work: they outlive every time-out, cost nothing, and notice within seconds when one is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.paths import ROOT


@contextmanager
def ranks_of(timeout: float, idle: float, then: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks, started by hand: a launcher would end the job itself when a rank dies."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
              "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "fakes" / "idle_worker.py"), str(timeout), str(idle), then],
            cwd=ROOT, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=30)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_an_idle_job_outlives_its_timeouts_and_then_answers() -> None:
    """Three time-outs of a step pass without work."""
    with ranks_of(timeout=4, idle=13, then="answer") as ranks:
        assert line_of(ranks[0]) == "idle"
        found = json.loads(line_of(ranks[0]))
        other = json.loads(line_of(ranks[1]))
        assert [process.wait(timeout=60) for process in ranks] == [0, 0]
    assert found["equal"]
    assert found["cpu"] < 0.7 and other["seconds"] > 12, "heartbeats are next to nothing"
    assert other["cpu"] < 0.5 * other["seconds"], "it worked for a while, and then it waited"


@pytest.mark.parametrize(
    ("lost", "how", "then"),
    [
        (0, signal.SIGKILL, "wait"),
        (1, signal.SIGSTOP, "decode"),
    ],
)
def test_a_lost_rank_is_noticed_within_seconds(lost: int, how: signal.Signals, then: str) -> None:
    """Idle or not, long before the time-out of a step."""
    with ranks_of(timeout=300, idle=0.5, then=then) as ranks:
        assert line_of(ranks[0]) == "idle"
        time.sleep(1)
        ranks[lost].send_signal(how)
        at = time.time()
        found = json.loads(line_of(ranks[1 - lost]))
        assert found["at"] - at < 8, "4 s without a heartbeat, and a busy machine"
        assert "ended" in found["failure"] and "\n" not in found["failure"], found
        assert ranks[1 - lost].wait(timeout=30) == 1
