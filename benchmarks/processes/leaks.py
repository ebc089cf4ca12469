"""What a program and its children leave behind: processes, listening ports, files, shared memory."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


@dataclass
class Traces:
    """Looks at a process and all its descendants while it runs, and for what of them is left afterwards."""

    root: psutil.Process
    folder: Path
    """Where they keep temporary files: nothing else does."""
    seen: set[psutil.Process] = field(default_factory=set)
    """Every process so far; psutil tells them from later ones with the same id."""
    ports: set[int] = field(default_factory=set)
    """Every port that one of them listened at."""
    _shared_before: set[str] = field(default_factory=lambda: set(_shared()))

    def family(self) -> list[psutil.Process]:
        """The process and its descendants that live now, zombies excepted."""
        with contextlib.suppress(psutil.Error):
            living = [self.root, *self.root.children(recursive=True)]
            return [each for each in living if _lives(each)]
        return []

    def look(self) -> None:
        """Take note of what is there now."""
        for process in self.family():
            self.seen.add(process)
            with contextlib.suppress(psutil.Error):
                for link in process.net_connections(kind="inet"):
                    if link.status == psutil.CONN_LISTEN:
                        self.ports.add(link.laddr.port)

    def left(self) -> dict[str, int]:
        """How much is left of them, by kind."""
        listening = set()
        with contextlib.suppress(psutil.Error):
            every = psutil.net_connections(kind="inet")
            listening = {link.laddr.port for link in every if link.status == psutil.CONN_LISTEN and link.pid is None}
        alive = [each for each in self.seen if _lives(each)]
        for process in alive:
            with contextlib.suppress(psutil.Error):
                listening |= {link.laddr.port for link in process.net_connections(kind="inet")}
        return {
            "processes": len(alive),
            "ports": len(self.ports & listening),
            "files": sum(1 for _ in self.folder.rglob("*")),
            "shared_memory": len(set(_shared()) - self._shared_before - _mapped()),
        }


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _shared() -> list[str]:
    return [str(each) for each in SHARED_MEMORY.iterdir()] if SHARED_MEMORY.is_dir() else []


def _mapped() -> set[str]:
    """Shared memory that some living process uses: it may be another program's."""
    used: set[str] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            used |= {each.path for each in process.memory_maps() if each.path.startswith(str(SHARED_MEMORY))}
            used |= {each.path for each in process.open_files() if each.path.startswith(str(SHARED_MEMORY))}
    return used
