"""The other cases of tests/drop_in/test_lookahead.py."""

from __future__ import annotations

from itertools import product

from tests.drop_in import test_lookahead as fast
from tests.drop_in.test_lookahead import llama3, model
from tests.fakes.again import again

test_greedy_ids_equal = again(
    fast.test_greedy_ids_equal, "model, option", product(fast.FAMILIES, fast.OPTIONS), without=fast.CASES
)
test_sampled_ids_equal_plain_decoding_with_the_seed = again(
    fast.test_sampled_ids_equal_plain_decoding_with_the_seed, "option", ["temperature", "typical", "others"]
)
