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
from tests.fleet.test_resume import events_of, ids_of, text_of

PLAIN = ("--window-size", "0", "--trie-nodes", "0", "--no-access-log")
"""Plain decoding, so that it takes many steps."""
BODIES = {
    "greedy": {
        "prompt": "import os\n\n\ndef read(path):\n    ", "temperature": 0, "max_tokens": 32, "ignore_eos": True,
        "logprobs": 1,
    },
    "sampled, with penalties and stop strings": {
        "prompt": "class A:\n    ", "temperature": 0.8, "seed": 11, "max_tokens": 32, "presence_penalty": 0.5,
        "frequency_penalty": 0.3, "repetition_penalty": 1.1, "min_tokens": 28, "logprobs": 1,
        "stop": ["zq", "\n\n\n\n\n", "self.xyz"],
    },
    "bytes of characters": {
        "prompt": "# naïve 😀 日本", "temperature": 1.0, "seed": 5, "max_tokens": 32, "ignore_eos": True,
        "logit_bias": dict.fromkeys(map(str, (1531, 248, 224, 164, 247, 100, 129, 104)), 14.0),  # pieces of 😀, 日, é
        "stop": ["\U0001f600\U0001f600"],
    },
}  # fmt: skip


def values_of(events, name):
    return [value for event in events if event["logprobs"] for value in event["logprobs"][name]]


def check_resumed(client, body, whole, usage, given):
    """What a service sends after the first `given` events of another one."""
    before, after = whole[:given], whole[given:]
    found, used = events_of(client, **body, delivered_token_ids=ids_of(before))
    assert text_of(found) == text_of(after), f"after event {given}"
    assert ids_of(found) == ids_of(after)
    assert (found[-1]["finish_reason"], found[-1]["stop_reason"]) == (
        whole[-1]["finish_reason"],
        whole[-1]["stop_reason"],
    )
    assert {**used, "prompt_tokens_details": None} == {**usage, "prompt_tokens_details": None}
    if "logprobs" in body:
        assert values_of(found, "text_offset") == values_of(after, "text_offset")
        assert values_of(found, "token_logprobs") == pytest.approx(values_of(after, "token_logprobs"), abs=1e-4)


def with_stop_across(client, body):
    """The body with a stop string that begins in one event and ends in a later one, and what comes then."""
    whole, _ = events_of(client, **body)
    text = text_of(whole)
    borders, at = [], 0
    for event in whole:
        at += len(event["text"])
        borders.append(at)
    at = next(each for each in borders if len(text) // 2 <= each <= len(text) - 6)
    return {**body, "stop": [*body.get("stop", []), text[at - 3 : at + 5]]}


@pytest.fixture(scope="module")
def service():
    with serving(None, *PLAIN) as running:
        yield running


@pytest.mark.parametrize("kind", BODIES)
def test_a_text_goes_on_after_every_event(service, kind):
    body = BODIES[kind]
    for each in (body, with_stop_across(service.client, body)):
        whole, usage = events_of(service.client, **each)
        assert len(whole) > 10
        if kind == "bytes of characters":  # some events end inside a character
            assert any(event["token_ids"] and not event["text"] for event in whole)
        for given in range(1, len(whole) + 1):
            check_resumed(service.client, each, whole, usage, given)


def test_chats_and_whole_answers_go_on(service):
    prompt = {"prompt": "x = [", "temperature": 0.8, "seed": 3, "max_tokens": 30}
    whole, _ = events_of(service.client, **prompt)
    body = {**prompt, "return_token_ids": True, "delivered_token_ids": ids_of(whole[:7])}
    answer = service.client.post("/v1/completions", json=body).json()
    choice = answer["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (text_of(whole[7:]), ids_of(whole[7:]))
    assert answer["usage"]["completion_tokens"] == len(ids_of(whole))


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
