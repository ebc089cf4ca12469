"""Asks a service's /livez at fixed times, from a process of its own: no other thread delays it.

    python -m benchmarks.hostile.livez http://127.0.0.1:8000 0.02

Asks every 0.02 s until stdin ends, each time on a new connection; then prints a JSON list of [time, milliseconds], with
null for what was no 200 within PATIENCE seconds. A time that passes while an answer is awaited counts as asked then and
answered with that answer, so that a stall counts as often as a client would have met it.
"""

from __future__ import annotations

import json
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

PATIENCE = 30.0
FAILED_MS = 1000 * PATIENCE  # a failure counts as this
LATE_MS = 1000.0  # Kubernetes waits so long for a probe unless it is told otherwise
Asked = tuple[float, float | None]
"""The time that was asked at (of time.monotonic, which all processes share), and milliseconds to the answer."""


def ask_always(url: str, every: float) -> list[Asked]:
    """Ask until stdin ends."""
    parts = urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    asked: list[Asked] = []
    due = time.monotonic()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        is_right = _is_alive(address)
        now = time.monotonic()
        while due <= now:
            asked.append((round(due, 3), round(1000 * (now - due), 2) if is_right else None))
            due += every
    return asked


def _is_alive(address: tuple[str, int]) -> bool:
    """True if /livez answers with 200."""
    try:
        with socket.create_connection(address, timeout=PATIENCE) as link:
            link.sendall(
                b"GET /livez HTTP/1.1\r\nHost: %s:%d\r\nConnection: close\r\n\r\n" % (address[0].encode(), address[1])
            )
            data = b""
            while block := link.recv(4096):
                data += block
        return data.startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False


class Livez:
    """Such a process: started on construction, ended by `asked`."""

    def __init__(self, url: str, every: float) -> None:
        """Ask the service at `url` every `every` seconds."""
        command = [sys.executable, "-m", "benchmarks.hostile.livez", url, str(every)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.began = time.monotonic()

    def asked(self) -> list[Asked]:
        """Stop asking; all that was asked."""
        try:
            written, _ = self._process.communicate(timeout=2 * PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            written, _ = self._process.communicate()
        return [(at, ms) for at, ms in json.loads(written or "[]")]


def summary(asked: Sequence[Asked], since: float = 0.0, until: float = float("inf")) -> dict[str, Any]:
    """Milliseconds to an answer, and failures, of what was asked in a time."""
    times = [ms for at, ms in asked if since <= at < until]
    if len(times) < 2:
        return {"asked": len(times)}
    known = sorted(FAILED_MS if ms is None else ms for ms in times)
    cuts = statistics.quantiles(known, n=100, method="inclusive")
    return {
        "asked": len(times),
        "p50_ms": round(cuts[49], 1),
        "p99_ms": round(cuts[98], 1),
        "max_ms": round(known[-1], 1),
        "late": sum(ms > LATE_MS for ms in known),
        "failed": times.count(None),
    }


if __name__ == "__main__":
    print(json.dumps(ask_always(sys.argv[1], float(sys.argv[2]))))
