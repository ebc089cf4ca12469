"""When a prediction head guesses, and how far: while its part of the accepted tokens exceeds its part of the time.

Each rank decides for its own head, by its own clock: the guesses travel, so ranks need not decide alike. A head that
rests still follows the text, so that it can go on at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

from lpr.core.tree import Source
from lpr.engine.request import Outcome

TRIAL = 32
"""Steps of a trial, at the start and after each rest."""
FIRST_REST, LONGEST_REST = 64, 1024
"""Steps of the first rest, each further one twice as long, and of the longest."""
MEMORY = 0.97
"""What a step still counts for after the next one."""
FOLLOWED = 0.5
"""Part of the right guesses that have a right one among their successors."""


class Pace:
    """Counts what the guesses of a head earn and cost."""

    def __init__(self) -> None:
        """Begin with a trial."""
        self.rests = False
        """True while the head only follows."""
        self._left, self._rest = TRIAL, FIRST_REST
        self._tokens = self._right = self._ms = self._head_ms = 0.0

    def least(self, forward_ms: float) -> float:
        """The path probabilities whose guesses are worth following, in sum, if that takes `forward_ms`."""
        return forward_ms * self._tokens / (FOLLOWED * self._ms) if self._ms else 0.0

    def observe(self, outcomes: Sequence[Outcome], ms: float, head_ms: float) -> None:
        """Count a step of `ms` milliseconds, of which the head took `head_ms`."""
        self._left -= 1
        if self.rests:
            if self._left <= 0:
                self.rests, self._left = False, TRIAL
                self._tokens = self._right = self._ms = self._head_ms = 0.0
            return
        for outcome in outcomes:
            concluded = outcome.concluded
            sources = list(concluded.tree.sources)
            self._right += sum(sources[node] == Source.HEAD for node in concluded.path)
            self._tokens += len(concluded.emitted)
        self._ms += ms
        self._head_ms += head_ms
        if self._left <= 0:
            if self._right * self._ms < self._head_ms * self._tokens:
                self.rests, self._left = True, self._rest
                self._rest = min(2 * self._rest, LONGEST_REST)
            elif self._left < -TRIAL:
                self._rest = FIRST_REST
        self._tokens, self._right = MEMORY * self._tokens, MEMORY * self._right
        self._ms, self._head_ms = MEMORY * self._ms, MEMORY * self._head_ms
