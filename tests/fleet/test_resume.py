"""A stream that broke off goes on at another service by the ids that came, byte for byte as if nothing had happened."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time

import httpx
import pytest

from lpr.fleet.resume import Resumption
from tests.fakes.fake_driver import served
from tests.fakes.paths import ROOT


def events_of(client, route="/v1/completions", most=None, **body):
    """The choices of a stream's events, at most so many; and the usage, if it ended."""
    body = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, **body}
    found, usage = [], None
    with client.stream("POST", route, json=body) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                usage = event["usage"] or usage
                found += event["choices"]
                if len(found) == most:
                    break
    return found, usage


def text_of(events):
    return "".join(event["text"] if "text" in event else event["delta"].get("content", "") for event in events)


def ids_of(events):
    return [token for event in events for token in event.get("token_ids", [])]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "seed"),
        ({"temperature": 0, "n": 2}, "n must be 1"),
        ({"temperature": 0, "best_of": 2}, "best_of must be 1"),
        ({"temperature": 0, "echo": True}, "echo"),
        ({"temperature": 0, "prompt": ["a", "b"]}, "one prompt"),
        ({"temperature": 0, "delivered_token_ids": [9999]}, "vocabulary"),
        ({"temperature": 0, "delivered_token_ids": [0, 7]}, "ends the text"),
        ({"temperature": 0, "delivered_token_ids": [5, 7], "stop_token_ids": [5]}, "ends the text"),
        ({"temperature": 0, "max_tokens": 1}, "more than max_tokens"),
    ],
)
def test_what_cannot_go_on_is_refused(fake, more, words):
    body = {"prompt": "a", "delivered_token_ids": [7, 8], **more}
    response = fake.client.post("/v1/completions", json=body)
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"] and "\n" not in error["message"]
    assert error["param"] in ("delivered_token_ids", "best_of")


@pytest.fixture(scope="module")
def fake():
    with served() as running:
        yield running


def test_a_resumed_stream_looks_like_the_rest_of_one(fake):
    chat = {"messages": [{"role": "user", "content": "u"}], "temperature": 0, "logprobs": True}
    whole, usage = events_of(fake.client, "/v1/chat/completions", **chat)
    assert whole[0]["delta"]["role"] == "assistant"
    rest, used = events_of(fake.client, "/v1/chat/completions", **chat, delivered_token_ids=ids_of(whole[:2]))
    assert rest == whole[2:] and used == usage
    sent = fake.driver.submitted[-1]
    assert sent.token_ids[sent.num_prompt :] == ids_of(whole[:2])


def test_ranks_that_die_meanwhile_are_told_again(fake):
    """A resumed stream whose ranks are lost before they have said a word."""
    plain = {"prompt": "a", "temperature": 0, "max_tokens": 6}
    whole, _ = events_of(fake.client, **plain)

    def prepare(driver):
        driver.hold = not service_starts
        service_starts.append(driver)

    service_starts: list[object] = []
    with served(prepare=prepare) as service:
        found = []
        thread = threading.Thread(
            target=lambda: found.append(events_of(service.client, **plain, delivered_token_ids=ids_of(whole[:1])))
        )
        thread.start()
        end = time.monotonic() + 20
        while not service_starts[0].submitted:
            assert time.monotonic() < end
            time.sleep(0.005)
        service.call(lambda: service.starts[-1].end(-9))
        thread.join(30)
        assert text_of(found[0][0]) == text_of(whole[1:])


# Routers.


def through_a_router(path, fields, services, cut=lambda data: data):
    """What a client gets of a router that goes from service to service; `cut` breaks streams off."""
    stream = Resumption.of(path, fields)
    assert stream is not None
    got, left = b"", list(services)
    while not stream.is_complete:
        with (
            contextlib.suppress(httpx.HTTPError, StopIteration),
            left.pop(0).client.stream("POST", path, content=stream.body, headers=JSON) as response,
        ):
            for part in response.iter_raw():
                got += stream.feed(cut(part))
    return got, left


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("at", [1, 40, 400, 700, 1500])
def test_a_router_continues_a_stream_that_is_cut_anywhere(fake, at, shown):
    body = {"prompt": "a", "temperature": 0.8, "seed": 3, "stream": True, "max_tokens": 20}
    body |= {"stream_options": {"include_usage": True}, **({"return_token_ids": True} if shown else {})}
    chat = {key: value for key, value in body.items() if key != "prompt"}
    chat["messages"] = [{"role": "user", "content": "u"}]
    for path, fields in (("/v1/completions", body), ("/v1/chat/completions", chat)):
        wanted = fake.client.post(path, json=fields).text
        size = 0

        def cut(data):
            nonlocal size
            size += len(data)
            if size - len(data) < at <= size:
                raise StopIteration
            return data

        got, _ = through_a_router(path, fields, [fake] * 3, cut)
        assert parsed(got.decode()) == parsed(wanted)


def parsed(text):
    """A stream's events without what differs between any two requests."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [{**event, "id": None, "created": None} for event in events], text.endswith("data: [DONE]\n\n")


def test_a_router_keeps_the_sizes_of_padded_streams():
    with served(pad_stream=True) as service:
        service.driver.per_step = 3
        stream = Resumption.of("/v1/completions", {"prompt": "a", "stream": True})
        sizes = []
        with service.client.stream("POST", "/v1/completions", content=stream.body, headers=JSON) as response:
            got = b"".join(response.iter_raw())
        for start in range(0, len(got), 1024):
            sizes.append(len(stream.feed(got[start : start + 1024])))
        assert stream.is_complete and b"token_ids" in got and set(sizes) == {1024}


def test_a_service_that_ends_before_its_stream_is_left():
    """SIGTERM with a stream that does not end in time: the client never sees the error."""
    with served(shutdown_timeout=0.2) as first, served() as second:
        first.driver.per_step = 1

        def before_step(running):
            if len(first.driver.submitted) == 1 and first.driver.running[1][1] == 2:
                first.driver.hold = True
                first.call(first.front.stop)
                raise asyncio.CancelledError

        first.driver.before_step = before_step
        fields = {"prompt": "a", "temperature": 0, "stream": True, "max_tokens": 20}
        wanted = second.client.post("/v1/completions", json=fields).text
        got, left = through_a_router("/v1/completions", fields, [first, second])
        assert not left and b"error" not in got
        assert text_of([event["choices"][0] for event in parsed(got.decode())[0]]) == text_of(
            [event["choices"][0] for event in parsed(wanted)[0]]
        )


def test_the_example_of_the_docs_does_what_it_says():
    """It goes from a service that is not there to one that breaks off, and to one that ends the stream."""
    source = (ROOT / "docs" / "serving.md").read_text()
    section = source.partition("## When the front is lost")[2]
    example: dict[str, object] = {}
    exec(section.partition("```python")[2].partition("```")[0], example)
    fields = {"prompt": "a", "temperature": 0, "max_tokens": 20}
    with served() as lost, served() as other:

        def before_step(running):
            if lost.driver.running[1][1] == 2:
                lost.call(lost.driver.vanish)
                raise asyncio.CancelledError

        lost.driver.before_step = before_step
        got = b"".join(example["stream"](["http://127.0.0.1:9", lost.url, other.url], "/v1/completions", fields))
        wanted = other.client.post("/v1/completions", json={**fields, "stream": True}).text
        assert lost.driver.running[1][1] == 2 and other.driver.submitted[0].token_ids[-2:]
    assert parsed(got.decode()) == parsed(wanted)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/infill", {}), ("/v1/completions", {"stream": False}), ("/v1/completions", {"n": 2}),
        ("/v1/completions", {"prompt": ["a", "b"]}), ("/v1/completions", {"echo": True}),
        ("/v1/completions", {"best_of": 2}),
    ],
)  # fmt: skip
def test_other_streams_are_left_as_they_are(path, fields):
    assert Resumption.of(path, {"prompt": "a", "stream": True, **fields}) is None
    assert Resumption.of("/v1/completions", {"prompt": [1, 2], "stream": True}) is not None
