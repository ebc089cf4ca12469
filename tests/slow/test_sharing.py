"""The other cases of tests/engine/test_sharing.py."""

from __future__ import annotations

from itertools import product

from tests.engine import test_sharing as fast
from tests.fakes.again import again

test_weights_are_the_ratio_of_slot_time = again(
    fast.test_weights_are_the_ratio_of_slot_time_under_saturation,
    "num_slots, lengths",
    product((1, 2, 4, 8), ((20, 20), (5, 60))),
    without=fast.RATIOS,
)
