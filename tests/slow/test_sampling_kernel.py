"""The long tests of tests/model/kernels/test_sampling_kernel.py."""

from __future__ import annotations

from lpr.model.kernels import sampling_kernel
from lpr.model.sampling.choice import gpu_likeliest, gpu_pick
from tests.model.kernels.test_sampling_kernel import DEVICE


def test_the_kernels_pass_their_own_checks() -> None:
    assert gpu_pick.__wrapped__(DEVICE) is sampling_kernel.choose
    assert gpu_likeliest.__wrapped__(DEVICE) is sampling_kernel.likeliest
