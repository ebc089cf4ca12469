"""The other cases of tests/engine/test_commands.py."""

from __future__ import annotations

from itertools import product

from tests.engine import test_commands as fast
from tests.fakes.again import again

test_a_hit_equals_a_miss = again(
    fast.test_a_hit_equals_a_miss, "num_ranks, temperature", product((1, 2, 3), (0.0, 0.9)), without=fast.HITS
)
