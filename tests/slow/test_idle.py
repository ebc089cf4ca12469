"""The long tests of tests/dist/test_idle.py."""

from __future__ import annotations

import json
import signal

import pytest

from tests.dist.test_idle import line_of, ranks_of
from tests.dist.test_idle import test_a_lost_rank_is_noticed_within_seconds as check_lost


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
    ("lost", "how", "then"), [(1, signal.SIGSTOP, "wait"), (0, signal.SIGKILL, "wait"), (1, signal.SIGSTOP, "decode")]
)
def test_a_rank_that_stops_and_a_lost_driver_are_noticed_within_seconds(
    lost: int, how: signal.Signals, then: str
) -> None:
    check_lost(lost, how, then)
