"""Servers that a benchmark starts on free ports of loopback, and stops with all of their processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from lpr.config import InputError

START_SECONDS = 300.0
"""Time for a model to be loaded."""
STOP_SECONDS = 60.0


class ServerEndedError(RuntimeError):
    """A server that ended, or was not ready in time; the message has the last line of its log."""


@dataclass
class Server:
    """A server that answers at `url`; without a process it was started by somebody else."""

    name: str
    url: str
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None
    ready_seconds: float | None = None

    @property
    def pid(self) -> int:
        """The process of a server that was started here."""
        assert self.process is not None
        return self.process.pid

    def check(self) -> None:
        """Raise ServerEndedError if its process has ended."""
        if self.process is not None and (code := self.process.poll()) is not None:
            raise ServerEndedError(f"the server ended with code {code}: {last_line(self.log)}")

    def stop(self) -> int:
        """Send SIGTERM, and SIGKILL to what is left; returns the exit code, or -1 if it had to be killed."""
        assert self.process is not None
        family: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        code = self.process.poll()
        self.process.kill()
        self.process.wait()
        for each in family:
            with contextlib.suppress(psutil.Error):  # is_running knows a later process of the same id
                each.kill()
        return -1 if code is None else code


@contextlib.contextmanager
def started(
    name: str, command: Sequence[str], environment: Mapping[str, str], port: int, ready: str, log: Path | None,
    seconds: float = START_SECONDS,
) -> Iterator[Server]:  # fmt: skip
    """A server whose route `ready` answers 200 within `seconds`, its output in `log` or on stderr.

    Raises ServerEndedError if it does not, InputError if there is no such program.
    """
    began = time.monotonic()
    with log.open("wb") if log is not None else contextlib.nullcontext(sys.stderr) as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=dict(environment))
        except OSError as failure:
            raise InputError(f"{name}: cannot start {command[0]}: {failure.strerror}") from failure
    server = Server(name, f"http://127.0.0.1:{port}", process, log)
    try:
        with httpx.Client(timeout=5) as client:  # one for all: making it takes a core 30 ms, which the server needs
            while not _answers(client, server.url + ready):
                server.check()
                if time.monotonic() > began + seconds:
                    raise ServerEndedError(f"it was not ready in time: {last_line(log)}")
                time.sleep(0.05)
        server.ready_seconds = round(time.monotonic() - began, 2)
        yield server
    finally:
        if process.poll() is None:
            server.stop()


def _answers(client: httpx.Client, url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return client.get(url).status_code == 200
    return False


@contextlib.contextmanager
def running(
    flags: Sequence[str], threads: int = 0, log: Path | None = None, more: Mapping[str, str] | None = None,
    open_files: int = 0,
) -> Iterator[Server]:  # fmt: skip
    """A service of lpr with these flags that is ready.

    `threads` are CPU threads of each rank (0: the service's default); `more` is added to its environment. `open_files`
    is the process's limit (`ulimit -n`). Raises InputError if it does not become ready.
    """
    port = free_port()
    command = [sys.executable, "-m", "lpr.serve", "--port", str(port), *flags]
    if open_files:
        command = ["sh", "-c", f'ulimit -n {open_files}; exec "$0" "$@"', *command]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {}), **(more or {})}
    try:
        with started("lpr", command, environment, port, "/readyz", log) as server:
            yield server
    except ServerEndedError as failure:
        raise InputError(f"{failure}: {' '.join(command)}") from failure


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
