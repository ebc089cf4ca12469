"""The other cases of tests/engine/test_self_draft.py."""

from __future__ import annotations

from dataclasses import replace

from tests.engine import test_self_draft as fast
from tests.engine.test_self_draft import DECODE
from tests.fakes.again import again

test_ids_are_those_of_plain_decoding = again(
    fast.test_ids_are_those_of_plain_decoding, "form, attention", [("int8", "sdpa")]
)
test_penalties_and_limits_act_on_drafts = again(fast.test_penalties_and_limits_act_on_drafts, "rule", fast.RULES[3:])
test_ranks = again(fast.test_ranks, "num_ranks, decode", [(2, DECODE), (4, replace(DECODE, home_ranks=0))])
test_a_single_request_has_the_copies_of_all_ranks = again(
    fast.test_a_single_request_has_the_copies_of_all_ranks, "decode", [DECODE]
)
test_families = again(fast.test_families, "model_type", ["mixtral"])
