"""The other cases of tests/sched/test_fair_shares.py."""

from __future__ import annotations

from itertools import product

from tests.fakes.again import again
from tests.sched import test_fair_shares as fast

test_weights_are_the_ratio_of_slot_time = again(
    fast.test_weights_are_the_ratio_of_slot_time_under_saturation,
    "num_slots, lengths",
    product((1, 2, 4, 8), ((20, 20), (5, 60))),
    without=fast.RATIOS,
)
