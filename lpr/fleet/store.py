"""The connection to a Redis or Valkey that need not be there, be quick, or mean well.

Every call has a time-out. An answer that is too long or drips in too slowly ends the connection: the client library
would read it to its end, into memory. What failed is tried again after a wait that grows, with jitter, so that replicas
do not come back all at once.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from redis import Redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, parse_url
from redis.exceptions import ConnectionError as StoreConnectionError
from redis.retry import Retry

CALL_SECONDS = 3.0
"""Time-out of connecting, and of each wait for the next bytes of an answer; above `BLOCK_SECONDS`."""
ANSWER_SECONDS = 10.0
"""Time-out of a whole answer."""
BLOCK_SECONDS = 0.5
"""How long a read waits for news."""
MOST_ANSWER = 8 << 20
"""Longest answer, in bytes: several times what a batch of the longest entries takes."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0
"""Seconds before what has failed is tried again."""


class TooLongError(StoreConnectionError):
    """The store's answer is longer than anything that was asked for."""


class Metered:
    """A socket that gives up on an answer of more than `MOST_ANSWER` bytes or `ANSWER_SECONDS` seconds."""

    def __init__(self, connected: Any) -> None:
        """Meter a connected socket."""
        self._socket = connected
        self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: bytes) -> None:
        """Send a command; what comes next is its answer."""
        self._begin()
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        """As the socket's; raises TooLongError or TimeoutError."""
        self._check()
        data: bytes = self._socket.recv(size)
        self._left -= len(data)
        return data

    def recv_into(self, buffer: Any, size: int = 0) -> int:
        """As the socket's; raises TooLongError or TimeoutError."""
        self._check()
        count: int = self._socket.recv_into(buffer, size)
        self._left -= count
        return count

    def _begin(self) -> None:
        self._left, self._until = MOST_ANSWER, time.monotonic() + ANSWER_SECONDS

    def _check(self) -> None:
        if self._left <= 0:
            raise TooLongError(f"an answer of more than {MOST_ANSWER} bytes")
        if time.monotonic() > self._until:
            raise TimeoutError(f"an answer took more than {ANSWER_SECONDS:g} s")


def connect(url: str) -> Redis:
    """A client with one connection of its own, opened at the first call and again after each failure."""
    options: dict[str, Any] = dict(parse_url(url))
    base: type[Any] = options.pop("connection_class", Connection)

    def _connect(self: Any) -> Metered:
        return Metered(base._connect(self))

    pool = ConnectionPool(
        **{
            **options,
            "connection_class": type("MeteredConnection", (base,), {"_connect": _connect}),
            "max_connections": 2,
            "socket_timeout": CALL_SECONDS,
            "socket_connect_timeout": CALL_SECONDS,
            "retry": Retry(NoBackoff(), 0),
            "health_check_interval": 0,
            "decode_responses": False,
            "protocol": 2,
        }
    )
    return Redis(connection_pool=pool)


def stream_of(fingerprint: str, model: str, tenant: str) -> str:
    """The key of the stream that a tenant's outputs go to; braces keep a fleet's streams together in a cluster."""
    tokenizer, name, whose = (quote(each, safe="/._-") for each in (fingerprint, model, tenant))
    return f"lpr:drafts:1:{{{tokenizer}:{name}}}:{whose}"


class Worker:
    """A thread that does one round after the other, and waits longer and longer after rounds that fail."""

    def __init__(self, name: str, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Prepare to call `work` again and again; `failed` hears of every exception of it."""
        self.stopping = threading.Event()
        self._work = work
        self._failed = failed
        self._thread = threading.Thread(target=self._run, name=f"lpr-{name}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the round that runs; `join` waits for that."""
        self.stopping.set()

    def join(self, seconds: float) -> None:
        """Wait for the end for `seconds` at most: a round that hangs ends with the process."""
        self._thread.join(seconds)

    def _run(self) -> None:
        failures = 0
        while not self.stopping.is_set():
            try:
                self._work()
                failures = 0
            except Exception as failure:  # whatever a store does, requests go on without it
                self._failed(failure)
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2**failures)
                failures = min(failures + 1, 16)
                self.stopping.wait(wait * random.uniform(0.5, 1.0))
