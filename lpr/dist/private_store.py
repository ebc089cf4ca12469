"""A rank's access to the store of its supervisor (lpr.dist.store_server)."""

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Self

import msgspec
import torch.distributed as dist

from lpr.dist.store_server import HEAD, MOST_MESSAGE, MOST_WAIT, Answer, Request

ANSWER_SECONDS = 20.0  # seconds, besides those of a wait, after which a silent supervisor counts as gone
_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Answer)


class PrivateStore(dist.Store):
    """A thread-safe store. torch calls it from its own code when it makes groups.

    Keep a reference: torch's groups hold only the C++ object, which breaks without the Python one. Methods raise
    DistNetworkError if the supervisor is gone, and DistStoreError if a wait times out.
    """

    def __init__(self, door: socket.socket, timeout: timedelta) -> None:
        """Open connections through the socket `door`; `get` waits for up to `timeout`."""
        super().__init__()
        self._timeout, self._door = timeout, door
        self._door.settimeout(ANSWER_SECONDS)
        self._idle: list[socket.socket] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Request("set", [key], [_bytes(value)]))

    def get(self, key: str) -> bytes:
        """Wait until a key has a value, and return it."""
        self.wait([key])
        return self._ask(Request("get", [key])) or b""

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set the desired value if the key has the expected one (empty: no value); returns the key's value."""
        return self._ask(Request("compare_set", [key], [_bytes(expected_value), _bytes(desired_value)])) or b""

    def add(self, key: str, value: int) -> int:
        """Add to a counter; returns its value."""
        return int(self._ask(Request("add", [key], number=value)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Request("has", list(keys))))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self._timeout).total_seconds()
        until = time.monotonic() + seconds
        while not self._ask(Request("has", list(keys), seconds=max(1e-3, min(MOST_WAIT, until - time.monotonic())))):
            if time.monotonic() >= until:
                raise dist.DistStoreError(f"wait timeout after {seconds:g} s, keys: {', '.join(keys)}")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Request("delete", [key])))

    def num_keys(self) -> int:
        return int(self._ask(Request("count")))

    def clone(self) -> Self:
        """This store itself: it is thread-safe."""
        return self

    def close(self) -> None:
        for connection in (self._door, *self._idle):
            connection.close()

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 - the names that torch's C++ code calls

    def _ask(self, request: Request) -> Any:
        data = msgspec.msgpack.encode(request)
        if len(data) > MOST_MESSAGE:
            raise ValueError(f"{len(data)} bytes for the store, which takes {MOST_MESSAGE}")
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connect()
        try:
            connection.settimeout(ANSWER_SECONDS + request.seconds)
            connection.sendall(HEAD.pack(len(data)) + data)
            answer = _answers.decode(_receive(connection, HEAD.unpack(_receive(connection, HEAD.size))[0]))
        except (OSError, EOFError, msgspec.DecodeError) as failure:
            connection.close()
            raise dist.DistNetworkError(f"the supervisor is gone: {failure}") from failure
        self._idle.append(connection)
        return answer

    def _connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._door, [b"\0"], [theirs.fileno()])
            except OSError as failure:
                ours.close()
                raise dist.DistNetworkError(f"the supervisor is gone: {failure}") from failure
        return ours


def inherited_door(variable: str) -> socket.socket:
    """The socket whose file descriptor is in an environment variable; raises ValueError or OSError if there is none."""
    door = socket.socket(fileno=int(os.environ[variable]))
    door.set_inheritable(False)
    return door


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _receive(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        if not (count := connection.recv_into(view[done:])):
            raise EOFError("it has hung up")
        done += count
    return data
