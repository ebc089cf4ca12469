"""The long tests of tests/dist/test_private_store.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.test_private_store import LOOPBACK, RANK, listeners
from tests.fakes.paths import ROOT


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_supervised_ranks_listen_on_loopback_only_and_their_store_nowhere(tmp_path: Path) -> None:
    (tmp_path / "some_rank.py").write_text(RANK)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    environment.pop("GLOO_SOCKET_IFNAME", None)
    command = [sys.executable, "-m", "lpr.dist.supervisor", "2", "1", "some_rank"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as job:
        try:
            assert job.stdout is not None
            ranks = [int(job.stdout.readline()) for _ in range(2)]
            assert listeners(job.pid) == set(), "the supervisor, which holds the store"
            theirs = set().union(*map(listeners, ranks))
            assert theirs and all(each.split(":")[0] in LOOPBACK for each in theirs), theirs
        finally:
            job.kill()
