"""The pace of an engine: how large trees become, by a table of step times that follows what steps really take."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lpr.config import TreeSizes
from lpr.core.budget import AdaptiveBudget, Budget, FixedBudget
from lpr.core.step_times import StepTimes, StepTimesTracker
from lpr.dist.comm import Comm
from lpr.engine.step import Outcome, Running

PREFIX = b"costs "
"""Begins the message by which rank 0 shares its table."""
SHARE_EVERY = 16
"""Steps between two such messages, at least."""
SAMPLE_PLAIN = 4
"""Of plain steps, which are all alike, every so many-th is looked at: 0.05 ms is much beside a step of 3 ms."""
SHARE_PART = 0.05
"""A time that has changed by this part is worth a message."""


class Sizer:
    """The budget of an engine's steps and, where it is adaptive, the table that all ranks decide by.

    Rank 0's clock alone counts. It follows what steps take, and now and then sends its table to all ranks, itself
    included, which decide by it from the same step on.
    """

    def __init__(self, config: TreeSizes, costs: StepTimes | None, comm: Comm, follow: bool = True) -> None:
        """Trees of the sizes of `config`: all of them in every step or, with a table of `costs`, what pays.

        `follow` False decides by that table for good.
        """
        self._longest_tree = config.num_nodes
        self._tracker = (
            StepTimesTracker(costs) if costs is not None and follow and comm.rank == comm.tp_rank == 0 else None
        )
        self._since_shared = self._plain = 0
        self.budget: Budget = FixedBudget(config)
        if costs is not None:
            self.budget = AdaptiveBudget(config, costs, comm.size)

    @property
    def costs(self) -> StepTimes | None:
        """The table that all ranks decide by, the same on each of them."""
        return self.budget.cost if isinstance(self.budget, AdaptiveBudget) else None

    def observe(self, outcomes: Sequence[Outcome], runs: Sequence[Running], milliseconds: float) -> None:
        """Take in what a step of `runs` took; one that evaluated a prompt is another kind of step."""
        count = sum(outcome.num_entries for outcome in outcomes)
        if self._tracker is None or count > len(runs) * self._longest_tree:
            return
        if count == len(runs):
            self._plain += 1
            if self._plain % SAMPLE_PLAIN:
                return
        longest = max(len(run.state.tokens) for run in runs)
        self._tracker.observe(count, len(runs), longest, milliseconds)
        self._since_shared += 1

    def message(self) -> bytes:
        """On rank 0, what all ranks should be told by now; mostly nothing."""
        if self._tracker is None or self.costs is None or self._since_shared < SHARE_EVERY:
            return b""
        self._since_shared = 0
        table = self._tracker.table()
        return PREFIX + json.dumps(table.to_json()).encode() if table.differs(self.costs, SHARE_PART) else b""

    def receive(self, message: bytes) -> bool:
        """Decide by the table in `message` from now on; False if it is a message of another kind."""
        if not message.startswith(PREFIX):
            return False
        if isinstance(self.budget, AdaptiveBudget):
            self.budget.cost = StepTimes.from_json(json.loads(message.removeprefix(PREFIX)))
        return True
