"""Malicious and broken clients of a service, for `benchmarks.soak`."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import httpx

MAX_BODY = 1 << 20
"""Bytes of a body that the service under test takes (--max-body)."""
NAMES = (
    "prompt", "max_tokens", "temperature", "stop", "n", "logprobs", "suffix", "seed", "stream", "echo", "best_of",
    "logit_bias", "response_format", "messages", "x\u0000", "input_prefix", "input_suffix", "tokens", "priority",
    "min_tokens", "top_p", "tools", "return_token_ids", "stream_options",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1e308, 2**70, "", "a", "\ud83d", "\u0000", [], [1], ["a"], {}, {"type": "regex"}, {"1": 5},
    [[1]], "x" * 5000,
)  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions", "/infill", "/tokenize", "/detokenize", "/v1/models", "/nowhere")
Count = Callable[[str, str], None]
"""Called with an event, and with the problem or ""."""


class Hostile:
    """One such client, with its own random numbers."""

    def __init__(self, url: str, key: str, seed: str, count: Count, stop: threading.Event) -> None:
        """Attack the service at `url`, whose key is `key`, until `stop` is set."""
        self._url = url
        self._key = key
        self._address = ("127.0.0.1", int(url.rpartition(":")[2]))
        self._dice = random.Random(seed)
        self._count = count
        self._stop = stop
        self.ways = (
            self.malformed, self.fields, self.keys, self.drop, self.slow, self.noise, self.huge, self.endless,
            self.unread, self.idle,
        )  # fmt: skip

    def run(self, pause: float) -> None:
        """Attack in random ways, with `pause` seconds between two of them on average."""
        while not self._stop.is_set():
            way = self._dice.choice(self.ways)
            try:
                way()
            except OSError:
                self._count(f"{way.__name__}: hung up on", "")
            except httpx.HTTPError as failure:
                self._count(f"{way.__name__}: {type(failure).__name__}", "")
            if pause:
                self._stop.wait(self._dice.expovariate(1 / pause))

    def malformed(self) -> None:
        """JSON with bytes replaced."""
        body = bytearray(json.dumps({"prompt": "a", "max_tokens": 4}).encode())
        for _ in range(self._dice.randrange(1, 5)):
            body[self._dice.randrange(len(body))] = self._dice.randrange(256)
        self._post(bytes(body))

    def fields(self) -> None:
        """Fields of any name and type, anywhere."""
        dice = self._dice
        body: dict[str, Any] = {"prompt": "a", "max_tokens": 3}
        body |= {dice.choice(NAMES): dice.choice(VALUES) for _ in range(dice.randrange(1, 4))}
        self._post(json.dumps(body).encode(), path=dice.choice(PATHS))

    def keys(self) -> None:
        """Wrong keys, which must be refused."""
        key = self._dice.choice(["", "wrong", self._key[:-1], self._key + "x"])
        if self._post(b'{"prompt": "a"}', key=key) != 401:
            self._count("keys", "a wrong key was accepted")

    def drop(self) -> None:
        """A long answer whose reader disconnects in the middle."""
        body = {"prompt": "def f(", "max_tokens": 3000, "stream": self._dice.random() < 0.7, "ignore_eos": True}
        with self._begin(json.dumps(body).encode()) as link:
            link.settimeout(0.01 + self._dice.random())
            with contextlib.suppress(OSError):
                while link.recv(4096):
                    pass
        self._count("dropped", "")

    def slow(self) -> None:
        """A body that does not arrive."""
        with self._begin(b'{"prompt": ', length=1000) as link:
            self._stop.wait(2 * self._dice.random())
            link.sendall(b'"a"')
        self._count("slow", "")

    def unread(self) -> None:
        """A stream that is not read."""
        body = {"prompt": "a", "max_tokens": 500, "stream": True, "ignore_eos": True}
        with self._begin(json.dumps(body).encode()):
            self._stop.wait(3 * self._dice.random())
        self._count("unread", "")

    def noise(self) -> None:
        """Bytes."""
        with socket.create_connection(self._address, timeout=10) as link:
            link.sendall(self._dice.randbytes(self._dice.randrange(1, 2000)))
        self._count("noise", "")

    def huge(self) -> None:
        """A body above the limit."""
        if self._post(b'{"prompt": "' + b"a" * self._dice.choice((MAX_BODY, 4 * MAX_BODY)) + b'"}') not in (400, 413):
            self._count("huge", "it was accepted")

    def endless(self) -> None:
        """A chunked body without an end."""
        with socket.create_connection(self._address, timeout=10) as link:
            link.sendall(self._head("Transfer-Encoding: chunked"))
            chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
            for _ in range(4 * MAX_BODY // 0x10000):
                link.sendall(chunk)
            # The sockets' buffers still take bytes beyond the limit, but the answer must have come.
            answer = link.recv(100)
        self._count("endless", "" if b" 413 " in answer or not answer else repr(answer))

    def idle(self) -> None:
        """Several connections with no bytes, or half a request line."""
        with contextlib.ExitStack() as links:
            for _ in range(self._dice.randrange(1, 12)):
                link = links.enter_context(socket.create_connection(self._address, timeout=10))
                if self._dice.random() < 0.5:
                    link.sendall(b"POST /v1/compl")
            self._stop.wait(2 * self._dice.random())
        self._count("idle", "")

    def _post(self, content: bytes, key: str | None = None, path: str = "/v1/completions") -> int:
        """Send one request and return its status; 500 and above, except 503, is a problem."""
        headers = {"Authorization": f"Bearer {key or self._key}", "Content-Type": "application/json"}
        if key == "":
            del headers["Authorization"]
        answer = httpx.post(self._url + path, content=content, headers=headers, timeout=120)
        wrong = answer.status_code >= 500 and answer.status_code != 503
        problem = f"{path} {content[:200]!r}: {answer.text[:200]}"
        self._count(f"status {answer.status_code}", problem if wrong else "")
        return answer.status_code

    def _begin(self, body: bytes, length: int | None = None) -> socket.socket:
        """A connection with a request whose Content-Length is `length`, or that of `body`."""
        link = socket.create_connection(self._address, timeout=30)
        link.sendall(self._head(f"Content-Length: {len(body) if length is None else length}") + body)
        return link

    def _head(self, last: str) -> bytes:
        lines = ("POST /v1/completions HTTP/1.1", "Host: a", f"Authorization: Bearer {self._key}",
                 "Content-Type: application/json", last)  # fmt: skip
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode()
