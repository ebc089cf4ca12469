"""The long tests of tests/fleet/test_resume.py."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from tests.fakes.serving import serving
from tests.fleet.test_resume import BODIES, PLAIN, check_resumed, events_of, service, text_of


def test_a_front_is_killed_and_its_streams_go_on_at_another(service):
    bodies = [{**body, "max_tokens": 200, "min_tokens": 150} for body in BODIES.values()]
    wanted = [events_of(service.client, **body) for body in bodies]
    got = [[] for _ in bodies]

    def take(lost, number):
        body = {**bodies[number], "stream": True, "return_token_ids": True}
        with pytest.raises(httpx.HTTPError), lost.client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                got[number] += json.loads(line[6:])["choices"] if line.startswith("data: {") else []
                if min(map(len, got)) >= 20:
                    os.kill(lost.process.pid, signal.SIGKILL)

    with serving(None, *PLAIN) as lost:
        ranks = psutil.Process(lost.process.pid).children(recursive=True)
        assert ranks
        with ThreadPoolExecutor(len(bodies)) as pool:
            list(pool.map(lambda number: take(lost, number), range(len(bodies))))
        _, alive = psutil.wait_procs(ranks, timeout=30)
        assert not alive, "ranks outlive their front"
    for body, (whole, usage), each in zip(bodies, wanted, got, strict=True):
        assert 20 <= len(each) < len(whole)
        assert text_of(each) == text_of(whole[: len(each)])
        check_resumed(service.client, body, whole, usage, len(each))
