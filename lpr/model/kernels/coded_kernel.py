"""Products of few rows with the weights of low-bit checkpoints as a Triton kernel, which reads the codes alone."""

import math

import torch
import triton
from torch import Tensor

from lpr.model.kernels import device_of
from lpr.model.kernels.attention_kernel import interpreted
from lpr.model.kernels.coded_code import FP4, FP8, INT4, INT8, multiply_codes
from lpr.model.low_bit.coded import Coding

MOST_ROWS = 64
"""Most rows: with more, a product is compute-bound, and a library product with a dequantised weight is faster."""
_KINDS = {"int8": INT8, "fp8": FP8, "int4": INT4, "fp4": FP4}
_OUTPUTS = 32  # outputs per program: few, so that a small weight also occupies all multiprocessors
_LEAST_INPUTS = 16  # inputs that a tensor core multiplies at a time


def block_of(coding: Coding) -> int:
    """Inputs that a program multiplies at a time; 0 if groups are too small."""
    size = 128 if coding.num_groups == 1 else math.gcd(coding.group, 128)
    return size if size >= _LEAST_INPUTS else 0


def multiply(coding: Coding, rows: Tensor, given: Tensor, bias: Tensor | None) -> Tensor:
    """The product [..., outputs] of `given` [..., inputs] with `rows` [outputs, row_bytes], plus `bias` [outputs]."""
    outputs, states = len(rows), given.reshape(-1, coding.num_inputs).contiguous()
    out = given.new_empty(*given.shape[:-1], outputs)
    num_rows = len(states)
    if not num_rows:
        return out
    tall = min(MOST_ROWS, max(16, triton.next_power_of_2(num_rows)))
    with device_of(given):
        multiply_codes[triton.cdiv(outputs, _OUTPUTS), triton.cdiv(num_rows, tall)](
            states, rows, rows.view(torch.float32), out if bias is None else bias, out, num_rows, outputs,
            INPUTS=coding.num_inputs, ROW_BYTES=coding.row_bytes, GROUP=coding.group, NUM_GROUPS=coding.num_groups,
            KIND=_KINDS[coding.kind].value, HAS_ZERO=coding.has_zero, HAS_BIAS=bias is not None, BLOCK_M=tall,
            BLOCK_N=_OUTPUTS, BLOCK_K=block_of(coding), UPCAST=interpreted() and given.dtype is torch.bfloat16,
            num_warps=4,
        )  # fmt: skip
    return out
