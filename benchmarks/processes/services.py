"""Services that a benchmark starts on free ports of loopback."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from lpr.config import InputError

START_SECONDS = 300.0
"""Time for a model to be loaded."""
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Running:
    """A running service."""

    url: str
    process: subprocess.Popen[str]
    """The front; the ranks are its descendants."""

    def stop(self) -> int:
        """Send SIGTERM; returns the exit code, or -1 if it had to be killed after STOP_SECONDS."""
        self.process.terminate()
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -1


@contextlib.contextmanager
def running(
    flags: Sequence[str], threads: int = 0, log: Path | None = None, more: Mapping[str, str] | None = None,
    open_files: int = 0,
) -> Iterator[Running]:  # fmt: skip
    """A service with these flags that is ready; its stderr goes to `log`, or to this process's stderr.

    `threads` are CPU threads of each rank (0: the service's default); `more` is added to its environment. `open_files`
    is the process's limit (`ulimit -n`). Raises InputError if it does not become ready.
    """
    command = [sys.executable, "-m", "lpr.serve", "--port", "0", *flags]
    if open_files:
        command = ["sh", "-c", f'ulimit -n {open_files}; exec "$0" "$@"', *command]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {}), **(more or {})}
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("w")) if log is not None else sys.stderr
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        service = None
        try:
            assert process.stdout is not None
            found = re.search(r"https?://\S+", process.stdout.readline())
            if not found:
                raise InputError(f"the service did not start: {' '.join(command)}")
            service = Running(found[0], process)
            _await_ready(service, command)
            yield service
        finally:
            if process.poll() is None:
                Running("", process).stop()
            if process.stdout is not None:
                process.stdout.close()


def _await_ready(service: Running, command: Sequence[str]) -> None:
    end = time.monotonic() + START_SECONDS
    while httpx.get(service.url + "/readyz", timeout=30).status_code != 200:
        if service.process.poll() is not None or time.monotonic() > end:
            raise InputError(f"the service did not become ready: {' '.join(command)}")
        time.sleep(0.2)
