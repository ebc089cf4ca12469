"""A budget for each set of home ranks: a rank drafts only for the requests that it serves. Twin: native/budgets.h.

A budget learns how well path probabilities predict acceptance and how many tokens the Jacobi window yields. This
decides the next trees, and ranks that share trees must decide alike. So each set of home ranks has its own budget. Only
these ranks keep it, and it sees only the requests that have exactly these home ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lpr.config import TreeSizes
from lpr.core import constants
from lpr.core.budget import AdaptiveBudget, FixedBudget

Homes = tuple[int, ...]
Budget = FixedBudget | AdaptiveBudget
Prices = Mapping[Homes, tuple[Sequence[float], float]]
"""By home ranks: milliseconds at KNOTS of the step, and the tokens that other requests are expected to get in it."""


class Budgets:
    """The budgets of the sets of home ranks that a rank belongs to."""

    def __init__(self, config: TreeSizes, num_ranks: int = 1, first_times: Sequence[float] | None = None) -> None:
        """Trees of up to the sizes of `config`, split over at most `num_ranks` ranks.

        `first_times` are milliseconds at KNOTS for one sequence, the start of a new adaptive budget; None makes the
        sizes fixed.
        """
        self._config, self._num_ranks, self.first_times = config, num_ranks, first_times
        self._by_homes: dict[Homes, Budget] = {}
        self._last_used: dict[Homes, int] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._by_homes)

    def begin_step(self, prices: Prices) -> None:
        """Set the step times of the coming step, and drop budgets that were not used for FORGOTTEN_AFTER steps.

        Dropping depends on step counts only, so all ranks of a set drop the same budgets. `prices` is empty if sizes
        are fixed; else it has an entry for every set of home ranks that includes this rank.
        """
        self._step += 1
        for homes in [each for each, step in self._last_used.items() if self._step - step > constants.FORGOTTEN_AFTER]:
            del self._by_homes[homes], self._last_used[homes]
        for homes, (times, other_tokens) in prices.items():
            budget = self.of(homes)
            assert isinstance(budget, AdaptiveBudget), "fixed sizes have no price"
            budget.times, budget.other_tokens = times, other_tokens

    def of(self, homes: Sequence[int]) -> Budget:
        """The budget of requests that have exactly these home ranks."""
        key = tuple(homes)
        self._last_used[key] = self._step
        if key not in self._by_homes:
            self._by_homes[key] = (
                FixedBudget(self._config, self._num_ranks)
                if self.first_times is None
                else AdaptiveBudget(self._config, self.first_times, self._num_ranks)
            )
        return self._by_homes[key]
