"""The other cases of tests/model/heads/test_heads.py."""

from __future__ import annotations

from tests.fakes.again import again
from tests.model.heads import test_heads as fast
from tests.model.heads.test_heads import loaded, plain

test_ids_are_those_of_plain_decoding = again(
    fast.test_ids_are_those_of_plain_decoding_and_guesses_are_accepted, "attention", ["sdpa"]
)
test_two_ranks = again(fast.test_two_ranks, "decode", fast.DECODES[1:])
