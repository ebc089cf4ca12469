"""Starts the ranks, detects that they hang, and restarts them when all are lost."""

import asyncio
import contextlib
import itertools
import os
import secrets
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from pathlib import Path

from lpr.dist.places import process_state
from lpr.serve.link import Link
from lpr.serve.mesh_state import STALE_PULSE
from lpr.serve.options import ServeArgs
from lpr.serve.ranks import KEYS, LAUNCHER, ORIGIN, SOCKET, conceal, split_flags
from lpr.serve.service import Service

LOOK_EVERY = 0.5  # seconds between two checks of the ranks
SILENT_SECONDS = 2 * STALE_PULSE
"""Most seconds without a pulse of a ready driver; three times as long with several ranks, which detect losses."""
LEAVE_SECONDS = 30.0  # time for a single rank to end after it has closed the connection
STEADY_SECONDS = 30.0  # uptime after which a start counts as successful
LONGEST_BACKOFF = 30.0  # longest delay before a restart after failed starts
LAST_WORDS = 0.2  # seconds for the driver's last messages to arrive
STOP_SECONDS = 10.0  # time for the ranks to end by themselves
THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of a rank block instead of spinning, unless the environment overrides it: the front and its clients use the
same cores, and a step of two spinning threads takes ten times as long if one has lost its core (dev/LOG.md)."""
BRIEF_SPIN = {"GOMP_SPINCOUNT": "1000"}
"""A single rank's threads first spin for about 10 us: a step has 150 parallel loops, and waking up for each takes 4 to
6 ms of a step of 25 ms (SmolLM2, two threads)."""


class Ranks:
    """The ranks as one child process: the only one, or the supervisor of all."""

    def __init__(self, argv: Sequence[str], lp: int, tp: int, socket: Path) -> None:
        """Prepare to start `lp` replicas of `tp` ranks with the flags `argv`."""
        self._is_single = lp * tp == 1
        supervisor = [] if self._is_single else ["lpr.dist.supervisor", str(lp), str(tp)]
        # Ranks do not listen. Without the front's address they do not require keys.
        flags, self._secrets = conceal([*split_flags(argv, (*KEYS, "--host"))[0], "--host=127.0.0.1"])
        self._command = [sys.executable, "-m", *supervisor, "lpr.serve.ranks.rank", *flags]
        self._socket = socket
        self._process: Process | None = None

    async def start(self) -> None:
        """Start them in their own session: Ctrl-C reaches only the front, which lets them finish."""
        # Without the front's keys and another launcher's variables.
        kept = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER, "LPR_API_KEY")}
        spin = BRIEF_SPIN if self._is_single and "OMP_WAIT_POLICY" not in kept else {}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**THREADS, **spin, **kept, **self._secrets, SOCKET: str(self._socket), ORIGIN: secrets.token_hex(8)},
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


class Keeper:
    """The ranks of one service, over all their starts."""

    def __init__(
        self, service: Service, link: Link, folder: Path, make: Callable[[Path], Ranks], args: ServeArgs
    ) -> None:
        """A keeper of ranks made by `make`; each start has its own socket in `folder`."""
        self._service = service
        self._link = link
        self._folder = folder
        self._make = make
        self._args = args
        self._is_alone = args.num_ranks == 1
        self._ranks: Ranks | None = None
        self.begun = asyncio.Event()  # set once the first ranks have been started

    async def run(self) -> tuple[int, str]:
        """Keep ranks until they cannot be started again; returns the exit code and the reason."""
        service, failures = self._service, 0
        for number in itertools.count(1):
            began = time.monotonic()
            how = await self._once(self._folder / f"driver-{number}.sock")
            # A death with running requests is attributed to them: the request that causes it is found and failed.
            explained = service.died(how)
            if service.mesh.is_hopeless:
                return 2, service.mesh.refused or how
            if service.mesh.facts is None:
                return 1, f"the ranks {how}; see what they wrote above"
            welcomed = service.mesh.welcomed is not None and service.mesh.welcomed > began
            steady = welcomed and (explained or time.monotonic() - began > STEADY_SECONDS)
            failures = 0 if steady else failures + 1
            if failures >= self._args.max_failed_starts:
                why = f"they {how}" if service.mesh.refused is None else service.mesh.refused
                code = 1 if service.mesh.refused is None else 2
                return code, f"{failures} starts of the ranks in a row have failed, the last one because {why}"
            wait = min(LONGEST_BACKOFF, 2.0 ** (failures - 1)) if failures else 0.0
            when = f" in {wait:.0f} s" if wait else ""
            why = f" ({service.mesh.refused})" if service.mesh.refused is not None else ""
            print(f"lpr.serve: the ranks {how}{why}; they are started again{when}", file=sys.stderr, flush=True)
            await asyncio.sleep(wait)
        raise AssertionError("there is always a next start")

    async def close(self) -> None:
        """Wait for the end of ranks whose driver was told to stop. Others are stopped at once."""
        if self._ranks is not None:
            await self._ranks.stop(STOP_SECONDS if self._service.mesh.up else LOOK_EVERY)

    async def _once(self, path: Path) -> str:
        """Start the ranks and wait for their end; returns a description of how they ended."""
        try:
            await self._link.listen(path)
            self._ranks = ranks = self._make(path)
            await ranks.start()
            self.begun.set()
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
            if now - looked > 4 * LOOK_EVERY:  # this process was suspended, and must read messages first
                heard = now
            looked = now
            heard = max(heard, self._service.mesh.heard)
            if not ended.done() and (why := self._why_hung(now - heard)) is not None:
                return why
        return None

    def _why_hung(self, silent: float) -> str | None:
        """The reason why ranks without a message for `silent` seconds count as hung, or None."""
        mesh = self._service.mesh
        if self._is_alone and silent > STALE_PULSE and mesh.pid is not None and process_state(mesh.pid) == "T":
            return f"process {mesh.pid} does not run"
        if mesh.up:
            limit, what = SILENT_SECONDS * (1 if self._is_alone else 3), "the driver has said nothing"
        elif self._is_alone and mesh.awaits_takeover:
            limit, what = LEAVE_SECONDS, "the driver has hung up and not ended"
        else:
            # Loading from slow storage can block the pulse thread for long. With several ranks, another one takes
            # over or they reload.
            limit, what = self._args.load_timeout, "nothing was said while they load"
        return f"{what} for {silent:.0f} s" if silent > limit else None


def _name(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
