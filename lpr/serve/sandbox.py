"""A disposable process for work that a client can make slow, large or deep: the service's side (see sandboxed)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import struct
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

import msgspec

from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.errors import ApiError
from lpr.serve.sandboxed import PREPARE, Result, Task, frame, patience

START_SECONDS = 60.0
"""Time for the process to start, and to prepare."""
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Variables that the process gets: no keys."""
_SINGLE = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""A process with threads cannot be forked."""


class ExhaustedError(Exception):
    """The work needs more time, memory or stack than it gets; the message ends a sentence: "it needs ..."."""


def sandbox(module: str, time: limits.Limit, memory: limits.Limit) -> Sandbox:
    """A Sandbox with these limits."""
    return Sandbox(module, time.most / 1000, memory.most << 20)


class Sandbox:
    """A process that does one task at a time, started again if it ends. Not for use from several event loops."""

    def __init__(self, module: str, seconds: float, memory: int) -> None:
        """Do the tasks of `module` with `seconds` of CPU time and `memory` bytes each."""
        self._command = [sys.executable, "-m", "lpr.serve.sandboxed", module, str(seconds), str(memory)]
        self._patience = 2 * patience(seconds)  # its own, and what is left of the one before
        self._prepared: list[Any] | None = None
        self._process: Process | None = None
        self._is_prepared = False
        self._length: int | None = None
        """Bytes of the next result, once they are known: who waits for it may be cancelled between the two."""
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()
        self._decoder = msgspec.msgpack.Decoder(Result)
        self.num_waiting = 0
        """Tasks that wait or run."""

    def prepare(self, *args: Any) -> None:
        """Give the process, and each that takes its place, what its tasks need."""
        self._prepared, self._is_prepared = list(args), False

    async def start(self) -> None:
        """Start the process now, so that the first task need not wait for it. The task tries again if that fails."""
        with contextlib.suppress(ApiError, OSError):
            async with self._turn:
                await self._ready()

    async def run(self, name: str, *args: Any) -> Any:
        """Do a task. Raises the ApiError that it raises, one if too many tasks wait, and ExhaustedError."""
        if self.num_waiting >= limits.ASIDE.most:
            raise ApiError(ErrorCode.OVERLOADED, "too many large requests wait to be checked", retry_after=1)
        self.num_waiting += 1
        try:
            async with self._turn:
                process = await self._ready()
                return await self._ask(process, name, list(args), self._patience)
        finally:
            self.num_waiting -= 1

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _ready(self) -> Process:
        """The process, prepared; raises ApiError if it does not start."""
        if self._process is None or self._process.returncode is not None:
            kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, env=kept | _SINGLE, start_new_session=True, limit=1 << 24
            )
            self._is_prepared, self._length = False, None
        if self._prepared is not None and not self._is_prepared:
            await self._ask(self._process, PREPARE, self._prepared, START_SECONDS)
            self._is_prepared = True
        return self._process

    async def _ask(self, process: Process, name: str, args: list[Any], seconds: float) -> Any:
        task = Task(next(self._numbers), name, args)
        try:
            async with asyncio.timeout(seconds):
                result = await self._exchange(process, task)
        except (TimeoutError, OSError, EOFError) as failure:  # the machine is overloaded, or has ended it
            await _end(process)
            raise ApiError(ErrorCode.OVERLOADED, "the request could not be checked now", retry_after=1) from failure
        if result.refused is not None:
            code, message, param = result.refused
            raise ApiError(ErrorCode(code), message, param)
        if result.is_bug:
            raise RuntimeError(f"{name} failed in its sandbox: {result.ended}")
        if result.ended is not None:
            raise ExhaustedError(result.ended)
        return result.value

    async def _exchange(self, process: Process, task: Task) -> Result:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frame(task))
        await process.stdin.drain()
        while True:
            if self._length is None:
                (self._length,) = struct.unpack(">I", await process.stdout.readexactly(4))
            body, self._length = await process.stdout.readexactly(self._length), None
            result = self._decoder.decode(body)
            if result.number == task.number:  # others are of tasks whose clients have gone
                return result


async def _end(process: Process) -> None:
    """Kill a process, which may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
