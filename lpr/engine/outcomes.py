"""The results of a step, as requests, hooks and clocks see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lpr.core.tree import Source
from lpr.native import Concluded, Conclusion
from lpr.protocol import Chunk, TokenLogprobs

MODEL_SOURCE = "model"
"""Source of a bonus token, which the model itself chose."""


@dataclass(slots=True)
class Outcome:
    """The result of one step for one sequence."""

    concluded: Conclusion
    """Tree, accepted path and emitted tokens."""
    num_entries: Sequence[int]
    """Tokens that each rank evaluated in the step: pending chains and shards of all sequences."""
    logprobs: list[TokenLogprobs] | None = None
    """Per node of the tree, in steps in which some request asks for them."""

    def describe(self, chunk: Chunk, num_logprobs: int | None, with_sources: bool) -> None:
        """Add to a chunk of the step's tokens `num_logprobs` log-probabilities of each, and their sources."""
        path, taken = self.concluded.path, len(chunk.token_ids)
        if num_logprobs is not None and self.logprobs is not None:
            found = [self.logprobs[node] for node in path[:taken]]
            chunk.logprobs = [TokenLogprobs(each.logprob, each.top[:num_logprobs]) for each in found]
        if with_sources:
            sources = self.concluded.tree.sources
            named = [Source(sources[node]).name.lower() for node in path[1 : 1 + taken]]
            chunk.sources = [*named, MODEL_SOURCE][:taken]

    def num_predicted(self, taken: int) -> tuple[int, int]:
        """Nodes drafted from a prediction, and those among the first `taken` tokens."""
        sources, path = self.concluded.tree.sources, self.concluded.path
        accepted = sum(sources[node] == Source.PREDICTION for node in path[1 : 1 + taken])
        return sources.count(Source.PREDICTION), accepted


@dataclass(slots=True)
class Outcomes(Sequence[Outcome]):
    """The results of one step for its batch. An Outcome is made when one is asked for."""

    concluded: Concluded
    num_entries: Sequence[int]
    """As in Outcome."""
    logprobs: list[list[TokenLogprobs]] | None = None
    """Per sequence, in steps in which some request asks for them."""
    one_by_one: Sequence[int] = ()
    """Indices of the requests that take the result of each step."""

    def __len__(self) -> int:
        return len(self.concluded)

    def __getitem__(self, index: Any) -> Any:
        logprobs = self.logprobs[index] if self.logprobs is not None else None
        return Outcome(self.concluded[index], self.num_entries, logprobs)
