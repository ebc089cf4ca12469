"""A server of any kind, started on a free port of loopback and stopped with all of its processes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from lpr.config import InputError

READY_ROUTES = {"lpr": "/readyz", "vllm": "/health", "llama": "/health"}
"""They answer 200 once the model is loaded."""
STOP_SECONDS = 20.0


class ServerEndedError(RuntimeError):
    """A server that ended, or was not ready in time; the message has the last line of its log."""


@dataclass
class Server:
    """A server that answers at `url`; without a process it was started by somebody else."""

    name: str
    url: str
    ready_seconds: float | None = None
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def check(self) -> None:
        """Raise ServerEndedError if its process has ended."""
        if self.process is not None and (code := self.process.poll()) is not None:
            raise ServerEndedError(f"the server ended with code {code}: {last_line(self.log)}")


@contextlib.contextmanager
def started(
    name: str, peer: str, command: Sequence[str], environment: dict[str, str], port: int, log: Path, seconds: float
) -> Iterator[Server]:
    """A server that is ready within `seconds`; raises ServerEndedError if it is not."""
    began = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        except OSError as failure:
            raise InputError(f"{name}: cannot start {command[0]}: {failure.strerror}") from failure
    server = Server(name, f"http://127.0.0.1:{port}", None, process, log)
    try:
        _await(server, server.url + READY_ROUTES[peer], began + seconds)
        server.ready_seconds = round(time.monotonic() - began, 2)
        yield server
    finally:
        _stop(process)


def _await(server: Server, url: str, end: float) -> None:
    with httpx.Client(timeout=5) as client:  # one for all: making it takes a core 30 ms, which the server needs
        while True:
            server.check()
            with contextlib.suppress(httpx.HTTPError):
                if client.get(url).status_code == 200:
                    return
            if time.monotonic() > end:
                raise ServerEndedError(f"it was not ready in time: {last_line(server.log)}")
            time.sleep(0.05)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and its descendants, with force after STOP_SECONDS."""
    family: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_SECONDS)
    for each in [each for each in family if each.is_running()]:
        with contextlib.suppress(psutil.Error):
            each.kill()
    if process.poll() is None:
        process.kill()
    process.wait()


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def last_line(log: Path | None) -> str:
    """The last line of a log that says something."""
    if log is None or not log.exists():
        return "no log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "an empty log")
