"""The long tests of tests/serve/test_jobs.py."""

from __future__ import annotations

import re

import psutil
import pytest

from tests.fakes.fake_driver import wait_for
from tests.fakes.serving import serving
from tests.serve.test_jobs import Stream


def test_the_only_rank_is_killed_in_mid_stream_and_every_byte_comes():
    """A real rank: it is started again, and streams go on with their noise, penalties, log-probabilities and ends."""
    plain = {"max_tokens": 600, "ignore_eos": True, "seed": 11}  # 150 were over before the kill on a fast machine
    bodies = [
        {
            **plain,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.1,
            "stop": ["zq", "\n\n\n\n\n"],
        },
        {**plain, "temperature": 0, "min_tokens": 140, "prompt": "class A:\n    "},
        {**plain, "prompt": "import os\n", "top_p": 0.9, "top_k": 30},
    ]
    flags = (
        "--window-size",
        "0",
        "--trie-nodes",
        "0",
        "--max-batch-size",
        "2",
    )  # plain decoding, so that it takes long
    with serving(None, *flags) as service:
        wanted = [Stream(service.url, **body) for body in bodies]
        wanted = [stream.found() for stream in wanted]
        assert all(found["done"] and found["finish"] for found in wanted)
        children = psutil.Process(service.process.pid).children()
        family = [each for each in children if "lpr.serve.ranks.rank" in each.cmdline()]
        assert len(family) == 1
        streams = [Stream(service.url, **body) for body in bodies]
        wait_for(lambda: sum(len(stream.events) > 10 for stream in streams) > 1, 60)  # any two come first
        family[0].kill()
        assert not all(stream.done for stream in streams)
        for stream, one in zip(streams, wanted, strict=True):
            stream.join(180)
            found = stream.found()
            assert found.pop("logprobs") == pytest.approx(one.pop("logprobs"), abs=1e-4)
            assert found == one
        metrics = service.client.get("/metrics").text
        assert 'event="restart",model_name="bundled"} 1.0' in metrics, re.findall("lpr:rank_events_total.*", metrics)
        assert service.stop() == 0 and not psutil.pid_exists(family[0].pid)
