"""A request's way through the engine: what comes in, what each step adds, what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lpr.config import SamplingParams
from lpr.engine.stats import DecodeStats
from lpr.engine.step import Outcome, PhaseTimer, Running
from lpr.engine.text import TextStream
from lpr.model.processors import Processors

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass
class Completion:
    """What a request came to."""

    prompt: Prompt
    prompt_token_ids: list[int]
    token_ids: list[int]
    """Emitted ids, an end-of-text token included."""
    text: str
    """Emitted text; it continues the prompt, and ends before a stop string or an end-of-text token."""
    finish_reason: str
    """`stop` (end of text or a stop string), `length` (max_new_tokens) or `error`."""
    stats: DecodeStats
    error: str | None = None
    """What ended the request early, in one line; ids and text are those before it."""


@dataclass
class Chunk:
    """What one step added to a request."""

    request: Request
    token_ids: list[int]
    """Ids committed by the step."""
    text: str
    """Text that is final now; it may lag behind the ids by an incomplete character or a possible stop string."""
    finish_reason: str | None


@dataclass(eq=False)
class Request:
    """A submitted prompt on its way."""

    prompt: Prompt
    prompt_ids: list[int]
    params: SamplingParams
    text_stream: TextStream
    stats: DecodeStats = field(default_factory=DecodeStats)
    finish_reason: str | None = None
    running: Running | None = None
    processors: Processors | None = None
    error: str | None = None

    def completion(self) -> Completion:
        """The finished request's result."""
        assert self.finish_reason is not None
        stream = self.text_stream
        ids, text = stream.token_ids, stream.text
        return Completion(self.prompt, self.prompt_ids, ids, text, self.finish_reason, self.stats, self.error)


class StepRecorder(Protocol):
    """Takes down what an engine's steps did (lpr.cli.trace)."""

    def begin(self) -> PhaseTimer:
        """Start the clock of a step; returns what to call at the end of each phase."""
        ...

    def record(self, batch: Sequence[Request], outcomes: Sequence[Outcome], chunks: Sequence[Chunk]) -> None:
        """Take down the step that has just been timed, which advanced `batch` together."""
        ...
