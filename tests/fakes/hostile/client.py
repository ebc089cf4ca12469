"""One client with raw sockets: it sends what a well-made client cannot, and returns what it sees."""

from __future__ import annotations

import contextlib
import json
import random
import re
import select
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

PATIENCE = 120.0
"""Seconds that a client waits for an answer."""
BLOCK = 1 << 16


class Answer(NamedTuple):
    """What a client sees of one request."""

    status: str
    """The HTTP status, or "closed", "refused" or "time-out" if there was none."""
    text: str = ""
    """The beginning of the body."""


class Client:
    """A client of the service at `url` that sends `key`; `other` is a neighbour's key."""

    def __init__(
        self, url: str, key: str = "", other: str = "", *, seed: str = "", hold: float = 3.0, links: int = 1100,
        stop: threading.Event | None = None,
    ) -> None:  # fmt: skip
        """`hold` is the time in seconds that idle connections stay open, `links` the number of them."""
        parts = urlsplit(url)
        self.address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self.key, self.other, self.hold, self.links = key, other, hold, links
        self.dice = random.Random(seed)
        self.stop = stop or threading.Event()
        self.text = ""
        """The beginning of the last answer's body."""

    def connect(self) -> socket.socket:
        """A new connection; raises OSError."""
        return socket.create_connection(self.address, timeout=30)

    def head(self, method: str = "POST", path: str = "/v1/completions", *lines: str, key: str | None = None) -> bytes:
        """A request's head with this client's key; an empty `key` sends none."""
        key = self.key if key is None else key
        own = [f"Authorization: Bearer {key}"] if key else []
        if not any(line.startswith("Host:") for line in lines):
            own.append(f"Host: {self.address[0]}:{self.address[1]}")
        return "\r\n".join((f"{method} {path} HTTP/1.1", *own, *lines, "", "")).encode()

    def ask(
        self, method: str = "GET", path: str = "/v1/models", body: bytes = b"", *lines: str, key: str | None = None
    ) -> Answer:
        """One request on a connection of its own."""
        about = ("Connection: close", "Content-Type: application/json", f"Content-Length: {len(body)}")
        return self.send((self.head(method, path, *about, *lines, key=key), body))

    def post(self, body: Any, path: str = "/v1/completions", key: str | None = None) -> Answer:
        """POST bytes, or a value as JSON."""
        return self.ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), key=key)

    def send(self, pieces: Iterable[bytes], seconds: float = PATIENCE) -> Answer:
        """What the service answers to these bytes; it may answer before it has read them all."""
        try:
            with self.connect() as link:
                answer = exchange(link, pieces, seconds)
        except ConnectionRefusedError:
            answer = Answer("refused")
        except TimeoutError:
            answer = Answer("time-out")
        except OSError:
            answer = Answer("closed")
        self.text = answer.text
        return answer

    def wait(self, seconds: float) -> None:
        """Sleep, or less if the client is told to stop."""
        self.stop.wait(seconds)


def exchange(link: socket.socket, pieces: Iterable[bytes], seconds: float) -> Answer:
    """Send until all is sent or an answer comes; then read to the end of the connection."""
    end = time.monotonic() + seconds
    poll = select.poll()
    poll.register(link, select.POLLIN | select.POLLOUT)
    try:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                events = poll.poll(1000 * max(0.0, end - time.monotonic()))
                if not events:
                    return Answer("time-out")
                if not events[0][1] & select.POLLOUT or events[0][1] & select.POLLIN:
                    return read_answer(link, end)
                rest = rest[link.send(rest[:BLOCK], socket.MSG_DONTWAIT) :]
    except OSError:
        pass  # it has closed the connection; its answer may have come before
    return read_answer(link, end)


def read_answer(link: socket.socket, end: float) -> Answer:
    """Read an answer to its end, the end of the connection or the time `end`; 1xx answers are passed over."""
    data, total = b"", 0
    with contextlib.suppress(OSError):
        while (left := end - time.monotonic()) > 0 and not _is_whole(data, total):
            link.settimeout(left)
            block = link.recv(BLOCK)
            if not block:
                break
            total += len(block)
            data = (data + block)[:BLOCK]
            while data.startswith(b"HTTP/1.1 1") and b"\r\n\r\n" in data:
                data = data.partition(b"\r\n\r\n")[2]
                total = len(data)
    if not data.startswith(b"HTTP/1.1 "):
        return Answer("closed" if time.monotonic() < end else "time-out")
    return Answer(data[9:12].decode("latin-1"), data.partition(b"\r\n\r\n")[2][:500].decode("utf-8", "replace"))


def _is_whole(data: bytes, total: int) -> bool:
    """True if `total` bytes that begin with `data` are an answer whose head tells its length."""
    head, end, _ = data.partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: *(\d+)", head.lower())
    return bool(end) and length is not None and total >= len(head) + 4 + int(length[1])
