"""The other cases of tests/engine/test_exchange.py."""

from __future__ import annotations

from itertools import product

from tests.engine import test_exchange as fast
from tests.engine.test_exchange import expected
from tests.fakes.again import again

test_the_same_text_for_any_number_of_ranks = again(
    fast.test_the_same_text_for_any_number_of_ranks,
    "name, num_ranks",
    product(fast.CONFIGS, (1, 2, 3, 4, 8)),
    without=fast.CASES,
)
