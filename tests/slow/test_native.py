"""The long tests of tests/native/test_native.py."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from lpr.config import TreeSizes
from tests.fakes.native_pair import PURE, Plan, run
from tests.fakes.paths import ROOT
from tests.native.test_native import NATIVE, PROGRAM, assert_equal, needs_native

FORKS = """
import os, sys
import torch, transformers.models.llama.modeling_llama
ranks = []
for rank in range(2):
    if (child := os.fork()) == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LPR_PURE_PYTHON=str(rank))
        break
    ranks.append(child)
else:
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in ranks))
"""
"""Ranks forked behind the imports that choose no core."""


@needs_native
def test_long_runs_are_equal() -> None:
    long = TreeSizes(window_size=8, guess_set_size=8, trie_nodes=64, trie_capacity=420, num_guesses=12)
    for adaptive in (False, True):
        plan = Plan(seed=5, sizes=long, num_steps=60, vocabulary=300, num_ranks=2, adaptive=adaptive)
        assert_equal(run(PURE, plan), run(NATIVE, plan))


@needs_native
def test_ranks_with_and_without_the_extension_work_together() -> None:
    """Their digests are compared in every step, so they take the same steps or stop with an error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    more = {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT, **place}
    environment = {**os.environ, **{name: str(value) for name, value in more.items()}}
    command = [sys.executable, "-c", FORKS + PROGRAM]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    ) as ranks:
        try:
            said = [json.loads(line) for line in ranks.communicate(timeout=300)[0].splitlines() if line[:1] == "["]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
    said.sort(key=lambda each: not each[0])
    assert [is_native for is_native, _ in said] == [True, False]
    assert said[0][1] == said[1][1] and all(num_steps < 20 for _, num_steps in said[0][1])
