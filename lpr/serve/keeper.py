"""Keeps ranks behind the front: starts them, notices that they hang, and starts them again when all are lost."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lpr.serve.link import Link
from lpr.serve.messages import Hello, ToFront
from lpr.serve.service import STALE_PULSE, Service

LOOK_EVERY = 0.5
"""Seconds between two looks at the ranks."""
LEAVE_SECONDS = 30.0
"""Time for a single rank to end that has hung up."""
STEADY_SECONDS = 30.0
"""Ranks that stay up so long have started well, whatever comes then."""
LONGEST_BACKOFF = 30.0
"""Most seconds before ranks that did not start well are started again."""
LAST_WORDS = 0.2
"""Seconds for what the driver said last to come through the socket."""
STOP_SECONDS = 10.0
"""Time for the ranks to end by themselves."""


class RankProcesses(Protocol):
    """The processes of all ranks."""

    async def start(self) -> None:
        """Start them."""
        ...

    async def wait(self) -> int:
        """Return their exit code once all have ended; below 0: the signal that ended them."""
        ...

    async def stop(self, patience: float) -> None:
        """Wait `patience` seconds for their own end, then insist."""
        ...


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the ranks are waited for, and how often they are started."""

    load_seconds: float = 3600.0
    """Without a word before they are ready."""
    silent_seconds: float = 2 * STALE_PULSE
    """Without a pulse of a driver that is ready; with several ranks above what these need to notice it themselves."""
    alone: bool = True
    """Is there one rank, that nobody else looks after?"""
    most_failures: int = 5
    """Starts in a row that may fail."""


class Keeper:
    """The ranks of one service, over all their starts."""

    def __init__(
        self, service: Service, link: Link, folder: Path, make: Callable[[Path], RankProcesses], patience: Patience
    ) -> None:
        """Keep ranks that `make` prepares, whose driver connects to the given socket, one in `folder` per start."""
        self._service = service
        self._link = link
        self._folder = folder
        self._make = make
        self._patience = patience
        self._ranks: RankProcesses | None = None
        self._pid: int | None = None
        """The driver's process."""

    def hear(self, message: ToFront) -> None:
        """Take note of what the driver says of itself."""
        if isinstance(message, Hello):
            self._pid = message.pid

    async def run(self) -> tuple[int, str]:
        """Keep ranks until that is of no use; returns the exit code and the reason."""
        service, failures = self._service, 0
        for number in itertools.count(1):
            began = time.monotonic()
            how = await self._once(self._folder / f"driver-{number}.sock")
            # A death at work is the work's: a request that repeats it is found and failed.
            explained = service.died(how)
            if service.is_hopeless:
                return 2, service.refused or how
            if service.facts is None:
                return 1, f"the ranks {how}; see what they wrote above"
            welcomed = service.welcomed is not None and service.welcomed > began
            steady = welcomed and (explained or time.monotonic() - began > STEADY_SECONDS)
            failures = 0 if steady else failures + 1
            if failures >= self._patience.most_failures:
                why = f"they {how}" if service.refused is None else service.refused
                code = 1 if service.refused is None else 2
                return code, f"{failures} starts of the ranks in a row have failed, the last one because {why}"
            wait = min(LONGEST_BACKOFF, 2.0 ** (failures - 1)) if failures else 0.0
            when = f" in {wait:.0f} s" if wait else ""
            why = f" ({service.refused})" if service.refused is not None else ""
            print(f"lpr.serve: the ranks {how}{why}; they are started again{when}", file=sys.stderr, flush=True)
            await asyncio.sleep(wait)
        raise AssertionError("there is always a next start")

    async def close(self) -> None:
        """Wait for the end of ranks whose driver has been told to stop; others are stopped at once."""
        if self._ranks is not None:
            await self._ranks.stop(STOP_SECONDS if self._service.up else LOOK_EVERY)

    async def _once(self, path: Path) -> str:
        """Start the ranks and stay with them to their end; returns in words how that was."""
        self._pid = None
        try:
            await self._link.listen(path)
            self._ranks = ranks = self._make(path)
            await ranks.start()
        except OSError as failure:  # no memory or process left, for example
            self._link.hang_up()
            if self._ranks is not None:
                await self._ranks.stop(0.0)
            return f"could not be started ({failure.strerror or failure})"
        ended = asyncio.create_task(ranks.wait())
        try:
            hung = await self._watch(ended)
            if hung is not None:
                await ranks.stop(0.0)
            code = await ended
        finally:
            ended.cancel()
        await asyncio.sleep(LAST_WORDS)
        self._link.hang_up()
        await ranks.stop(0.0)  # what is left of them
        return f"were stopped, as {hung}" if hung is not None else f"ended with {_name(code)}"

    async def _watch(self, ended: asyncio.Task[int]) -> str | None:
        """Wait until the ranks end (None), or hang (why)."""
        looked = heard = time.monotonic()
        while not ended.done():
            await asyncio.wait({ended}, timeout=LOOK_EVERY)
            now = time.monotonic()
            if now - looked > 4 * LOOK_EVERY:  # this process stood still, and has to read first what was said meanwhile
                heard = now
            looked = now
            heard = max(heard, self._service.heard)
            if not ended.done() and (why := self._why_hung(now - heard)) is not None:
                return why
        return None

    def _why_hung(self, silent: float) -> str | None:
        """Why ranks that have said nothing for `silent` seconds are not waited for any longer, or None."""
        service, patience = self._service, self._patience
        if patience.alone and silent > STALE_PULSE and self._pid is not None and _is_stopped(self._pid):
            return f"process {self._pid} does not run"
        if service.up:
            limit, what = patience.silent_seconds, "the driver has said nothing"
        elif patience.alone and service.awaits_takeover:
            limit, what = LEAVE_SECONDS, "the driver has hung up and not ended"
        else:
            # Loading can hold up the thread of the pulses for long: on slow storage that is no sign of death. Several
            # ranks take over from each other at once, or load again.
            limit, what = patience.load_seconds, "nothing was said while they load"
        return f"{what} for {silent:.0f} s" if silent > limit else None


def _name(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _is_stopped(pid: int) -> bool:
    """Does a process of this machine stand still by SIGSTOP? False where that cannot be seen."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state == "T"
