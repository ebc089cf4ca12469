"""Each entry of lpr.serve.limits, as a client meets it: test_NAME for every NAME."""

import contextlib
import re
import resource
import socket
import threading
import time

import httpx
import pytest
from fake_driver import served
from serving import serving

from lpr.engine.waiting import MOST_PRIORITY, Waiting
from lpr.serve import limits
from lpr.serve.api import middleware
from lpr.serve.connections import SECONDS, Waits

PROMPT = "def f(x):\n    "
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@contextlib.contextmanager
def links(port, count):
    """So many open connections."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10)) for _ in range(count)]


def status(link):
    """The status of the answer on a connection; 0 if it is closed without one."""
    with contextlib.suppress(ConnectionError):
        line = link.recv(65536).split(b" ")
        return int(line[1]) if len(line) > 1 else 0
    return 0


def shorten(monkeypatch, waits, entry):
    """Let connections wait for half a second, instead of what `entry` says."""
    assert SECONDS[waits] == entry.most
    monkeypatch.setitem(SECONDS, waits, 0.5)


def test_connections():
    wanted = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted + 200:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted + 200), hard))
    with serving(files=1024) as service, links(httpx.URL(service.url).port, wanted) as idle:
        assert "--max-connections 2048: only " in service.log()
        took = []
        for _ in range(20):
            began = time.monotonic()
            httpx.get(service.url + "/livez", timeout=10).raise_for_status()  # a connection of its own
            took.append(time.monotonic() - began)
        assert max(took) < 1, took
        assert service.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}).status_code == 200
        assert status(idle[0]) == 0
        idle[-1].sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(idle[-1]) == 200
        replaced = r'^lpr:connections_ended_total{.*reason="replaced"} [1-9]'
        assert re.search(replaced, service.client.get("/metrics").text, re.M)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_metrics_connections():
    with served(metrics_port=0, connect=False) as service:
        port = service.front.metrics_port
        with links(port, limits.METRICS_CONNECTIONS.most) as idle, links(service.front.port, 3):
            text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
            assert re.search(r'^lpr:connections{.*state="waiting"} 3.0$', text, re.M)
            assert status(idle[0]) == 0


@pytest.mark.parametrize("size, expected", [(limits.HEAD.most - 100, 200), (limits.HEAD.most, 431)])
def test_head(size, expected):
    with served(connect=False) as service:
        assert service.client.get("/livez", headers={"A": "b" * (size - 200)}).status_code in (200, expected)
        response = service.client.get("/livez", headers={"A": "b" * size})
        assert response.status_code == 431 and response.json()["error"]["type"] == "invalid_request_error"


def test_headers():
    with served(connect=False) as service:
        for count, expected in ((limits.HEADERS.most - 10, 200), (limits.HEADERS.most + 1, 431)):
            assert service.client.get("/livez", headers=[("A", "b")] * count).status_code == expected


def test_head_seconds(monkeypatch):
    shorten(monkeypatch, Waits.HEAD, limits.HEAD_SECONDS)
    with served(connect=False) as service, links(service.front.port, 2) as (silent, slow):
        slow.sendall(b"GET /livez HTTP/1.1\r\n")
        assert status(slow) == 408 and status(silent) == 0


def test_idle_seconds(monkeypatch):
    shorten(monkeypatch, Waits.IDLE, limits.IDLE_SECONDS)
    with served(connect=False) as service, links(service.front.port, 1) as (link,):
        link.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(link) == 200 and status(link) == 0


def test_unread_seconds(monkeypatch):
    shorten(monkeypatch, Waits.UNREAD, limits.UNREAD_SECONDS)
    with served(connect=False) as service, links(service.front.port, 1) as (link,):
        size = len(service.client.get("/openapi.json").content)
        link.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)
        time.sleep(2)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := link.recv(1 << 20):
                received += len(data)
        assert 0 < received < 300 * size


def test_body_seconds(monkeypatch):
    assert limits.BODY_SECONDS.most == middleware.BODY_SECONDS
    monkeypatch.setattr(middleware, "BODY_SECONDS", 0.3)
    with served(connect=False) as service, links(service.front.port, 1) as (link,):
        link.sendall(POST % 10 + b"{")
        assert status(link) == 408


def test_bodies(monkeypatch):
    monkeypatch.setattr(limits, "BODIES", limits.BODIES._replace(most=4000))
    with served(max_body=1000) as service, links(service.front.port, 5) as slow:
        for link in slow[:4]:
            link.sendall(POST % 1000 + b" " * 999)
            time.sleep(0.05)
        assert service.client.post("/v1/completions", json={"prompt": PROMPT}).status_code == 200
        slow[4].sendall(POST % 1000 + b" " * 999)
        assert status(slow[0]) == 408  # the oldest makes room
        slow[1].settimeout(0.1)
        with pytest.raises(TimeoutError):
            status(slow[1])


def key(name):
    return {"Authorization": f"Bearer {name}"}


def ask_in_thread(service, name, **body):
    """Ask with a key; returns a function that waits for the answer."""
    answers = []
    url, body = service.url + "/v1/completions", {"prompt": "p", "max_tokens": 4, **body}
    thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=body, headers=key(name), timeout=30)))
    thread.start()

    def answer():
        thread.join(30)
        return answers[0]

    return answer


def wait_for(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


def refused(service, name, words, **body):
    response = service.client.post("/v1/completions", json={"prompt": "p", **body}, headers=key(name))
    assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1, response.text
    assert words in response.json()["error"]["message"]


def test_key_requests():
    # By default a key of several holds half of slots, queue and the one on hand: here 4 + 5 + 1.
    for flags, most in (({"max_queue": 5}, 5), ({"max_requests_per_key": 2}, 2)):
        with served(api_key="a,b", **flags) as service:
            service.driver.hold = True
            answers = [ask_in_thread(service, "a") for _ in range(most)]
            wait_for(lambda: service.front.service.num_running + service.front.service.num_waiting == most)  # noqa: B023
            refused(service, "a", f"--max-requests-per-key is {most}")
            answers += [ask_in_thread(service, "b") for _ in range(most)]
            wait_for(lambda: service.front.service.num_running + service.front.service.num_waiting == 2 * most)  # noqa: B023
            response = service.client.post("/v1/completions", json={"prompt": "p", "n": most + 1}, headers=key("b"))
            assert response.status_code in (400, 429)
            service.driver.hold = False
            assert [answer().status_code for answer in answers] == [200] * 2 * most
    with served(api_key="a", max_queue=1) as service:  # a lone key gets everything
        service.driver.hold = True
        answers = [ask_in_thread(service, "a") for _ in range(6)]
        wait_for(lambda: service.front.service.num_running + service.front.service.num_waiting == 6)
        service.driver.hold = False
        assert [answer().status_code for answer in answers] == [200] * 6


def test_key_tokens():
    long = [7] * 30
    for flags, most in (({"max_queued_tokens": 100}, 50), ({"max_tokens_per_key": 50}, 50)):
        with served(api_key="a,b", **flags) as service:
            service.driver.hold = True
            answers = [ask_in_thread(service, "a") for _ in range(5)]  # the slots, and the one on hand
            wait_for(lambda: service.front.service.num_running == 4)
            answers.append(ask_in_thread(service, "a", prompt=long))
            wait_for(lambda: service.front.service.num_queued_tokens == 30)
            refused(service, "a", f"--max-tokens-per-key is {most}", prompt=long)
            answers.append(ask_in_thread(service, "b", prompt=long))
            wait_for(lambda: service.front.service.num_queued_tokens == 60)
            service.driver.hold = False
            assert [answer().status_code for answer in answers] == [200] * 7


def test_priority():
    most = limits.PRIORITY.most
    with served() as service:
        for given, sent in ((-(2**63), -most), (-most, -most), (3, 3), (2**63 - 1, most)):
            body = {"prompt": "p", "priority": given}
            assert service.client.post("/v1/completions", json=body).status_code == 200
            assert service.driver.submitted[-1].priority == sent
    assert most == MOST_PRIORITY

    class Asked:
        share, arrived, priority = "", 0.0, -(2**62)

    queue = Waiting()
    queue.add(Asked())
    assert [place for place, _, _ in queue] == [-100.0]


def test_delivered():
    with served() as service:
        body = {"prompt": "p", "temperature": 0, "max_tokens": 400}
        many = {**body, "delivered_token_ids": [7] * (limits.DELIVERED.most + 1)}
        response = service.client.post("/v1/completions", json=many)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "delivered_token_ids")
        response = service.client.post("/v1/completions", json={**body, "delivered_token_ids": [7] * 401})
        assert "more than max_tokens" in response.json()["error"]["message"]
