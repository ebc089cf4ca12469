"""Streams whose sizes and times tell nothing: `--pad-stream` and `--stream-interval`."""

from __future__ import annotations

import itertools
import json
import socket
import statistics
import time

import pytest

from lpr.config import InputError
from lpr.protocol import Chunk, ErrorCode, Failure
from lpr.serve.api import answers
from lpr.serve.options import parse
from tests.fakes import other_clients as clients
from tests.fakes.fake_driver import served

TEXT = "return x + 1\n"
LONG = "return x + 1\n    if y: return [z for z in range(10)]\n"
BODY = {"prompt": "p", "stream": True, "max_tokens": 40, "stream_options": {"include_usage": True}}


def sends(service, **body):
    """The sizes of what the service sent of a stream, and its bytes: HTTP/1.1 has a chunk per send."""
    data = json.dumps({**BODY, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{service.front.port}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.front.port), timeout=120) as connection:
        connection.sendall(head.encode() + data)
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    rest, sizes, content = received.partition(b"\r\n\r\n")[2], [], b""
    while rest:
        length, _, rest = rest.partition(b"\r\n")
        size = int(length, 16)
        if not size:
            return sizes, content
        sizes.append(size)
        content, rest = content + rest[:size], rest[size + 2 :]
    raise AssertionError("the answer did not end")


def text_of(content):
    events = [json.loads(line[6:]) for line in content.decode().splitlines() if line.startswith("data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def check_padded():
    """Whatever a step accepts, errors and comments included, every send has one size."""
    seen = set()
    with served(pad_stream=True) as service:
        service.driver.text = LONG
        for per_step in (1, 2, 3, 5, 8):
            service.driver.per_step = per_step
            sizes, content = sends(service)
            assert set(sizes) == {answers.BLOCK}, sizes
            assert text_of(content) == LONG and content.endswith(b"\n\n") and b"data: [DONE]\n" in content
            seen.add(len(sizes))
        assert len(seen) == 5, "the number of events still shows the mean; --stream-interval hides that"
        sizes, _ = sends(service, return_token_ids=True, logprobs=5)
        assert all(size % answers.BLOCK == 0 for size in sizes)
        service.driver.text = "x = '" + "\u00e9\U0001f600" * 9 + "'"
        assert set(sends(service)[0]) == {answers.BLOCK}


def test_every_send_is_a_multiple_of_one_size():
    check_padded()


def no_padding(monkeypatch):
    monkeypatch.setattr(answers, "padded", lambda data, block: data)


def no_comment_where_there_is_little_room(monkeypatch):
    def short(data, block):
        missing = -len(data) % block
        return data if missing < 800 else data + b":" + b"." * (missing - 3) + b"\n\n"

    monkeypatch.setattr(answers, "padded", short)


@pytest.mark.parametrize("fault", [no_padding, no_comment_where_there_is_little_room])
def test_mutants(monkeypatch, fault):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_padded()


@pytest.mark.parametrize("size", [*range(1, 12), 1020, 1021, 1022, 1023, 1024, 1025, 5000])
def test_padding_is_a_comment(size):
    data = b"x" * size
    found = answers.padded(data, 1024)
    assert found.startswith(data) and len(found) % 1024 == 0 and len(found) <= size + 1026
    rest = found[size:]
    assert not rest or (rest.startswith(b":") and rest.endswith(b"\n\n") and b"\n" not in rest[:-2])
    assert answers.padded(data, 1) == data


def test_comments_and_errors_are_padded_too(monkeypatch):
    monkeypatch.setattr(answers, "KEEP_ALIVE", 0.05)
    with served(pad_stream=True, request_timeout=0.4) as service:
        service.driver.hold = True
        sizes, content = sends(service)
        assert set(sizes) == {answers.BLOCK} and b": keep-alive" in content and b'"error"' in content


def test_a_stream_comes_at_fixed_times_whatever_it_holds():
    found, gaps = {}, []
    with served(pad_stream=True, stream_interval=100.0) as service:
        service.driver.text, service.driver.pause = LONG, 0.03
        plain = service.client.post("/v1/completions", json={**BODY, "stream": False, "stream_options": None})
        for per_step in (1, 2, 4):
            service.driver.per_step = per_step
            body = {**BODY, "return_token_ids": True, "logprobs": 1, "return_sources": True}
            times = []
            with service.client.stream("POST", "/v1/completions", json=body) as response:
                events = []
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line[6:]))
                        times.append(time.monotonic())
            steps = [event["choices"][0] for event in events if event["choices"]]
            gaps += [after - before for before, after in itertools.pairwise(times[: len(steps)])]
            found[per_step] = len(steps)
            assert "".join(step["text"] for step in steps) == LONG == plain.json()["choices"][0]["text"]
            ids = [token for step in steps for token in step["token_ids"]]
            offsets = [offset for step in steps for offset in step["logprobs"]["text_offset"]]
            assert len(ids) == len(offsets) == events[-1]["usage"]["completion_tokens"]
            assert offsets == sorted(set(offsets)) and len([each for each in steps if "prompt_token_ids" in each]) == 1
            assert [step["finish_reason"] for step in steps[:-1]] == [None] * (len(steps) - 1)
            assert steps[-1]["finish_reason"] == "stop" and events[-1]["lpr"]["num_steps"] == -(-len(ids) // per_step)
        assert found[1] >= 3
        assert statistics.median(gaps) > 0.05, gaps  # one that was read late comes close to the next


def test_empty_intervals_have_a_comment_and_time_is_kept():
    with served(pad_stream=True, stream_interval=20.0, request_timeout=0.5) as service:
        service.driver.hold = True
        began = time.monotonic()
        sizes, content = sends(service)
        assert time.monotonic() - began < 5
        assert content.count(b": keep-alive") > 5 and b"--request-timeout" in content
        assert set(sizes) == {answers.BLOCK}


def test_what_came_before_a_failure_is_sent():
    with served(stream_interval=200.0) as service:
        driver = service.driver
        driver.hold = True

        def fail():
            id = int(driver.submitted[-1].id)
            driver.say(Chunk(id, [7], "a"))
            driver.say(Chunk(id, [], "", "error", Failure(ErrorCode.GENERATION_FAILED, "no")))

        with service.client.stream("POST", "/v1/completions", json=BODY) as response:
            lines = response.iter_lines()
            assert next(lines) == ": keep-alive"
            service.call(fail)
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert rest[0]["choices"][0]["text"] == "a" and rest[1]["error"]["message"] == "no"


@pytest.mark.parametrize("flags", [{"pad_stream": True}, {"pad_stream": True, "stream_interval": 30.0}])
@pytest.mark.slow(first=1)
def test_openais_client_reads_it(flags):
    import openai

    with served(**flags) as service:
        service.driver.pause = 0.01
        client = openai.OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120)
        stream = client.completions.create(model="fake", prompt="p", stream=True)
        assert "".join(event.choices[0].text for event in stream) == TEXT
        messages = [{"role": "user", "content": "u"}]
        stream = client.chat.completions.create(model="fake", messages=messages, stream=True)  # type: ignore[call-overload]
        assert "".join(event.choices[0].delta.content or "" for event in stream) == TEXT


def test_nodes_client_reads_it():
    if clients.node_modules() is None:
        pytest.skip("needs node, and $LPR_NODE_MODULES with the package openai in it (npm install openai)")
    with served(pad_stream=True) as service:
        found = clients.ask_with_node(service.url)
        assert found["stream"] == found["chatStream"] == TEXT


@pytest.mark.parametrize("interval", ["-1", "nan", "inf", "10001"])
def test_an_interval_is_from_0_to_10_seconds(interval):
    with pytest.raises(InputError, match="--stream-interval"):
        parse(["--stream-interval", interval])
