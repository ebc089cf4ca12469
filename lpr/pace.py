"""The pace of an engine: how large trees become, by a table of step times that follows what steps really take."""

from __future__ import annotations

import json
from collections.abc import Sequence

from lpr.config import TreeConfig
from lpr.core.budget import AdaptiveBudget, Budget, FixedBudget
from lpr.core.cost import StepCost
from lpr.dist.comm import Comm
from lpr.step import Outcome, Running

PREFIX = b"costs "
"""Begins the message by which rank 0 shares its table."""
SHARE_EVERY = 32
"""Steps between two such messages, at least."""
SHARE_PART = 0.05
"""A time that has changed by this part is worth a message."""


class Pace:
    """The budget of an engine's steps and, where it is adaptive, the table that all ranks decide by.

    Rank 0's clock alone counts. It keeps a table of its own current, and now and then sends it to all ranks, itself
    included, which decide by it from the same step on.
    """

    def __init__(self, config: TreeConfig, costs: StepCost | None, comm: Comm) -> None:
        """Trees of the sizes of `config`: all of them in every step or, with a table of `costs`, what pays."""
        self._own = costs.copy() if costs is not None else None
        self._leads = comm.rank == comm.tp_rank == 0
        self._since_shared = 0
        self.budget: Budget = FixedBudget(config)
        if costs is not None:
            self.budget = AdaptiveBudget(config, costs.copy(), comm.size)

    @property
    def costs(self) -> StepCost | None:
        """The table that all ranks decide by, the same on each of them."""
        return self.budget.cost if isinstance(self.budget, AdaptiveBudget) else None

    def observe(self, outcomes: Sequence[Outcome], runs: Sequence[Running], milliseconds: float) -> None:
        """Take in what a step of `runs` took."""
        if self._own is None or self._own.fixed or not self._leads:
            return
        longest = max(len(run.state.tokens) for run in runs)
        self._own.observe(sum(outcome.num_entries for outcome in outcomes), len(runs), longest, milliseconds)
        self._since_shared += 1

    def message(self) -> bytes:
        """On rank 0, what all ranks should be told by now; mostly nothing."""
        budget = self.budget
        if self._own is None or not isinstance(budget, AdaptiveBudget) or self._since_shared < SHARE_EVERY:
            return b""
        self._since_shared = 0
        return PREFIX + json.dumps(self._own.to_json()).encode() if self._own.differs(budget.cost, SHARE_PART) else b""

    def receive(self, message: bytes) -> bool:
        """Decide by the table in `message` from now on; False if it is a message of another kind."""
        if not message.startswith(PREFIX):
            return False
        if isinstance(self.budget, AdaptiveBudget):
            self.budget.cost = StepCost.from_json(json.loads(message.removeprefix(PREFIX)))
        return True
