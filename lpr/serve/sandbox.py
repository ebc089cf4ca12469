"""Disposable processes for work that a client can make slow, large or deeply nested: the service's side.

Process pools in packages (pebble, loky, concurrent.futures) unpickle the output of workers, which process clients'
input, and have neither CPU and memory limits per task nor fair queues.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from lpr.protocol import ErrorCode
from lpr.serve import limits
from lpr.serve.errors import ApiError
from lpr.serve.messages import frame
from lpr.serve.sandboxed import NICE, PATIENCE, PREPARE, Result, Task, patience
from lpr.serve.turns import Turns

START_SECONDS = 60.0  # time for a process to start, and to prepare
SPARE_SECONDS = 2.0  # time that a process has, beyond that of a task, to tell of its end
_KEPT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")
"""Environment variables passed to the process; no secrets."""
_SINGLE = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""A process with threads cannot be forked."""


class ExhaustedError(Exception):
    """The task exceeds its time, memory or stack; the message completes the sentence "it needs ..."."""


def sandbox(
    module: str, time: limits.Limit, memory: limits.Limit, size: int = 1, weights: Mapping[str, float] | None = None
) -> Sandbox:
    return Sandbox(module, time.most / 1000, memory.most << 20, size, weights)


class Sandbox:
    """A few processes that run one task each at a time and are restarted if they end. For one event loop only."""

    def __init__(
        self, module: str, seconds: float, memory: int, size: int = 1, weights: Mapping[str, float] | None = None
    ) -> None:
        """Run tasks of `module` with `seconds` of CPU time and `memory` bytes each; keys share by `weights`."""
        self._within = (seconds, memory)
        self._workers = [_Worker(module) for _ in range(size)]
        self._idle = list(self._workers)
        self._turns = Turns(size, weights if weights is not None else {})

    @property
    def num_waiting(self) -> int:
        return len(self._turns)

    def prepare(self, *args: Any) -> None:
        """Set the arguments of `prepare` for all processes, also restarted ones."""
        for each in self._workers:
            each.prepare(args)

    async def start(self) -> None:
        """Start the processes now, so that the first tasks need not wait. The tasks try again if that fails."""
        await asyncio.gather(*(each.start() for each in self._workers))

    async def run(
        self, name: str, *args: Any, key: str = "", size: int = 0, within: tuple[float, int] | None = None
    ) -> Any:
        """Run a task of about `size` bytes for a client with `key`; it continues even if its caller is cancelled.

        Raises the task's ApiError, an ApiError if too many tasks wait, and ExhaustedError. `within` overrides the
        limits.
        """

        async def work() -> Any:
            worker = self._idle.pop()
            try:
                return await worker.ask(name, list(args), *(within or self._within))
            finally:
                self._idle.append(worker)

        return await self._turns.run(key, size, work)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._workers))


class _Worker:
    def __init__(self, module: str) -> None:
        self._command = [sys.executable, "-m", "lpr.serve.sandboxed", module, str(NICE)]
        self._prepared = list[Any]()  # empty at first: the answer then confirms the start
        self._process: Process | None = None
        self._starting: asyncio.Task[Process] | None = None
        self._is_closed = False
        self._is_prepared = False
        self._numbers = itertools.count()
        self._turn = asyncio.Lock()
        self._decoder = msgspec.msgpack.Decoder(Result)

    def prepare(self, args: Sequence[Any]) -> None:
        self._prepared, self._is_prepared = list(args), False

    async def start(self) -> None:
        with contextlib.suppress(ApiError, OSError):
            async with self._turn:
                await self._ready()

    async def ask(self, name: str, args: list[Any], seconds: float, memory: int) -> Any:
        async with self._turn:
            process = await self._ready()
            return await self._ask(process, Task(next(self._numbers), name, args, seconds, memory))

    async def close(self) -> None:
        self._is_closed = True
        if self._starting is not None:
            await asyncio.wait({self._starting}, timeout=START_SECONDS)
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _ready(self) -> Process:
        """The process, prepared; raises ApiError if it does not start, or is closed."""
        if self._is_closed:
            raise ApiError(ErrorCode.DRAINED, "the server shuts down")
        process = self._process
        if process is None or process.returncode is not None:
            self._is_prepared = False
            # In a task of its own, for which `close` waits: asyncio can wait for ever in a start that is cancelled.
            self._starting = asyncio.create_task(self._started())
            process = await asyncio.shield(self._starting)
        while not self._is_prepared:  # the start does not count for the first task's time
            prepared = self._prepared
            await self._ask(process, Task(next(self._numbers), PREPARE, prepared, START_SECONDS / PATIENCE))
            self._is_prepared = prepared is self._prepared  # false if `prepare` was called meanwhile
        return process

    async def _started(self) -> Process:
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, env=kept | _SINGLE, start_new_session=True, limit=1 << 24
        )
        return self._process

    async def _ask(self, process: Process, task: Task) -> Any:
        try:
            async with asyncio.timeout(patience(task.seconds) + SPARE_SECONDS):
                result = await self._exchange(process, task)
        except (TimeoutError, OSError, EOFError) as failure:  # the machine is overloaded, or has killed the process
            await _end(process)
            raise ApiError(ErrorCode.OVERLOADED, "the request could not be checked now", retry_after=1) from failure
        except asyncio.CancelledError:  # its late result would be read as the next task's
            await _end(process)
            raise
        if result.refused is not None:
            code, message, param = result.refused
            raise ApiError(ErrorCode(code), message, param)
        if result.is_bug:
            raise RuntimeError(f"{task.name} failed in its sandbox: {result.ended}")
        if result.ended is not None:
            raise ExhaustedError(result.ended)
        return result.value

    async def _exchange(self, process: Process, task: Task) -> Result:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frame(task))
        await process.stdin.drain()
        (length,) = struct.unpack(">I", await process.stdout.readexactly(4))
        result = self._decoder.decode(await process.stdout.readexactly(length))
        if result.number != task.number:
            raise EOFError("a result of another task")
        return result


async def _end(process: Process) -> None:
    """Kill a process, which may have ended by itself."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
