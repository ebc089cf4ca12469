"""Products with weights of few bits in Triton against those with the widened weights; without a GPU interpreted."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from lpr.model.low_bit.coded import Coding, Kind

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs the package triton", allow_module_level=True)
from lpr.model.kernels import coded_kernel

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE.type == "cuda" else [])
"""The interpreter's casts to bfloat16 truncate."""


def weight(coding: Coding, outputs: int) -> torch.Tensor:
    """Random rows with every code."""
    generator = torch.Generator().manual_seed(5)
    shape = outputs, coding.num_inputs
    if coding.kind in ("int4", "fp4"):
        codes = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    else:
        codes = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    if coding.kind == "fp8":
        codes = _without_nan(codes)
    scale = torch.rand(outputs, coding.num_groups, generator=generator) * 0.01 + 0.001
    zero = torch.randint(-8, 8, scale.shape, generator=generator) if coding.has_zero else None
    return coding.encode(codes, scale, zero).to(DEVICE)


def _without_nan(codes: torch.Tensor) -> torch.Tensor:
    return torch.where((codes == 127) | (codes == -1), 3, codes).to(torch.int8).view(torch.float8_e4m3fn)


SIZES = [(40, 72, 72), (33, 128, 32), (64, 200, 16), (96, 384, 128)]
"""Outputs, inputs, and inputs of a group."""
CASES = [
    (kind, *sizes, (i + j) % 2 > 0, DTYPES[(i + j // 2) % len(DTYPES)])
    for i, kind in enumerate(("int8", "fp8", "int4", "fp4"))
    for j, sizes in enumerate(SIZES)
]
"""Each kind with all sizes; zero points and dtypes alternate, so that each two values meet."""


@pytest.mark.parametrize(("kind", "outputs", "inputs", "group", "has_zero", "dtype"), CASES, ids=str)
def test_products(kind: Kind, outputs: int, inputs: int, group: int, has_zero: bool, dtype: torch.dtype) -> None:
    coding = Coding(kind, inputs, group, has_zero)
    rows, tolerance = weight(coding, outputs), 1e-4 if dtype is torch.float32 else 2e-2
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    for count, each in ((1, None), (5, bias), (17, None)):
        given = torch.randn(1, count, inputs, generator=torch.Generator().manual_seed(count)).to(DEVICE, dtype)
        found = coded_kernel.multiply(coding, rows, given, each)
        expected = F.linear(given.float(), coding.to_dense(rows, dtype).float(), None if each is None else each.float())
        assert torch.allclose(found.float(), expected, rtol=tolerance, atol=tolerance)


def test_groups_that_are_too_small_for_a_tensor_core_have_no_kernel() -> None:
    assert [coded_kernel.block_of(Coding("int4", 64, size)) for size in (8, 16, 24, 48, 64)] == [0, 16, 0, 16, 128]
