"""A real redis-server for tests, on a free port: `with redis_server() as server`."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

HAS_SERVER = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server (Debian's redis-server)"
)
WAIT = 30.0
"""Seconds that a loaded machine may take for what takes milliseconds."""


class RedisServer:
    """A server without persistence: what it held is gone when it ends."""

    def __init__(self, *flags: str) -> None:
        """Choose a port; `flags` are further ones of redis-server."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.mkdtemp(prefix="lpr-redis-")

    def start(self) -> None:
        """Begin, and wait until it answers."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--dir", self._folder, *self._flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: self.client().ping(), "redis-server answers")

    def kill(self) -> None:
        """End at once, as a lost machine does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT)
            self._process = None

    def client(self) -> Any:
        """A client for the test itself."""
        import redis

        client = redis.Redis.from_url(self.url, socket_timeout=5, protocol=2)
        self._clients.append(client)
        return client

    _clients: list[Any] = []

    def close(self) -> None:
        """End, and take everything away."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def redis_server(*flags: str) -> Iterator[RedisServer]:
    """A server that runs."""
    server = RedisServer(*flags)
    try:
        server.start()
        yield server
    finally:
        server.close()


def until(is_so: Callable[[], object], what: str, seconds: float = WAIT) -> None:
    """Wait until `is_so`, at most `seconds`; an exception counts as no."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(Exception):
            if is_so():
                return
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
