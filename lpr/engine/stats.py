"""Counts of decoding: steps, tokens, and the nodes of each draft source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lpr.core.state import Counts
from lpr.core.tree import Source
from lpr.protocol import Usage

SOURCES = {int(source): source.name.lower() for source in Source}
At = tuple[int, int]  # a node's source and depth


@dataclass
class SourceCount:
    """Nodes of one draft source; a node counts for the source that proposed it first."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class DecodeStats:
    """Counts of one request, or the sum over several."""

    num_steps: int = 0
    """Decode steps: each emits at least one token."""
    num_fill_steps: int = 0
    """Steps that computed a part of a long prompt."""
    num_tokens: int = 0
    """Tokens emitted."""
    num_nodes: int = 0
    """Tree nodes evaluated, roots included."""
    drafted: Counter[At] = field(default_factory=Counter)
    """Nodes evaluated, by source and depth."""
    accepted: Counter[At] = field(default_factory=Counter)
    """Nodes on an accepted path, likewise."""

    @property
    def tokens_per_step(self) -> float:
        """Acceptance length: emitted tokens per decode step."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def sources(self) -> dict[str, SourceCount]:
        """Per draft source: nodes drafted and accepted."""
        found: dict[str, SourceCount] = {}
        for (source, depth), count in self.drafted.items():
            if source != Source.ROOT:
                total = found.setdefault(SOURCES[source], SourceCount())
                total.drafted += count
                total.accepted += self.accepted[source, depth]
        return found

    def count(self, counts: Counts) -> None:
        """Add steps of SequenceState.take_counts, without their tokens: the output may end before the last one."""
        num_steps, num_nodes, _, drafted, accepted = counts
        self.num_steps += num_steps
        self.num_nodes += num_nodes
        self.drafted.update(drafted)
        self.accepted.update(accepted)

    def usage(self, num_cached: int) -> Usage:
        """The counts as a message, for a request with `num_cached` prompt tokens from the prefix cache."""
        sources, depths = self.sources, Counter[int]()
        for (source, depth), count in self.accepted.items():
            if source != Source.ROOT:
                depths[depth] += count
        return Usage(
            num_steps=self.num_steps,
            num_fill_steps=self.num_fill_steps,
            num_cached=num_cached,
            drafted=sum(each.drafted for each in sources.values()),
            accepted=sum(each.accepted for each in sources.values()),
            accepted_per_depth=[depths[depth] for depth in range(1, max(depths, default=0) + 1)],
            by_source={name: (each.drafted, each.accepted) for name, each in sources.items()},
            num_tokens=self.num_tokens,
        )

    def add(self, other: DecodeStats) -> None:
        self.num_steps += other.num_steps
        self.num_fill_steps += other.num_fill_steps
        self.num_tokens += other.num_tokens
        self.num_nodes += other.num_nodes
        self.drafted.update(other.drafted)
        self.accepted.update(other.accepted)
