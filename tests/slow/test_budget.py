"""The other cases of tests/core/test_budget.py."""

from __future__ import annotations

import pytest

from lpr.core.step_times import StepTimes
from tests.core import test_budget as fast


@pytest.mark.parametrize(
    "cost, temperature", [(fast.FLAT, 0.0), (fast.FLAT, 0.8), (fast.RISING, 0.0), (fast.DEAR, 0.8)], ids=range(4)
)
def test_the_text_does_not_depend_on_the_sizes(cost: StepTimes, temperature: float) -> None:
    fast.test_the_text_does_not_depend_on_the_sizes(cost, temperature)
