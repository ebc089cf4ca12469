"""The long tests of tests/serve/test_serve.py."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.fakes.serving import SMALL
from tests.serve.test_serve import PROMPTS


def test_torchrun_starts_it_too(tmp_path):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "lpr.serve",
    ]
    log = tmp_path / "log"
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*command, "--dtype", "float32", "--port", "0", *SMALL], stdout=out, stderr=out, start_new_session=True
        )
    try:
        end = time.monotonic() + 180
        while "ready:" not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        assert "lp 2 x tp 1" in log.read_text()
        url = re.search(r"listening on (\S+)", log.read_text())[1]
        body = {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0}
        assert httpx.post(url + "/v1/completions", json=body, timeout=60).json()["usage"]["completion_tokens"] == 8
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/livez")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
