"""What decoding did: steps, tokens, and what each draft source asked for and earned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from lpr.core.tree import Source


@dataclass
class SourceCount:
    """Nodes of one draft source."""

    drafted: int = 0
    accepted: int = 0


@dataclass
class DecodeStats:
    """Counts of one request, or of several added up."""

    num_steps: int = 0
    """Decode steps: each emits at least one token. Steps that only fill the cache with a long prompt are apart."""
    num_fill_steps: int = 0
    num_tokens: int = 0
    """Tokens emitted."""
    num_nodes: int = 0
    """Tree nodes evaluated, roots included."""
    sources: dict[str, SourceCount] = field(default_factory=dict)
    """Per draft source: nodes drafted and accepted. A node counts for the source that named it first."""

    @property
    def tokens_per_step(self) -> float:
        """S, the step compression."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    def count_step(self, sources: Iterable[int], accepted: Iterable[int]) -> None:
        """Count one tree by the sources of its nodes, and the sources of the accepted path."""
        self.num_steps += 1
        for source, count in Counter(sources).items():
            self.num_nodes += count
            if source:
                self._of(source).drafted += count
        for source, count in Counter(accepted).items():
            if source:
                self._of(source).accepted += count

    def add(self, other: DecodeStats) -> None:
        """Add the counts of `other`."""
        self.num_steps += other.num_steps
        self.num_fill_steps += other.num_fill_steps
        self.num_tokens += other.num_tokens
        self.num_nodes += other.num_nodes
        for name, count in other.sources.items():
            mine = self.sources.setdefault(name, SourceCount())
            mine.drafted += count.drafted
            mine.accepted += count.accepted

    def _of(self, source: int) -> SourceCount:
        return self.sources.setdefault(Source(source).name.lower(), SourceCount())
