"""The other cases of tests/engine/test_preemption.py."""

from __future__ import annotations

from tests.engine import test_preemption as fast
from tests.fakes.again import again

test_texts_are_those_of_plain_decoding = again(fast.test_texts_are_those_of_plain_decoding, "swap_space", [None])
test_on_several_ranks = again(fast.test_on_several_ranks, "home_ranks", [0])
