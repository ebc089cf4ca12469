"""A redis-server of one's own on a free port of loopback, which can be killed and started again."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from lpr.config import InputError

START_SECONDS = 30.0
"""That a loaded machine may take for what takes milliseconds."""


class RedisServer:
    """A server without persistence: what it held is gone when it ends."""

    def __init__(self, *flags: str) -> None:
        """Choose a port; `flags` are further ones of redis-server. Raises InputError without the program."""
        if shutil.which("redis-server") is None:
            raise InputError("this needs redis-server: apt-get install redis-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.mkdtemp(prefix="lpr-redis-")
        self._clients: list[Any] = []

    def start(self) -> None:
        """Begin, and wait until it answers; raises InputError if it does not."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--dir", self._folder, *self._flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5) as probe:
                probe.sendall(b"PING\r\n")
                if probe.recv(16).startswith((b"+PONG", b"-NOAUTH")):
                    return
            if time.monotonic() > end or self._process.poll() is not None:
                raise InputError("redis-server did not start")
            time.sleep(0.01)

    def kill(self) -> None:
        """End at once, as a lost machine does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_SECONDS)
            self._process = None

    def client(self) -> Any:
        """A client of one's own."""
        import redis

        self._clients.append(redis.Redis.from_url(self.url, socket_timeout=5, protocol=2))
        return self._clients[-1]

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
