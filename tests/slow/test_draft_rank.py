"""The other cases of tests/engine/test_draft_rank.py."""

from __future__ import annotations

from tests.engine import test_draft_rank as fast
from tests.engine.test_self_draft import DECODE
from tests.fakes.again import again

test_ids_are_those_of_plain_decoding = again(
    fast.test_ids_are_those_of_plain_decoding, "num_ranks, num_drafting, decode", [(2, 1, DECODE), (3, 1, DECODE)]
)
