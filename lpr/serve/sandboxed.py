"""The process of a sandbox: runs work that a client can make slow, large or deeply nested, each task in its own fork.

Started as `python -m lpr.serve.sandboxed MODULE`, by lpr.serve.sandbox. Tasks arrive on standard input, results leave
on standard output: structs in msgpack, each preceded by its length. A task names a function of MODULE's `TASKS`, and
the CPU time and memory of its fork. A fork has a quarter of the usual stack, so that code which recurses on clients'
input fails here and not in the service. `prepare` is called in this process itself, for all later forks.

On Linux the process has no new privileges and, if user namespaces are allowed, no network. Its forks cannot write
files, open connections, or start, signal or read other processes (lpr.serve.confined).
"""

import contextlib
import gc
import importlib
import os
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from lpr.dist.places import die_with_parent
from lpr.serve.confined import confine, filter_calls
from lpr.serve.errors import ApiError
from lpr.serve.messages import frame

STACK = 2 << 20  # Bytes of stack. The ranks' main threads have 8 MiB, unless the system's own limit is lower.
PATIENCE, LEAST_PATIENCE = 10, 5.0
"""Wall-clock limit of a task: PATIENCE seconds per second of CPU time, at least LEAST_PATIENCE."""
FILES = 64  # files that a fork may have open
NICE = 10  # niceness of the processes, below the service's priority
LONGEST_TRACE = 4000  # most characters of a bug's traceback in a result
PREPARE = "prepare"  # name of the task that runs without a fork
TOO_DEEP, TOO_LARGE, TOO_LATE = "more depth than there is stack", "more memory than it may use", "more time than it may"


class Task(msgspec.Struct, array_like=True):
    """A function of the module, its arguments, and its limits: seconds of CPU time, and bytes of memory."""

    number: int
    name: str
    args: list[Any]
    seconds: float
    memory: int = 0


class Result(msgspec.Struct, array_like=True):
    """What a task returned, or how it failed."""

    number: int
    value: Any = None
    refused: tuple[str, str, str | None] | None = None  # code, message and field of an ApiError
    ended: str | None = None  # the exceeded resource, to complete a sentence; or the error, if `is_bug`
    is_bug: bool = False


def main(argv: list[str]) -> None:
    """Run tasks until the service closes the connection."""
    confine()
    die_with_parent()  # after `confine`, which clears it
    module = importlib.import_module(argv[0])
    os.nice(int(argv[1]))  # only now, so that the start is not slowed down
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    usual = soft if soft != resource.RLIM_INFINITY else 4 * STACK
    resource.setrlimit(resource.RLIMIT_STACK, (min(STACK, usual // 4), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder = msgspec.msgpack.Decoder(Task)
    while head := sys.stdin.buffer.read(4):
        task = decoder.decode(sys.stdin.buffer.read(struct.unpack(">I", head)[0]))
        if task.name == PREPARE:
            if task.args:
                module.prepare(*task.args)
            gc.collect()
            gc.freeze()  # avoids copy-on-write by the collector in forks
            reply = frame(Result(task.number))
        else:
            reply = _forked(task, module.TASKS)
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


def patience(seconds: float) -> float:
    return max(LEAST_PATIENCE, PATIENCE * seconds)


def _forked(task: Task, functions: Mapping[str, Any]) -> bytes:
    """Run a task in a fork; returns its result as a frame."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _work(task, functions, writer)
    os.close(writer)
    found = _read(reader, time.monotonic() + patience(task.seconds))
    os.close(reader)
    if found is None:
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if found is not None and status == 0:
        return found
    reasons = {-signal.SIGPROF: f"more than {task.seconds:g} s", -signal.SIGSEGV: TOO_DEEP, -signal.SIGBUS: TOO_DEEP}
    return frame(Result(task.number, ended=TOO_LATE if found is None else reasons.get(status, TOO_LARGE)))


def _read(pipe: int, end: float) -> bytes | None:
    """All that comes from `pipe`, or None if that does not end before `end`."""
    found = bytearray()
    while (left := end - time.monotonic()) > 0 and select.select([pipe], [], [], left)[0]:
        data = os.read(pipe, 1 << 20)
        if not data:
            return bytes(found)
        found += data
    return None


def _work(task: Task, functions: Mapping[str, Any], writer: int) -> NoReturn:
    """In a fork: run a task under limits, write its result to `writer`, and exit."""
    code = 1
    try:
        die_with_parent()
        signal.setitimer(signal.ITIMER_PROF, task.seconds)  # its signal ends the process during any code
        for kind, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, FILES)):
            resource.setrlimit(kind, (most, most))
        with contextlib.suppress(OSError, ValueError):  # Linux only
            memory = task.memory + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        filter_calls()
        with os.fdopen(writer, "wb") as output:
            output.write(frame(_result(task, functions)))
        code = 0
    finally:
        os._exit(code)


def _result(task: Task, functions: Mapping[str, Any]) -> Result:
    try:
        return Result(task.number, functions[task.name](*task.args))
    except ApiError as failure:
        return Result(task.number, refused=(failure.code.value, failure.message, failure.param))
    except RecursionError:
        return Result(task.number, ended=TOO_DEEP)
    except (MemoryError, OverflowError):
        return Result(task.number, ended=TOO_LARGE)
    except BaseException:  # a Rust panic is not an Exception
        return Result(task.number, ended=traceback.format_exc()[-LONGEST_TRACE:], is_bug=True)


if __name__ == "__main__":
    main(sys.argv[1:])
