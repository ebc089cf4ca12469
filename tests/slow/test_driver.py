"""The other cases of tests/engine/test_driver.py."""

from __future__ import annotations

from itertools import product

from tests.engine import test_driver as fast
from tests.engine.test_driver import engine, expected
from tests.fakes.again import again

test_a_hook_that_raises = again(
    fast.test_a_hook_that_raises, "place, failure", product(fast.PLACES, fast.FAILURES), without=fast.RAISED
)
test_an_exception_on_one_rank_ends_all_of_them = again(
    fast.test_an_exception_on_one_rank_ends_all_of_them,
    "place, failing",
    product(("begin", "busy", "gather", "commit", "end"), (0, 1)),
    without=fast.ENDED,
)
test_an_answer_that_an_interrupt_meets_at_its_end = again(
    fast.test_an_answer_that_an_interrupt_meets_at_its_end_can_be_taken, "stop", [("\x00never",)]
)
