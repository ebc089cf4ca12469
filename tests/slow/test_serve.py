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

from tests.fakes.serving import SMALL, serving
from tests.serve.test_serve import (
    PROMPTS,
    a_stream_is_the_same_text_in_one_event_per_step,
    engine,
    filling_in_equals_generate_with_the_familys_prompt,
    litellm_gets_the_same_texts,
    llama_vim_gets_the_same_text,
    model,
    openais_node_client_gets_the_same_texts,
    texts_equal_generate_under_concurrency_with_prefix_hits_and_cancelled_neighbours,
)


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


def test_one_rank(model, engine):
    with serving(model, "--served-model-name", "fake", "--max-batch-size", "4") as service:
        texts_equal_generate_under_concurrency_with_prefix_hits_and_cancelled_neighbours(service, engine)
        a_stream_is_the_same_text_in_one_event_per_step(service, engine)
        filling_in_equals_generate_with_the_familys_prompt(service, engine)
        openais_node_client_gets_the_same_texts(service, engine)
        litellm_gets_the_same_texts(service, engine)
        llama_vim_gets_the_same_text(service, engine)
