"""Exceptions at any line of lpr, as Ctrl-C raises them: by a tracer, so that a number gives the same line again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tests.fakes.paths import ROOT

FOLDERS = tuple(str(ROOT / "lpr" / name) for name in ("engine", "core", "model"))
LOCKS = str(ROOT / "lpr" / "engine" / "turns.py")
"""Not interrupted: Python looks for signals at calls, and never between a `with` and its lock, as a tracer could."""


class Countdown:
    """Raises an exception at the n-th line of lpr's engine and model that this thread runs."""

    def __init__(self, number: int, make: Callable[[], BaseException] = KeyboardInterrupt) -> None:
        """Without an end for a negative `number`: then `number` counts the lines, downwards."""
        self.number, self._make = number, make
        self.where = ""
        """The line at which it was raised."""

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            name = frame.f_code.co_filename
            return self._trace if name.startswith(FOLDERS) and name != LOCKS else None
        if event == "line":
            self.number -= 1
            if self.number == 0:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise self._make()
        return self._trace


@contextmanager
def interrupted_at(number: int, make: Callable[[], BaseException] = KeyboardInterrupt) -> Iterator[Countdown]:
    """Interrupt this thread at its n-th line in the block; the block has to expect it."""
    countdown, before = Countdown(number, make), sys.gettrace()
    sys.settrace(countdown._trace)
    try:
        yield countdown
    finally:
        sys.settrace(before)
