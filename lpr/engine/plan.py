"""The plan of one step: its requests and their work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lpr.config import TreeSizes
from lpr.core.step_times import StepTimes
from lpr.engine.request import Request
from lpr.model.sampling.processors import ProcessorPath
from lpr.model.sampling.selection import Selection
from lpr.model.step_inputs import Row

if TYPE_CHECKING:
    from lpr.engine.draft_rank import DraftRank


GREEDY = Selection.build([])  # the selection of a step without sampled requests and without logits processors


class Batch:
    """The decoding requests of a step, and what is the same in every step until the schedule changes."""

    def __init__(self, requests: Sequence[Request], num_ranks: int) -> None:
        self.requests = requests
        self.states = [request.running for request in requests]
        others = [index for index, each in enumerate(requests) if not each.is_plain or each.wants_each_step]
        self.is_plain = all([requests[index].is_plain for index in others])
        self.num_logprobs = num_logprobs([requests[index] for index in others])
        self.chooses_on_device = self.num_logprobs is None and all([requests[i].processors is None for i in others])
        """True if a token depends on logits, its request's parameters and its position only."""
        self.served = served_by(requests, num_ranks)
        self.one_by_one = [index for index in others if requests[index].wants_each_step]
        """Indices of the requests that take the result of each step."""
        self._slots: np.ndarray | None = None

    def slots(self, rank: int) -> np.ndarray:
        """Int64: the slots of this rank's requests, in order; `rank` is the same in all calls."""
        if self._slots is None:
            self._slots = np.array([self.requests[index].slots[rank] for index in self.served[rank]], np.int64)
        return self._slots


def selection(batch: Sequence[Request], rows: Sequence[Row]) -> Selection:
    """The sampling parameters of each result entry, from the request's parameters and the token's position."""
    if all([request.is_plain for request in batch]):
        return GREEDY
    positions = [row.positions[row.num_entries - row.num_results :] + 1 for row in rows]
    chosen = Selection.build([(request.params, each) for request, each in zip(batch, positions, strict=True)])
    chosen.num_logprobs = num_logprobs(batch)
    start = 0
    for request, row in zip(batch, rows, strict=True):
        if request.processors is not None:
            above = len(row.tokens) - row.num_results
            tokens = [int(token) for token in row.tokens[above:]]
            parents = [int(parent) - above for parent in row.parents[above:]]
            chosen.processor_paths.append(ProcessorPath(request.processors, request.tokens, start, tokens, parents))
        start += row.num_results
    return chosen


def num_logprobs(batch: Sequence[Request]) -> int | None:
    """The largest number of alternative log-probabilities that a request asks for; None if no request asks for any."""
    return max([each.params.logprobs for each in batch if each.params.logprobs is not None], default=None)


def served_by(batch: Sequence[Request], num_ranks: int) -> list[list[int]]:
    """Per rank, the requests that it serves, in the order of its slots."""
    if num_ranks == 1:
        return [list(range(len(batch)))]
    served: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for index, request in enumerate(batch):
        for rank in request.homes:
            served[rank].append((request.slots[rank], index))
    return [[index for _, index in sorted(each)] for each in served]


@dataclass(frozen=True)
class StepPlan:
    """The work of one step, the same on all ranks."""

    batch: Batch  # requests that advance by their accepted path and a bonus token
    filling: Sequence[tuple[Request, Sequence[int]]]
    """Requests with the number of tokens of their pending chain to compute, per rank. With padding, a rank has either
    rows of `decoding` or one of these."""
    sizes: TreeSizes
    times: StepTimes | None = None
    """The replicated step times; None if sizes are fixed."""
    digest: int = 0  # of other state that must agree on all ranks, such as home ranks
    drafting: DraftRank | None = None
    """The drafter of a draft-only rank; None on other ranks."""
    num_command_bytes: int = 0  # length of the commands that the driver broadcasts after the step; 0 on other ranks

    @property
    def decoding(self) -> Sequence[Request]:
        """The requests of `batch`."""
        return self.batch.requests
