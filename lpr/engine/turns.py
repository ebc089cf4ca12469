"""A fair lock: one thread at a time uses an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar

PATIENCE = 600.0
"""Seconds that a thread waits for its turn. A step takes milliseconds, or minutes where a compiler runs."""
T = TypeVar("T")


class Turns:
    """A reentrant lock, granted in the order of the calls.

    Python's own locks are not fair: a thread that takes step after step would starve the others.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._next = threading.Lock()  # held by the thread whose turn is next
        self.changing: set[Any] = set()  # requests whose chunks are being made, or were when an exception came
        self.is_stepping = False  # True while the thread whose turn it is takes a step

    @property
    def is_mine(self) -> bool:
        mine: bool = self._lock._is_owned()
        return mine

    def __enter__(self) -> None:
        """Wait for the turn; raises RuntimeError if it does not come within PATIENCE seconds."""
        if self.is_mine:
            self._lock.acquire()
            return
        try:
            with self._next:
                if self._lock.acquire(timeout=PATIENCE):
                    self.is_stepping = False  # Ctrl-C at the end of this thread's last turn may have left it set
                    return
        except BaseException:  # Ctrl-C: the turn may be this thread's already
            if self.is_mine:
                self._lock.release()
            raise
        raise RuntimeError(f"another thread has worked on this engine for {PATIENCE:.0f} seconds")

    # The lock's own method: Ctrl-C at the start of a Python method would leave the lock held.
    __exit__ = property(attrgetter("_lock.__exit__"))

    def refuse_within(self, name: str) -> None:
        """Raise RuntimeError if this thread is within a step: the call `name` would change the step's state."""
        if self.is_stepping and self.is_mine:
            raise RuntimeError(
                f"{name} was called within a step of the same engine, by a logits processor, a hook or a callback: "
                "use another engine there, or call it after the step"
            )


def in_turn(method: Callable[..., T]) -> Callable[..., T]:
    """Decorator: the method holds `self.turns`."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        with self.turns:
            return method(self, *args, **kwargs)

    return call
