"""A service of one rank that serves and one that only drafts: real processes, which are killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest

import lpr
from tests.fakes.serving import SMALL, serving
from tests.fakes.supervised_job import PATIENCE, children, number_of

PROMPTS = ("def fibonacci(n):\n    ", "class Stack:\n    def __init__(self):\n")
PARAMS = [
    lpr.SamplingParams(max_new_tokens=300, temperature=0.8 * number, seed=number, ignore_eos=True) for number in (0, 1)
]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    decode = lpr.DecodeConfig(window_size=0, trie_nodes=16)
    engine = lpr.Engine.from_pretrained(lpr.bundled_model(), decode, device="cpu", dtype="float32")
    return [each.token_ids for each in engine.generate(PROMPTS, PARAMS)]


class Client:
    """Asks for one text again and again, until `stop`."""

    def __init__(self, url: str, prompt: str, params: lpr.SamplingParams) -> None:
        names = {"max_new_tokens": "max_tokens"}
        kept = ("max_new_tokens", "temperature", "seed", "ignore_eos")
        self._body = {names.get(name, name): getattr(params, name) for name in kept}
        self._body |= {"prompt": prompt, "stream": True, "return_token_ids": True, "return_sources": True}
        self.texts: list[list[int]] = [[]]
        self.sources: list[str] = []
        """Of the tokens since this was emptied."""
        self.times: list[float] = []
        self._url, self._ends = url + "/v1/completions", threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            with httpx.stream("POST", self._url, json=self._body, timeout=2 * PATIENCE) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        self.texts[-1] += choice["token_ids"]
                        self.sources += choice["sources"]
                        self.times.append(time.monotonic())
            self.texts.append([])

    def stop(self) -> None:
        """Let the last stream end."""
        self._ends.set()
        self._thread.join(2 * PATIENCE)
        assert self.texts.pop() == []


def ranks_of(service: SimpleNamespace) -> dict[int, int]:
    """The processes of the ranks that live, by their numbers."""
    found = {number_of(pid): pid for child in children(service.process.pid) for pid in children(child)}
    return {number: pid for number, pid in found.items() if number >= 0}


def await_that(is_so: Callable[[], bool], what: str, service: SimpleNamespace) -> None:
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, (what, service.log())
        time.sleep(0.02)


def kill(service: SimpleNamespace, victim: int, expected: list[list[int]]) -> tuple[float, dict[str, float]]:
    """Kill the rank in a place while streams run, until there are two ranks again that draft and verify.

    Returns the longest pause of a stream, and the events of the ranks.
    """
    clients = [Client(service.url, *each) for each in zip(PROMPTS, PARAMS, strict=True)]
    await_that(lambda: all(len(each.texts[0]) > 40 for each in clients), "streams begin", service)
    assert all("copy" in each.sources for each in clients)
    before = ranks_of(service)
    os.kill(before[victim], signal.SIGKILL)
    is_whole = lambda: len(after := ranks_of(service)) == 2 and victim not in after  # noqa: E731
    await_that(is_whole, "a rank is started", service)

    def ranks() -> dict[str, int]:
        answer = service.client.get("/readyz")
        return answer.json()["ranks"] if answer.status_code == 200 else {}

    await_that(lambda: ranks() == {"present": 2, "wanted": 2}, "it joins", service)
    for each in clients:
        each.sources.clear()
    await_that(lambda: all("copy" in each.sources for each in clients), "it drafts", service)
    for each in clients:
        each.stop()
    for client, text in zip(clients, expected, strict=True):
        assert client.texts == [text] * len(client.texts)
    metrics = service.client.get("/metrics").text
    events = {}
    for line in metrics.splitlines():
        if line.startswith("lpr:rank_events_total"):
            events[line.partition('event="')[2].partition('"')[0]] = float(line.split()[-1])
    pauses = [after - before for each in clients for before, after in zip(each.times, each.times[1:], strict=False)]
    return max(pauses), events


@pytest.mark.timeout(900)
def test_killed_ranks_cost_no_token_and_are_replaced(expected: list[list[int]]) -> None:
    """First the rank that drafts, then the one that served: the draft rank, which is left then, cannot serve.

    It leaves, and both are started again.
    """
    with serving(None, *SMALL, "--share-drafts", "none", "--draft-ranks", "1", lp=2) as service:
        pause, events = kill(service, 1, expected)
        assert events["rank_lost"] == 1 and events["reform"] == 2 and events["restart"] == events["takeover"] == 0
        assert pause < 5.0, "0.15 s on a busy machine; without it, the model would be loaded"
        _, events = kill(service, 0, expected)
        assert events["restart"] == 1 and events["poison"] == 0
        assert "all ranks that hold the model are lost" in service.log()
