"""The connection to a Redis or Valkey that may be unreachable, slow or hostile.

Every call has a time-out. An answer that is too long or arrives too slowly ends the connection, as the client library
would read all of it into memory. Failed calls are repeated after a growing wait with jitter, so that replicas do not
reconnect all at once.
"""

import os
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

from lpr.fleet.options import PASSWORD

CALL_SECONDS = 3.0  # Time-out of connecting, and of each wait for the next bytes of an answer; above `BLOCK_SECONDS`
ANSWER_SECONDS = 10.0  # Time-out of a whole answer
BLOCK_SECONDS = 0.5  # time that a read waits for new entries
MOST_ANSWER = 8 << 20  # longest answer in bytes: several times a batch of the longest entries
FIRST_WAIT, LONGEST_WAIT = 0.1, 10.0  # seconds before a failed call is repeated


class TooLongError(StoreConnectionError):
    """The store's answer is longer than any valid one."""


class Metered:
    """A socket that fails at an answer of more than `MOST_ANSWER` bytes or `ANSWER_SECONDS` seconds."""

    def __init__(self, connected: Any) -> None:
        self._socket = connected
        self._begin()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def sendall(self, data: bytes) -> None:
        """Send a command. The bytes that follow are its answer."""
        self._begin()
        self._socket.sendall(data)

    def recv(self, size: int) -> bytes:
        """As the socket's; raises TooLongError or TimeoutError."""
        self._check()
        data: bytes = self._socket.recv(size)
        self._left -= len(data)
        return data

    def recv_into(self, buffer: Any, size: int = 0) -> int:
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
    """A client with its own connection, opened anew after failures; its password is the URL's or the environment's."""
    options: dict[str, Any] = dict(parse_url(url))
    if password := os.environ.get(PASSWORD):
        options.setdefault("password", password)
    base: type[Any] = options.pop("connection_class", Connection)

    metered = {"_connect": lambda self: Metered(base._connect(self))}
    options |= {"connection_class": type("MeteredConnection", (base,), metered), "max_connections": 2}
    options |= {"socket_timeout": CALL_SECONDS, "socket_connect_timeout": CALL_SECONDS, "retry": Retry(NoBackoff(), 0)}
    options |= {"health_check_interval": 0, "decode_responses": False, "protocol": 2}
    return Redis(connection_pool=ConnectionPool(**options))


def stream_of(fingerprint: str, model: str, tenant: str) -> str:
    """The key of a tenant's stream. Braces keep the streams of a fleet on one node of a cluster."""
    tokenizer, name, whose = (quote(each, safe="/._-") for each in (fingerprint, model, tenant))
    return f"lpr:drafts:1:{{{tokenizer}:{name}}}:{whose}"


class Worker(threading.Thread):
    """A thread that repeats a round of work, with a growing wait after rounds that fail; it ends with the process."""

    def __init__(self, name: str, work: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        super().__init__(name=f"lpr-{name}", daemon=True)
        self._work, self._failed = work, failed
        self.stopping = threading.Event()  # set to end after the current round

    def run(self) -> None:
        failures = 0
        while not self.stopping.is_set():
            try:
                self._work()
                failures = 0
            except Exception as failure:  # whatever a store does, requests go on
                self._failed(failure)
                wait = min(LONGEST_WAIT, FIRST_WAIT * 2**failures)
                failures = min(failures + 1, 16)
                self.stopping.wait(wait * random.uniform(0.5, 1.0))
