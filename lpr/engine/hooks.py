"""Step hooks: callbacks in each step, for traces, benchmarks and a service's sending."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lpr.engine.outcomes import Outcome
    from lpr.engine.request import Request
    from lpr.protocol import Chunk


class StepHooks:
    """Called by each step of an engine; the base class does nothing."""

    def begin_step(self) -> None:
        """A step begins."""

    def end_phase(self, phase: str) -> None:
        """A phase of the step has ended: "draft", "forward", "gather" or "commit"."""

    def while_busy(self) -> None:
        """The device is busy: host work done here is hidden behind the forward."""

    def end_step(self, batch: Sequence[Request], outcomes: Sequence[Outcome], chunks: Iterable[Chunk]) -> None:
        """The step has advanced the requests of `batch`; none of them has left its slot yet.

        `chunks` is a lazy iterable of each request's new tokens, without text.
        """

    def between_steps(self) -> None:
        """On one rank: what is submitted now joins the next step, which may begin before `step` returns."""
