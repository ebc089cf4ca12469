"""Overlap (async scheduling in vLLM): the next step is launched before the results of the running one are read.

While the host reads a step, concludes it and schedules, the device works on the next step, so a step takes the longer
of both times, not their sum. It is possible where the next step depends on results by its tokens alone, which the
device has: on one rank, in a captured packed step, for a batch whose rows are single tokens chosen on the device.

The next step takes the results of those rows that it still has. Results of requests that have ended, were aborted or
preempted are dropped, and all if the step has another row, such as a node of a draft. No request is admitted to a step
that is launched already.

Other steps of one rank on a GPU wait for the host to read, conclude, schedule and draft. Such a step begins at the end
of the call before (Replica.go_on), so the device works while the caller has its turn.

What a dropped row has written is never read. It lies behind the computed tokens of its request, in a page that was the
request's alone: others share full pages only, or copy the computed rows of a page. Attention reads computed rows and
entries of its own step, and what a later owner of the page writes comes behind it on the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from lpr.dist.comm import Comm, is_alone
from lpr.engine.plan import GREEDY, Batch, StepPlan, selection
from lpr.engine.request import Request
from lpr.model.runner import TreeModel
from lpr.model.step_inputs import Rows
from lpr.model.transfer import to_device

if TYPE_CHECKING:
    from lpr.sched.scheduler import Scheduler

FEWEST, MOST = 4, 64
"""With drafts, a step is launched early after this many steps without one: a wrong guess doubles the number."""
_NEXT_COLUMNS, _NEXT_ENTRY = np.array([[1], [0], [0]]), np.array([0, 0, 1], np.int32)


@dataclass(frozen=True)
class Launched:
    """A step that the device evaluates before it is planned."""

    batch: Batch
    rows: Rows  # one entry per request of `batch`; their tokens are on the device alone
    results: torch.Tensor  # int32 [rows, 1]


class Overlap:
    """Decides which steps are launched before their plan, and takes their results."""

    def __init__(self, model: TreeModel, comm: Comm) -> None:
        """For steps of `model`, whose cache is allocated."""
        self._model = model
        self.launched: Launched | None = None
        """The next step, if it is launched."""
        self.num_launched = self.num_dropped = 0
        """Steps launched, and those of them of which no result was taken."""
        self._may_launch, self._num_plain, self._num_wanted = False, 0, FEWEST
        drafts = model.guesser is not None or model.self_drafter is not None
        assert model.cache is not None
        self.begins_early = is_alone(comm) and model.device.type == "cuda" and model.captures_packed and not drafts
        """True if a step begins at the end of the call before."""
        self.is_on = self.begins_early and not model.cache.has_states

    def admits(self, scheduler: Scheduler[Request]) -> bool:
        """True if requests may be admitted to the next step; called before each schedule.

        If some could not be admitted as the step is launched, the one after it is not launched early.
        """
        if not scheduler.running:
            self.launched = None
        admits = self.launched is None
        is_full = not scheduler.waiting or len(scheduler.running) >= scheduler.capacity
        self._may_launch = self.is_on and (admits or is_full) and scheduler.limits.targets is None
        return admits

    def take(self, plan: StepPlan, rows: Rows) -> torch.Tensor | None:
        """The results of the step of `plan`, of these `rows`, if it was launched; None if it is to be evaluated."""
        launched, self.launched = self.launched, None
        if launched is None:
            return None
        columns, results = launched.rows.columns, launched.results
        if plan.batch is not launched.batch:
            places = {request: place for place, request in enumerate(launched.batch.requests)}
            kept = np.array([places[request] for request in plan.decoding if request in places], np.int64)
            columns, results = columns[:, kept], results.index_select(0, to_device(kept, results.device))
        # Columns of another number of requests are not equal either.
        if plan.filling or not np.array_equal(rows.columns, columns):
            self.num_dropped, self._num_wanted = self.num_dropped + 1, min(2 * self._num_wanted, MOST)
            return None
        self._num_wanted = max(self._num_wanted - 1, FEWEST)
        return results

    def next_rows(self, plan: StepPlan, rows: Rows) -> Rows | None:
        """The rows of the step after the one of `plan`, with its tokens; None if they are not known or not to launch.

        The scheduler keeps a page for each of them: it reserves one row behind a request's tokens at least.
        """
        is_plain = rows.num_entries == len(rows) and not plan.filling
        self._num_plain = self._num_plain + 1 if is_plain else 0
        is_expected = is_plain and (plan.sizes.num_nodes == 1 or self._num_plain >= self._num_wanted)
        if not (self._may_launch and is_expected and plan.batch.chooses_on_device):
            return None
        cache = self._model.cache
        assert cache is not None
        if cache.adapters is not None or rows.longest >= cache.rows_per_slot:
            return None
        if all(request.num_left <= 1 for request in plan.decoding):  # all end in this step
            return None
        entries = (rows.entries.reshape(-1, 3) + _NEXT_ENTRY).reshape(-1)
        return Rows(rows.slots, rows.columns + _NEXT_COLUMNS, entries, (len(rows), len(rows), rows.longest + 1))

    def launch(self, plan: StepPlan, following: Rows, results: torch.Tensor) -> None:
        """Launch the step of the rows `following`, behind the step of `plan` with these `results`."""
        chosen = GREEDY if plan.batch.is_plain else selection(plan.decoding, following)
        found = self._model.launch_next(following, chosen, results)
        if found is not None:
            self.launched, self.num_launched = Launched(plan.batch, following, found), self.num_launched + 1
