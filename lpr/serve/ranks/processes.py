"""The processes of the ranks, as the front starts and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

SOCKET = "LPR_SERVE_SOCKET"
"""Environment variable that tells rank 0 where the front listens."""
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR",
            "MASTER_PORT")  # fmt: skip
"""Environment variables of a launcher's ranks."""
ORIGIN = "LPR_SERVE_ORIGIN"
"""Environment variable that names one start of the ranks, so that a driver recognises its own shared drafts."""


def environment(socket: Path) -> dict[str, str]:
    """The environment of one start of the ranks, without the front's keys and another launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "LPR_API_KEY")}
    return {**kept, SOCKET: str(socket), ORIGIN: secrets.token_hex(8)}


class Ranks:
    """The ranks as one child process: the only one, or the supervisor of all."""

    def __init__(self, argv: Sequence[str], lp: int, tp: int, socket: Path) -> None:
        """Prepare to start `lp` replicas of `tp` ranks with the flags `argv`."""
        supervisor = [] if lp * tp == 1 else ["lpr.dist.supervisor", str(lp), str(tp)]
        self._command = [sys.executable, "-m", *supervisor, "lpr.serve.ranks.rank", *argv]
        self._socket = socket
        self._process: Process | None = None

    async def start(self) -> None:
        """Start them in their own session: Ctrl-C reaches only the front, which lets them finish."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env=environment(self._socket),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
        )

    async def wait(self) -> int:
        """Return the exit code once all have ended; below 0: the signal that ended them."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, patience: float) -> None:
        """Wait `patience` seconds for their own end, then send signals."""
        if self._process is None:
            return
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience)
                return
