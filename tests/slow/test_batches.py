"""The other cases of tests/engine/test_batches.py."""

from __future__ import annotations

from itertools import product

from tests.engine import test_batches as fast
from tests.fakes.again import again

test_ids_do_not_depend_on_the_batch = again(
    fast.test_ids_do_not_depend_on_the_batch, "size, packed", product((1, 2, 5, 8), (True, False)), without=fast.SIZES
)
