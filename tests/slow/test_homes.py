"""The other cases of tests/sched/test_homes.py."""

from __future__ import annotations

from tests.fakes.again import again
from tests.sched import test_homes as fast
from tests.sched.test_homes import expected

test_the_same_text_while_homes_change = again(fast.test_the_same_text_while_homes_change, "num_ranks", [1, 2, 4])
test_the_same_text_with_a_limit = again(fast.test_the_same_text_with_a_limit, "home_ranks", [1])
