"""The other cases of tests/dist/test_survivors.py."""

from __future__ import annotations

from tests.dist import test_survivors as fast
from tests.dist.test_survivors import expected, span
from tests.fakes.again import again

test_draft_ranks_are_lost_and_replaced = again(
    fast.test_draft_ranks_are_lost_and_replaced,
    "joiners, faults",
    [((5,), [(0, 8, 2)]), ((4,), [(0, 5, 1)]), ((3, 8), [(0, 2, 0), (1, 2, 1)]), ((5, 4), [(0, 3, 2)])],
)
