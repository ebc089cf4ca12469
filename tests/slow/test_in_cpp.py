"""The other cases of tests/model/sampling/test_in_cpp.py."""

from __future__ import annotations

from tests.fakes.again import again
from tests.model.sampling import test_in_cpp as fast

test_a_large_vocabulary = again(fast.test_a_large_vocabulary, "scale", [1.0])
