"""The process of a sandbox: does work that a client can make slow, large or deep, each piece in a fork of its own.

Started as `python -m lpr.serve.sandboxed MODULE`, by lpr.serve.sandbox. Tasks arrive on standard input, results leave
on standard output: structs in msgpack, each preceded by its length. A task names a function of MODULE's `TASKS`, and
the CPU time and memory of its fork, which has a quarter of the usual stack, so code that recurses on what a client sent
fails here and not in the service. `prepare` is called in this process itself, with what all later forks need.

Linux gives the process no new privileges, and where it lets users make namespaces, no network. Its forks can write no
files, make no connections, and start, signal or read no other process (lpr.serve.confined).
"""

from __future__ import annotations

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
from typing import Any, NoReturn

import msgspec

from lpr.dist.places import die_with_parent
from lpr.serve.confined import confine, filter_calls
from lpr.serve.errors import ApiError
from lpr.serve.messages import frame

STACK = 2 << 20  # Bytes of stack. The ranks' main threads have 8 MiB, unless the system's own limit is lower.
PATIENCE, LEAST_PATIENCE = 10, 5.0
"""Seconds that a task may take, on a busy machine, per second of CPU time, and at least."""
FILES = 64  # files that a fork may have open
NICE = 10  # how far the processes stand behind the service, which answers others meanwhile
LONGEST_TRACE = 4000  # characters of a bug's traceback that are told
PREPARE = "prepare"  # name of the task that is not done in a fork
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
    ended: str | None = None  # what the task needed too much of, for the end of a sentence; or its error, if `is_bug`
    is_bug: bool = False


def main(argv: list[str]) -> None:
    """Do tasks until the service hangs up."""
    confine()
    die_with_parent()  # after the above, which forgets it
    module = importlib.import_module(argv[0])
    os.nice(int(argv[1]))  # now: tasks of clients stand behind, and not the start that they wait for
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
            gc.freeze()  # so that no fork copies what all share
            reply = frame(Result(task.number))
        else:
            reply = _forked(task, module.TASKS)
        sys.stdout.buffer.write(reply)
        sys.stdout.buffer.flush()


def patience(seconds: float) -> float:
    return max(LEAST_PATIENCE, PATIENCE * seconds)


def _forked(task: Task, functions: Mapping[str, Any]) -> bytes:
    """Do a task in a fork; returns its result as a frame."""
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
    """In a fork: do a task under limits, write its result to `writer`, and end."""
    code = 1
    try:
        die_with_parent()
        signal.setitimer(signal.ITIMER_PROF, task.seconds)  # its signal ends the process, whatever code runs
        for kind, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_NPROC, 0), (resource.RLIMIT_NOFILE, FILES)):
            resource.setrlimit(kind, (most, most))
        with contextlib.suppress(OSError, ValueError):  # Linux only
            with open("/proc/self/statm", encoding="ascii") as file:
                memory = task.memory + int(file.read().split()[0]) * resource.getpagesize()
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
    except BaseException:  # a panic of Rust is no Exception
        return Result(task.number, ended=traceback.format_exc()[-LONGEST_TRACE:], is_bug=True)


if __name__ == "__main__":
    main(sys.argv[1:])
