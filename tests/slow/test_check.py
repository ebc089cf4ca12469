"""The other cases of tests/model/exact/test_check.py, and torch's attention, which is slow: in one type a case."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import cycle, product
from typing import Any

import pytest
import torch

from tests.fakes.again import again
from tests.model.exact import test_check as fast
from tests.model.exact.test_check import attention, by_torch, half_ids, half_model, two_threads

__all__ = ["attention", "by_torch", "half_ids", "half_model", "two_threads"]


def with_torch(test: Callable[..., None]) -> Callable[..., None]:
    """`test` with torch's attention."""

    @wraps(test)
    def repeated(*args: Any, **kwargs: Any) -> None:
        test(*args, **kwargs)

    repeated.pytestmark = [  # type: ignore[attr-defined]
        *getattr(test, "pytestmark", ()), pytest.mark.parametrize("attention", ["torch"], indirect=True).mark,
    ]  # fmt: skip
    return repeated


EVERY_SHAPE, IN_BFLOAT16 = fast.test_every_shape_of_a_step_gives_the_same_bits, fast.test_the_same_ids_in_bfloat16
STEPS, THREADS = fast.test_steps_are_cut_where_a_library_takes_another_kernel, fast.test_several_threads

TWO_DTYPES = *product(fast.FAMILIES, fast.DTYPES[1:2]), *zip(fast.FAMILIES, cycle(fast.DTYPES[::2]), strict=False)
test_every_shape = again(EVERY_SHAPE, "family, dtype", TWO_DTYPES, without=fast.CASES)
test_every_shape_by_torch = with_torch(
    again(EVERY_SHAPE, "family, dtype", zip(fast.FAMILIES, cycle(fast.DTYPES), strict=False))
)
test_the_same_ids_in_bfloat16 = again(IN_BFLOAT16, "decode, num_ranks", zip(fast.DECODES, (4, 2, 1), strict=True))
test_steps_are_cut = again(STEPS, "dtype", fast.DTYPES, without=[torch.bfloat16])
test_steps_are_cut_by_torch = with_torch(again(STEPS, "dtype", [torch.bfloat16]))
test_several_threads = again(THREADS, "dtype", [torch.float32])
test_several_threads_by_torch = with_torch(again(THREADS, "dtype", [torch.bfloat16]))
test_attention_is_the_usual_one = with_torch(fast.test_attention_is_the_usual_one)
test_faults_are_noticed = with_torch(fast.test_faults_are_noticed)
test_rows_of_a_batch = with_torch(fast.test_rows_of_a_batch_do_not_change_each_other)
