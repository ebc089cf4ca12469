"""The service that is attacked: two keys, a chat template, few files, and a limit on the front's memory."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psutil

from benchmarks.processes.leaks import is_alive
from benchmarks.processes.services import Running, running

KEYS = ("attacker-1f0b", "neighbour-7c2e")
"""Key of the hostile clients, and of their well-behaved neighbours."""
OPEN_FILES = 1024
"""`ulimit -n`, which many systems have as default."""
TEMPLATE = (
    "{% for _ in range(pad | default(0)) %} {% endfor %}{{ bos_token }}"
    "{% for message in messages %}# {{ message['role'] }}: {{ message['content'] }}\n{% endfor %}def "
)
"""A chat template whose length a client can choose."""


@contextlib.contextmanager
def attacked(
    folder: Path, flags: Sequence[str], *, checkout: Path | None = None, keyless: bool = False, threads: int = 0,
    memory_gb: float = 0.0, optional: Sequence[str] = (),
) -> Iterator[Running]:  # fmt: skip
    """A service from `checkout` whose files are in `folder`; with `flags`, and those of `optional` that it knows.

    The front gets `memory_gb` more address space than it has once it is ready; 0 sets no limit.
    """
    keys, template = folder / "keys", folder / "template.jinja"
    keys.write_text(f"attacker {KEYS[0]}\nneighbour {KEYS[1]}\n", encoding="utf-8")
    template.write_text(TEMPLATE, encoding="utf-8")
    own = ["--dtype", "float32", "--chat-template", str(template), "--no-access-log"]
    own += [] if keyless else ["--api-key-file", str(keys)]
    own += [flag for flag in optional if flag in known_flags(checkout)]
    with running([*own, *flags], threads, folder / "log", checkout=checkout, open_files=OPEN_FILES) as service:
        if memory_gb:
            most = psutil.Process(service.process.pid).memory_info().vms + int(memory_gb * 2**30)
            resource.prlimit(service.process.pid, resource.RLIMIT_AS, (most, most))
        yield service


def known_flags(checkout: Path | None) -> str:
    """The help of a checkout's lpr.serve."""
    command = [sys.executable, "-m", "lpr.serve", "--help"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=120).stdout


def at_rest(url: str, seconds: float = 60.0) -> bool:
    """True once the service is ready and has no requests; False if that takes longer than `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(url + "/readyz", timeout=10)
            state = answer.json() if answer.status_code == 200 else {"running": 1}
            if not state.get("running") and not state.get("waiting"):
                return True
        time.sleep(0.1)
    return False


class Memory:
    """Samples the resident memory of a service's front, and of it with all its descendants."""

    def __init__(self, pid: int, every: float = 0.05) -> None:
        """Sample until `growth`."""
        self._process = psutil.Process(pid)
        self._stop = threading.Event()
        self._first = self._peak = self._now()
        self._thread = threading.Thread(target=self._sample, args=(every,))
        self._thread.start()

    def growth(self) -> tuple[float, float]:
        """Stop; by how many MB the peaks of both exceed their first values."""
        self._stop.set()
        self._thread.join()
        front, all_of_them = (
            round((peak - first) / 2**20, 1) for peak, first in zip(self._peak, self._first, strict=True)
        )
        return front, all_of_them

    def _sample(self, every: float) -> None:
        while not self._stop.wait(every) and is_alive(self._process):
            now = self._now()
            self._peak = max(self._peak[0], now[0]), max(self._peak[1], now[1])

    def _now(self) -> tuple[int, int]:
        sizes = []
        with contextlib.suppress(psutil.Error):
            sizes.append(self._process.memory_info().rss)
            for child in self._process.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    sizes.append(child.memory_info().rss)
        return (sizes[0] if sizes else 0), sum(sizes)
