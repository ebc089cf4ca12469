"""A budget for each set of home ranks, since a rank knows the drafts of those requests only that it serves.

What a budget has learnt, how far promises hold and what the Jacobi window yields, decides the next trees. Ranks that
share trees must have learnt the same. So a set of ranks has a budget of its own, which all of its ranks keep and no
other, and which sees just the requests that have these home ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from lpr.config import TreeSizes
from lpr.core.budget import AdaptiveBudget, Budget, FixedBudget
from lpr.core.step_times import StepTimes

FORGOTTEN_AFTER = 4096
"""Steps after which a budget that nobody used is given up: sets of ranks are many, and few are in use (rule R8)."""


class Budgets:
    """The budgets of the sets of home ranks that a rank belongs to."""

    def __init__(self, config: TreeSizes, num_ranks: int = 1, cost: StepTimes | None = None) -> None:
        """Trees of `config`, which `num_ranks` ranks spend together: all or, by the times of `cost`, what pays."""
        self._config, self._num_ranks, self._cost = config, num_ranks, cost
        self._by_homes: dict[tuple[int, ...], Budget] = {}
        self._last_used: dict[tuple[int, ...], int] = {}
        self._step = 0

    @property
    def cost(self) -> StepTimes | None:
        """The table that all budgets decide by; None where sizes are fixed."""
        return self._cost

    @cost.setter
    def cost(self, table: StepTimes) -> None:
        self._cost = table
        for budget in self._by_homes.values():
            if isinstance(budget, AdaptiveBudget):
                budget.cost = table

    def __len__(self) -> int:
        """Number of budgets kept."""
        return len(self._by_homes)

    def begin_step(self) -> None:
        """Forget what nobody has used for long: by the number of steps alone, so alike on all ranks of a set."""
        self._step += 1
        for homes in [each for each, step in self._last_used.items() if self._step - step > FORGOTTEN_AFTER]:
            del self._by_homes[homes], self._last_used[homes]

    def of(self, homes: Sequence[int]) -> Budget:
        """The budget of requests that have just these home ranks."""
        key = tuple(homes)
        self._last_used[key] = self._step
        if key not in self._by_homes:
            self._by_homes[key] = (
                FixedBudget(self._config, self._num_ranks)
                if self._cost is None
                else AdaptiveBudget(self._config, self._cost, self._num_ranks)
            )
        return self._by_homes[key]
