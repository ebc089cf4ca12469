"""Hooks of a step: what a program may observe of it, and host work that may run while the device is busy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lpr.engine.request import Chunk, Outcome, Request


class StepHooks:
    """Called by every step; this base class does nothing."""

    def begin_step(self) -> None:
        """A step begins."""

    def end_phase(self, phase: str) -> None:
        """A phase of the step has ended: "draft", "forward", "gather" or "commit"."""

    def while_busy(self) -> None:
        """The device has work: host work here is free."""

    def end_step(self, batch: Sequence[Request], outcomes: Sequence[Outcome], chunks: Sequence[Chunk]) -> None:
        """The step has advanced `batch`."""
