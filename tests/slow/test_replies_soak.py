"""Many replies of each family, well-formed and damaged: what holds for a few holds for all (see fakes)."""

import os

import pytest

from lpr.serve.text.calls import NAMES
from tests.fakes import written_calls as written

REPLIES = int(os.environ.get("LPR_FUZZ_REPLIES", "60"))


@pytest.mark.parametrize("name", NAMES)
def test_replies_of_many_seeds(name):
    assert sum(written.check(name, seed, all_cuts=seed % 60 == 0) for seed in range(REPLIES)) > REPLIES
