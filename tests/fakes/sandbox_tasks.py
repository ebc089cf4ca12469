"""Tasks that misbehave, for the process of a sandbox."""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import sys
import time
from typing import Any

from lpr.core.grammar import matcher as compiled
from lpr.protocol import ErrorCode
from lpr.serve.errors import ApiError

_prepared: list[Any] = []


def prepare(*args: Any) -> None:
    """Note what all tasks need."""
    _prepared[:] = args


def echo(value: Any) -> Any:
    """The value itself."""
    return value


def spin() -> None:
    """Need time in Python."""
    while True:
        pass


def spin_in_c() -> int:
    """Need time in C, where no signal handler of Python runs."""
    return pow(7, 10**9)


def sleep(seconds: float) -> None:
    """Need time without a processor."""
    time.sleep(seconds)


def take(num_bytes: int) -> int:
    """Need memory."""
    return len(b"x" * num_bytes)


def recurse() -> Any:
    """Need stack, beyond what the interpreter counts."""
    sys.setrecursionlimit(10**6)
    return json.loads("[" * 10**6 + "]" * 10**6)


def segfault() -> None:
    """Read what is not there."""
    ctypes.string_at(0)


def leave() -> None:
    """End without a result."""
    os._exit(3)


def refuse() -> None:
    """Refuse what a client sent."""
    raise ApiError(ErrorCode.TOO_LONG, "it is too long", "prompt")


def fail() -> None:
    """A bug."""
    raise KeyError("a bug")


def follow(grammar: str, seed: int, steps: int) -> tuple[float, float]:
    """Do what a rank does with a grammar; returns the seconds to compile it, and those of the slowest step."""
    import llguidance

    tokenizer = llguidance.LLTokenizer(_prepared[0], n_vocab=_prepared[1])
    dice, began = random.Random(seed), time.thread_time()
    matcher = compiled(tokenizer, grammar).deep_copy()
    compiling, slowest = time.thread_time() - began, 0.0
    for step in range(steps):
        began = time.thread_time()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        slowest = max(slowest, time.thread_time() - began)
        allowed = [token for token in range(_prepared[1]) if mask >> token & 1]
        began = time.thread_time()
        if matcher.is_error() or not allowed or not matcher.consume_token(dice.choice(allowed)):
            break
        slowest = max(slowest, time.thread_time() - began)
        if step % 7 == 6:
            matcher.rollback(3)
        if matcher.is_stopped():
            break
    return compiling, slowest


def tell() -> list[Any]:
    """What this process knows: its process, its parent's, its variables and what it was prepared with."""
    return [os.getpid(), os.getppid(), sorted(os.environ), _prepared]


def confined() -> list[Any]:
    """Whether it can gain privileges, and why it can write no file, connect, signal its parent or start a program."""
    whys = []
    for attempt in (
        lambda: os.write(os.memfd_create("file"), b"x"),
        socket.socket,
        lambda: os.kill(os.getppid(), 0),
        lambda: os.execv("/bin/true", ["true"]),
    ):
        try:
            attempt()
            whys.append("")
        except OSError as failure:
            whys.append(os.strerror(failure.errno or 0))
    return [ctypes.CDLL(None).prctl(39, 0, 0, 0, 0), whys]


def interfaces() -> list[str]:
    """The network's interfaces."""
    with open("/proc/net/dev", encoding="ascii") as file:
        return [line.partition(":")[0].strip() for line in file if ":" in line]


TASKS = {
    task.__name__: task
    for task in (
        echo,
        spin,
        spin_in_c,
        sleep,
        take,
        recurse,
        segfault,
        leave,
        refuse,
        fail,
        follow,
        tell,
        confined,
        interfaces,
    )
}
