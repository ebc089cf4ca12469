"""Probes of what a connection can do: stay idle, send slowly or without end, leave, and not read."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import repeat

from tests.fakes.hostile.client import Answer, Client, read_answer
from tests.fakes.hostile.probes import probe

FLOOD = 8 << 20
"""Bytes that a client sends at most before it gives up to wait for an answer."""
HELD = ("open", "closed", "400", "408", "431", "503")
"""How a connection that sends no whole request may end: it is held no longer than the client, or refused."""


def _hold(client: Client, count: int, start: bytes, drip: bytes = b"", answers: int = 0) -> Counter[str]:
    """Open `count` connections that send `start`, then `drip` five times a second; how each has ended after `hold`.

    `answers` are passed over.
    """
    seen: Counter[str] = Counter()
    end = time.monotonic() + client.hold
    with contextlib.ExitStack() as stack:
        links = []
        for _ in range(count):
            if client.stop.is_set() or time.monotonic() > end:
                break
            try:
                links.append(stack.enter_context(socket.create_connection(client.address, timeout=1)))
                links[-1].setblocking(False)
                links[-1].send(start)
            except ConnectionRefusedError:
                seen["refused"] += 1
            except TimeoutError:
                seen["unheard"] += 1  # the queue of connections that the service has not taken is full
            except OSError:
                seen["closed"] += 1
        while (left := end - time.monotonic()) > 0 and not client.stop.is_set():
            client.wait(min(0.2, left))
            for link in links if drip else ():
                with contextlib.suppress(OSError):
                    link.send(drip)
        for _ in range(answers):
            links = [link for link in links if _state(link) == "200"]
        return seen + Counter(map(_state, links))


def _state(link: socket.socket) -> str:
    """Whether a connection is open, closed, or answered with a status."""
    link.setblocking(False)
    try:
        data = link.recv(100)
    except BlockingIOError:
        return "open"
    except OSError:
        return "closed"
    return data[9:12].decode("latin-1") if data.startswith(b"HTTP/1.1 ") else "closed"


@probe(*HELD, "unheard")
def idle_connections(client: Client) -> Counter[str]:
    """1,100 connections that send nothing; more than 256 at once are not taken."""
    return _hold(client, client.links, b"")


@probe(*HELD)
def slow_heads(client: Client) -> Counter[str]:
    """200 connections that send a byte of a head five times a second."""
    return _hold(client, min(200, client.links), b"POST /v1/completions HTTP/1.1\r\nX-A: ", b"a")


@probe(*HELD)
def slow_bodies(client: Client) -> Counter[str]:
    """200 connections that send a byte of a body five times a second."""
    head = client.head("POST", "/v1/completions", "Content-Type: application/json", "Content-Length: 100000")
    return _hold(client, min(200, client.links), head + b'{"prompt": "', b"a")


@probe(*HELD)
def idle_after_an_answer(client: Client) -> Counter[str]:
    """200 connections that are kept alive after an answer and then idle."""
    return _hold(client, min(200, client.links), client.head("GET", "/livez"), answers=1)


def _chunked(client: Client) -> bytes:
    return client.head("POST", "/v1/completions", "Content-Type: application/json", "Transfer-Encoding: chunked")


ENDLESS: dict[str, Callable[[Client], tuple[bytes, bytes]]] = {
    "endless_headers": lambda client: (client.head()[:-2], b"X-A: " + b"a" * 65000 + b"\r\n"),
    "endless_path": lambda client: (b"GET /", b"a" * (1 << 16)),
    "endless_extension": lambda client: (_chunked(client) + b"1;", b"a" * (1 << 16)),
    "endless_chunks": lambda client: (_chunked(client), b"10000\r\n" + b" " * 0x10000 + b"\r\n"),
}
"""Requests without an end: how each begins, and what goes on."""


def _endless(client: Client, name: str) -> Answer:
    start, piece = ENDLESS[name](client)
    return client.send([start, *repeat(piece, FLOOD >> 16)], seconds=30)


for each in ENDLESS:
    probe("400", "413", "414", "431", "closed", name=each)(partial(_endless, name=each))


@probe("200", "400", "408", "closed")
def small_chunks(client: Client) -> Answer:
    """A body of 300,000 chunks of one byte."""
    chunk = b"1\r\n \r\n"
    body = b"".join(b"1\r\n%c\r\n" % each for each in b'{"prompt":"a","max_tokens":1}')
    return client.send([_chunked(client), *repeat(chunk * 10_000, 30), body + b"0\r\n\r\n"])


@probe("408", "413", "431", "400", "closed", "open")
def promised_body(client: Client) -> Answer:
    """Expect: 100-continue, and no body after the service has agreed."""
    with client.connect() as link:
        lines = ("Content-Type: application/json", "Expect: 100-continue", "Content-Length: 1000")
        link.sendall(client.head("POST", "/v1/completions", *lines))
        answer = read_answer(link, time.monotonic() + client.hold)
    return Answer("open") if answer.status == "time-out" else answer


@probe("200", "400")
def pipelined(client: Client) -> Counter[str]:
    """500 requests in one write."""
    seen: Counter[str] = Counter()
    one, last = client.head("GET", "/v1/models"), client.head("GET", "/v1/models", "Connection: close")
    with client.connect() as link:
        link.sendall(one * 499 + last)
        link.settimeout(30)
        data = b""
        while block := link.recv(1 << 16):
            data += block
    for part in data.split(b"HTTP/1.1 ")[1:]:
        seen[part[:3].decode("latin-1")] += 1
    return seen


@probe("200")
def unread_streams(client: Client) -> Counter[str]:
    """8 long streams whose reader takes no bytes."""
    body = b'{"prompt":"a","max_tokens":3000,"stream":true,"ignore_eos":true,"logprobs":5}'
    seen: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        links = []
        for _ in range(8):
            link = stack.enter_context(socket.socket())
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.settimeout(10)
            link.connect(client.address)
            link.sendall(_start(client, body))
            links.append(link)
        client.wait(client.hold)
        for link in links:
            seen[_state(link)] += 1
    waiting = seen.pop("open", 0)  # its answer has not begun: it waits for a slot
    return seen + Counter({"200": waiting})


@probe("400", "closed", "408", "404", "405", "426", "401", "open")
def other_protocols(client: Client) -> Answer:
    """HTTP/2 without an upgrade, and a web socket."""
    first = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000)
    key = f"Sec-WebSocket-Key: {'A' * 22}=="
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", key)
    data = first if client.dice.random() < 0.5 else client.head("GET", "/v1/completions", *upgrade)
    answer = client.send([data], client.hold)
    return Answer("open") if answer.status == "time-out" else answer


def _start(client: Client, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return client.head("POST", "/v1/completions", "Content-Type: application/json", f"Content-Length: {size}") + body


@probe("left")
def drop(client: Client) -> Counter[str]:
    """A long answer whose reader leaves in the middle."""
    body = {"prompt": "def f(", "max_tokens": 3000, "stream": client.dice.random() < 0.7, "ignore_eos": True}
    with client.connect() as link:
        link.sendall(_start(client, json.dumps(body).encode()))
        read_answer(link, time.monotonic() + 0.01 + client.dice.random())
    return Counter(("left",))


@probe("left")
def unfinished(client: Client) -> Counter[str]:
    """A body that does not arrive."""
    with client.connect() as link:
        link.sendall(_start(client, b'{"prompt": ', 1000))
        client.wait(client.hold * client.dice.random())
        with contextlib.suppress(OSError):
            link.sendall(b'"a"')
    return Counter(("left",))


@probe("left")
def noise(client: Client) -> Counter[str]:
    """Random bytes."""
    with client.connect() as link:
        link.sendall(client.dice.randbytes(client.dice.randrange(1, 2000)))
    return Counter(("left",))


@probe(*HELD, "left")
def closed_bodies(client: Client) -> Counter[str]:
    """Bodies of 2 MB whose client leaves 60 ms after it has sent them."""
    body = b'{"prompt":"' + b"a" * 2_000_000 + b'"}'
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    for _ in range(8):
        with contextlib.suppress(OSError), client.connect() as link:
            link.sendall(client.head("POST", "/v1/completions", *lines) + body)
            client.wait(0.06)
    return Counter(("left",))


@probe("left")
def open_and_close(client: Client) -> Counter[str]:
    """100 requests for eight texts, each closed at once."""
    body = b'{"prompt":"a","n":8,"max_tokens":100}'
    lines = ("Content-Type: application/json", f"Content-Length: {len(body)}")
    for _ in range(100):
        with contextlib.suppress(OSError), client.connect() as link:
            link.sendall(client.head("POST", "/v1/completions", *lines) + body)
    return Counter(("left",))


@probe("400", "closed")
def one_byte_chunks(client: Client) -> Answer:
    """A body of 30,000 chunks of a byte."""
    head = client.head("POST", "/v1/completions", "Content-Type: application/json", "Transfer-Encoding: chunked")
    return client.send([head, b"1\r\n \r\n" * 30_000])


@probe("400", "closed")
def two_lengths(client: Client) -> Answer:
    """A Content-Length beside a Transfer-Encoding."""
    lines = ("Content-Type: application/json", "Content-Length: 4", "Transfer-Encoding: chunked")
    return client.send([client.head("POST", "/v1/completions", *lines), b"2\r\n{}\r\n0\r\n\r\n"])


@probe("401", "404")
def long_paths(client: Client) -> Answer:
    """A path of 10,000 encoded zeros without a key."""
    return client.ask("GET", "/" + "%00" * 10_000, key="")
