"""The other families of tests/model/attention/test_pooled.py."""

from __future__ import annotations

from tests.fakes.again import again
from tests.model.attention import test_pooled as fast
from tests.model.attention.test_pooled import shared

__all__ = ["shared"]

test_nodes_have_the_logits_of_their_paths = again(
    fast.test_nodes_have_the_logits_of_their_paths, "name", fast.POOLED, without=fast.FEW
)
test_ids_are_those_of_plain_decoding = again(
    fast.test_ids_are_those_of_plain_decoding, "name", fast.POOLED, without=fast.FEW
)
