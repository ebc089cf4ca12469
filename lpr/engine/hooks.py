"""Step hooks: how a trace, a benchmark's clock or a service's sending takes part in an engine's steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lpr.engine.request import Outcome, Request
    from lpr.protocol import Chunk


class StepHooks:
    """Called by each step of an engine; the base class does nothing."""

    def begin_step(self) -> None:
        """A step begins."""

    def end_phase(self, phase: str) -> None:
        """A phase of the step has ended: "draft", "forward", "gather" or "commit"."""

    def while_busy(self) -> None:
        """The device has work: what the host does here takes no time, as long as the device takes longer."""

    def end_step(self, batch: Sequence[Request], outcomes: Sequence[Outcome], chunks: Iterable[Chunk]) -> None:
        """The step has advanced the requests of `batch`, none of which has left its slot yet.

        `chunks` are what it added to each, without text; they are made when they are iterated.
        """
