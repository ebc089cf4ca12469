"""What the scheduler and its parts know of a request; the planner's simulated requests are described by it too."""

from __future__ import annotations

from typing import Protocol


class Seen(Protocol):
    """Counts of a request's decode steps so far."""

    @property
    def num_steps(self) -> int:
        """Decode steps."""

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""

    @property
    def num_nodes(self) -> int:
        """Tree nodes evaluated, roots included."""


class Schedulable(Protocol):
    """A request as it is scheduled."""

    tokens: list[int]
    """Prompt and output so far."""
    tenant: str
    """K/V is shared among requests of one tenant only."""
    priority: int
    arrived: float
    """Its arrival in seconds; orders the queue (lpr.engine.waiting)."""
    arrived_ms: float
    """When it came, on the clock of the targets; written by the scheduler."""
    homes: list[int]
    """The ranks that serve it, ascending; written by the scheduler."""
    slots: list[int]
    """Per rank: its slot, -1 where it has none; written by the scheduler."""
    num_computed_tokens: list[int]
    """Per rank: leading tokens whose K/V it holds in the request's slot. Read of running requests only; the scheduler
    writes it for ranks that join or leave."""

    @property
    def num_pending(self) -> int:
        """Uncomputed tokens of the home rank that lacks most, the root included; read of running requests only."""

    @property
    def num_left(self) -> int:
        """Most tokens that it may still emit."""

    @property
    def stats(self) -> Seen:
        """Its decode steps so far."""
