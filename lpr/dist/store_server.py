"""The rendezvous store of a supervised job: in the supervisor's memory, without an address; imports no torch.

Each rank inherits one end of a socket pair, its *door*. Through it the rank passes further sockets to the supervisor,
one per waiting thread. No port is open, so only processes that the supervisor has started can connect.
"""

import asyncio
import contextlib
import socket
import struct
import threading

import msgspec

MOST_MESSAGE = 8 << 20  # bytes of the longest request or answer
MOST_WAIT = 10.0  # seconds that the store waits for keys before it answers that they are missing
CLOSE_SECONDS = 5.0  # time for the thread to end
HEAD = struct.Struct("!I")  # the length of a message comes first


class Request(msgspec.Struct, frozen=True, array_like=True):
    what: str
    """set, get, compare_set, add, has, delete or count."""
    keys: list[str] = []
    values: list[bytes] = []
    number: int = 0
    """The increment of `add`."""
    seconds: float = 0.0
    """Seconds to wait for `keys`, at most `MOST_WAIT`."""


Answer = bytes | int | bool | None
"""A value, a number, True if the keys exist, or None if the key of a `get` does not."""
_requests = msgspec.msgpack.Decoder(Request)


class StoreServer:
    """A key-value store and a thread that answers requests."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, set[asyncio.Event]] = {}  # by key, the events of waiting requests
        self._tasks: set[asyncio.Task[None]] = set()
        self._doors: set[socket.socket] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="store")
        self._thread.start()

    def open_door(self) -> socket.socket:
        """The rank's end of a new door."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._doors.add(ours)
        self._loop.call_soon_threadsafe(self._loop.add_reader, ours, self._enter, ours)
        return theirs

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._hang_up(), self._loop).result(timeout=CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_SECONDS)
        self._loop.close()

    async def _hang_up(self) -> None:
        for door in list(self._doors):
            self._shut(door)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _shut(self, door: socket.socket) -> None:
        self._loop.remove_reader(door)
        self._doors.discard(door)
        door.close()

    def _enter(self, door: socket.socket) -> None:
        """Serve the sockets that a rank passes, until it closes its end."""
        try:
            data, fds, _, _ = socket.recv_fds(door, 1, 1)
        except OSError:
            data, fds = b"", []
        for fd in fds:
            task = self._loop.create_task(self._serve(socket.socket(fileno=fd)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not data:
            self._shut(door)

    async def _serve(self, connected: socket.socket) -> None:
        """Answer one connection's requests in order; a malformed request closes it."""
        reader, writer = await asyncio.open_unix_connection(sock=connected)
        with contextlib.closing(writer), contextlib.suppress(OSError, EOFError, ValueError, IndexError):
            while (size := HEAD.unpack(await reader.readexactly(HEAD.size))[0]) <= MOST_MESSAGE:
                request = _requests.decode(await reader.readexactly(size))
                if request.seconds > 0:
                    await self._wait(request.keys, request.seconds)
                data = msgspec.msgpack.encode(self._answer(request))
                writer.write(HEAD.pack(len(data)) + data)
                await writer.drain()

    async def _wait(self, keys: list[str], seconds: float) -> None:
        """Wait until all of `keys` have values, for up to `seconds`."""
        changed = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(seconds, MOST_WAIT)):
                for key in keys:
                    while key not in self._values:
                        self._waiting.setdefault(key, set()).add(changed)
                        try:
                            await changed.wait()
                        finally:
                            self._leave(key, changed)

    def _leave(self, key: str, changed: asyncio.Event) -> None:
        changed.clear()
        waiting = self._waiting.get(key, set())
        waiting.discard(changed)
        if not waiting:
            self._waiting.pop(key, None)

    def _answer(self, request: Request) -> Answer:
        keys, values = request.keys, request.values
        if request.what == "has":
            return all(key in self._values for key in keys)
        if request.what == "count":
            return len(self._values)
        key = keys[0]
        held = self._values.get(key)
        if request.what == "get":
            return held
        if request.what == "delete":
            return self._values.pop(key, None) is not None
        if request.what == "set":
            self._set(key, values[0])
            return None
        if request.what == "add":
            number = int(held or 0) + request.number
            self._set(key, str(number).encode())
            return number
        if request.what == "compare_set":  # as TCPStore does: without the key, an empty `expected` sets it
            expected, desired = values
            if expected == (held or b""):
                self._set(key, desired)
                return desired
            return expected if held is None else held
        raise ValueError(f"no request {request.what}")

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value
        for changed in self._waiting.get(key, ()):
            changed.set()
