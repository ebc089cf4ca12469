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
test_replicas_of_several_ranks = again(fast.test_replicas_of_several_ranks, "num_ranks, tp", [(2, 2), (3, 3)])
test_mutant_another_state_on_one_rank_of_a_replica = again(
    fast.test_mutant_another_state_on_one_rank_of_a_replica, "spoiled", [1, 2]
)
