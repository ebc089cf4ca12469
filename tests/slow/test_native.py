"""The long tests of tests/native/test_native.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from lpr.config import TreeSizes
from tests.fakes.native_pair import PURE, Plan, run
from tests.fakes.paths import ROOT
from tests.native.test_native import NATIVE, PROGRAM, assert_equal, needs_native


@needs_native
def test_long_runs_are_equal() -> None:
    long = TreeSizes(window_size=8, guess_set_size=8, trie_nodes=64, trie_capacity=700, num_guesses=12)
    for adaptive in (False, True):
        plan = Plan(seed=5, sizes=long, num_steps=100, vocabulary=300, num_ranks=2, adaptive=adaptive)
        assert_equal(run(PURE, plan), run(NATIVE, plan))


@needs_native
def test_ranks_with_and_without_the_extension_work_together() -> None:
    """Their digests are compared in every step, so they take the same steps or stop with an error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = str(ROOT)
    ranks = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        more = {"LPR_PURE_PYTHON": rank, "OMP_NUM_THREADS": 1, "PYTHONPATH": root, **place}
        environment = {**os.environ, **{name: str(value) for name, value in more.items()}}
        command = [sys.executable, "-c", PROGRAM]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=root))
    try:
        said = [json.loads(process.communicate(timeout=300)[0].splitlines()[-1]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait(timeout=30)
    assert [is_native for is_native, _ in said] == [True, False]
    assert said[0][1] == said[1][1] and all(num_steps < 20 for _, num_steps in said[0][1])
