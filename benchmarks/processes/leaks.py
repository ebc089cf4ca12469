"""Leaks of a program and its children: processes, listening ports, files, shared memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Traces:
    """Observes a process and its descendants while it runs, and finds what they leave afterwards."""

    root: psutil.Process
    folder: Path  # Folder of their temporary files, and of no others.
    seen: set[psutil.Process] = field(default_factory=set)
    """Every process so far; psutil distinguishes them from later ones with the same id."""
    ports: set[int] = field(default_factory=set)  # Every port that one of them listened at.
    _shared_before: set[str] = field(default_factory=lambda: set(_shared()))

    def family(self) -> list[psutil.Process]:
        """The process and its descendants that live now, zombies excepted."""
        with contextlib.suppress(psutil.Error):
            living = [self.root, *self.root.children(recursive=True)]
            return [each for each in living if is_alive(each)]
        return []

    def look(self) -> None:
        """Record the processes and ports of this moment."""
        for process in self.family():
            self.seen.add(process)
            with contextlib.suppress(psutil.Error):
                for link in process.net_connections(kind="inet"):
                    if link.status == psutil.CONN_LISTEN:
                        self.ports.add(link.laddr.port)

    def left(self) -> dict[str, int]:
        """Numbers of leftovers, by kind."""
        listening = set()
        with contextlib.suppress(psutil.Error):
            every = psutil.net_connections(kind="inet")
            listening = {link.laddr.port for link in every if link.status == psutil.CONN_LISTEN and link.pid is None}
        alive = [each for each in self.seen if is_alive(each)]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                listening |= {link.laddr.port for link in process.net_connections(kind="inet")}
        return {
            "processes": len(alive),
            "ports": len(self.ports & listening),
            "files": sum(1 for _ in self.folder.rglob("*")),
            "shared_memory": len(set(_shared()) - self._shared_before - _mapped()),
        }


def is_alive(process: psutil.Process) -> bool:
    """True if the process runs and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _shared() -> list[str]:
    return [str(each) for each in SHARED_MEMORY.iterdir()] if SHARED_MEMORY.is_dir() else []


def _mapped() -> set[str]:
    """Shared memory that some living process uses, perhaps another program's."""
    used: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            used |= {each.path for each in process.memory_maps() if each.path.startswith(str(SHARED_MEMORY))}
            used |= {each.path for each in process.open_files() if each.path.startswith(str(SHARED_MEMORY))}
    return used
