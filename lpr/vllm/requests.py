"""The requests of vLLM's batch, which vLLM's interface for proposers shows as rows of tokens without request ids.

A request is recognised by its text: a row belongs to the request whose text is its prefix, followed only by the step's
sampled tokens. A state is a function of its text, so two requests with equal texts may be swapped. Rows may change
their order. A request without a row has finished, was aborted, or is preempted; its state is kept for a while, in case
it resumes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lpr.core.constants import MAX_MATCH


@dataclass(eq=False)
class Request:
    state: Any  # a lpr.native.ChainState
    tenant: str  # requests of one tenant draft from one another
    num_prompt: int  # number of leading tokens that are learnt already, or part of the prompt

    def take_output(self) -> tuple[list[int], list[int]]:
        """The tokens to learn, and the preceding context that a match can cover; empty at a second call."""
        begin = max(0, self.num_prompt - MAX_MATCH)
        text = self.state.text_from(begin)
        context, output = text[: self.num_prompt - begin], text[self.num_prompt - begin :]
        self.num_prompt = len(self.state)
        return context, output


class Requests:
    """The requests of the last step, and recently missing ones."""

    def __init__(self, most_parked: int, begin: Callable[[np.ndarray, int], Request]) -> None:
        """No requests yet. `begin` creates a request from a text and its number of prompt tokens."""
        self._most_parked, self._begin = most_parked, begin
        self.running: dict[int, Request] = {}  # by row
        self.parked: list[Request] = []  # those without a row, the latest last

    def recognise(
        self, rows: Sequence[int], texts: Sequence[np.ndarray], counts: Sequence[int]
    ) -> tuple[list[Request], list[Request]]:
        """The requests of a step's `rows`, and those dropped since the last step.

        `texts` are int32 [num_tokens], of which the last `counts` were sampled in the step.
        """
        before, self.running = self.running, {}
        moved = []
        for row, text, count in zip(rows, texts, counts, strict=True):
            request = before.get(row)
            if request is not None and _continues(request, text, count):
                self.running[row] = before.pop(row)
            else:
                moved.append((row, text, count))
        for row, text, count in moved:
            self.running[row] = self._find(before, text, count) or self._begin(text, len(text) - count)
        gone = list(before.values())
        self.parked = [*self.parked, *gone][-self._most_parked :] if self._most_parked else []
        return [self.running[row] for row in rows], gone

    def _find(self, before: dict[int, Request], text: np.ndarray, count: int) -> Request | None:
        """Remove and return the request of a text from those `before` or parked; None if there is none."""
        for row, request in before.items():
            if _continues(request, text, count):
                return before.pop(row)
        for request in reversed(self.parked):
            if _continues(request, text, count):
                self.parked.remove(request)
                return request
        return None


def _continues(request: Request, text: np.ndarray, count: int) -> bool:
    return len(request.state) == len(text) - count and request.state.continues_in(text)
