"""The other cases of tests/model/exact/test_check.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.fakes.again import again
from tests.model.exact import test_check as fast
from tests.model.exact.test_check import (
    by_torch,
    half_ids,
    half_model,
    test_attention_is_the_usual_one,
    test_faults_are_noticed,
    test_rows_of_a_batch_do_not_change_each_other,
    two_threads,
)

__all__ = ["by_torch", "half_ids", "half_model", "two_threads"]


@pytest.fixture(params=[fast.NATIVE, "torch"])
def attention(request: pytest.FixtureRequest) -> str:
    """Both ways to attend."""
    if request.param == "torch":
        request.getfixturevalue("by_torch")
    return str(request.param)


test_every_shape_of_a_step_gives_the_same_bits = again(
    fast.test_every_shape_of_a_step_gives_the_same_bits,
    "family, dtype",
    product(fast.FAMILIES, fast.DTYPES),
)
test_the_same_ids_in_bfloat16 = again(
    fast.test_the_same_ids_in_bfloat16, "decode, num_ranks", product(fast.DECODES, (1, 2, 4)), without=fast.SHARED_BY
)
test_steps_are_cut = again(fast.test_steps_are_cut_where_a_library_takes_another_kernel, "dtype", fast.DTYPES)
test_several_threads = again(fast.test_several_threads, "dtype", [torch.float32, torch.bfloat16])
