"""The driver's end of the socket.

One thread reads it, another writes it and sends a pulse every second, so that a long step and a slow front do not block
each other. Only the main thread uses the engine. This module does not import torch: rank 0 connects before it loads it.
"""

import contextlib
import os
import queue
import socket
import threading
import time
from pathlib import Path

import msgspec

from lpr.protocol import ProtocolError
from lpr.serve.messages import PROTOCOL, FrameReader, Hello, Load, Pulse, ToDriver, ToFront, frame, is_ours

PULSE_EVERY = 1.0  # seconds between two pulses


class FrontGoneError(RuntimeError):
    """The front has hung up."""


class Line:
    def __init__(self, path: Path, timeout: float = 30.0, epoch: int = 0, loaded: bool = False) -> None:
        """Connect within `timeout` seconds and send Hello; raises FrontGoneError if no front listens."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(path))
        except OSError as failure:
            raise FrontGoneError(f"no front listens at {path}: {failure}") from failure
        if not is_ours(self._socket):
            self._socket.close()
            raise FrontGoneError(f"another user's process listens at {path}")
        self._socket.settimeout(None)
        self._incoming: queue.SimpleQueue[list[ToDriver] | None] = queue.SimpleQueue()
        """Messages; [] only lets `take` return, None is the end."""
        self._outgoing: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._load = Load()
        self._moved = time.monotonic()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._write)]
        for thread in self._threads:
            thread.start()
        self.send(Hello(PROTOCOL, os.getpid(), epoch, loaded))

    @property
    def load(self) -> Load:
        """The state of the engine, with the seconds since it was recorded."""
        return msgspec.structs.replace(self._load, last_step=time.monotonic() - self._moved)

    def moved(self, load: Load) -> None:
        """Record the state of the engine after an iteration of the step loop."""
        self._load, self._moved = load, time.monotonic()

    def send(self, message: ToFront) -> None:
        self._outgoing.put(frame(message))

    def take(self, wait: float) -> list[ToDriver]:
        """The messages so far; waits up to `wait` seconds for the first. Raises FrontGoneError."""
        taken: list[ToDriver] = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages = self._incoming.get(timeout=wait) if wait > 0 else self._incoming.get_nowait()
                if messages is None:
                    raise FrontGoneError("the front has hung up")
                taken += messages
                wait = 0.0
        return taken

    def flush(self) -> None:
        """Wait until what is queued has reached the socket, or a second has passed."""
        done = threading.Event()
        self._outgoing.put(done)
        done.wait(1.0)

    def wake(self) -> None:
        """From any thread: let `take` return."""
        if self._incoming.empty():
            self._incoming.put([])

    def close(self) -> None:
        """Send what is queued, and hang up."""
        self._outgoing.put(None)
        self._threads[1].join(timeout=5)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> None:
        frames = FrameReader(ToDriver)
        try:
            while data := self._socket.recv(1 << 16):
                for message in frames.feed(data):
                    self._incoming.put([message])
        except (OSError, ProtocolError):
            pass
        self._incoming.put(None)

    def _write(self) -> None:
        due = time.monotonic() + PULSE_EVERY
        with contextlib.suppress(OSError):
            while True:
                data: bytes | threading.Event | None
                try:
                    data = self._outgoing.get(timeout=max(0.0, due - time.monotonic()))
                except queue.Empty:
                    data = frame(Pulse(self.load))
                    due = time.monotonic() + PULSE_EVERY
                if data is None:
                    return
                if isinstance(data, threading.Event):
                    data.set()
                    continue
                self._socket.sendall(data)
