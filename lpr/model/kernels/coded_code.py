"""The device code of `coded_kernel`: a tile of a product with a weight of codes, which are widened on the way."""

from __future__ import annotations

import triton.language as tl
from triton.language import constexpr

from lpr.model.kernels import jit

INT8, FP8, INT4, FP4 = constexpr(0), constexpr(1), constexpr(2), constexpr(3)


@jit(("num_rows",))
def multiply_codes(
    given_at, rows_at, scales_at, bias_at, out_at, num_rows, outputs,
    INPUTS: tl.constexpr, ROW_BYTES: tl.constexpr, GROUP: tl.constexpr, NUM_GROUPS: tl.constexpr, KIND: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows times BLOCK_N outputs; BLOCK_K inputs are in one group."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = row < num_rows, column < outputs
    place = column.to(tl.int64)
    scales_at += place * (ROW_BYTES // 4)
    codes_at = rows_at + place * ROW_BYTES + 4 * NUM_GROUPS * (2 if HAS_ZERO else 1)
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, INPUTS, BLOCK_K):
        is_input = start + lane < INPUTS
        given = tl.load(
            given_at + row[:, None] * INPUTS + (start + lane)[None, :], mask=is_row[:, None] & is_input[None, :],
            other=0.0,
        )  # fmt: skip
        if KIND >= INT4:
            half = tl.arange(0, BLOCK_K // 2)
            is_byte = is_column[:, None] & (start + 2 * half < INPUTS)[None, :]
            both = tl.load(codes_at[:, None] + (start // 2 + half)[None, :], mask=is_byte, other=0)
            codes = tl.interleave(both & 15, both >> 4).to(tl.int32)
            if KIND == INT4:
                wide = (codes - 8).to(tl.float32)
            else:
                power = (codes & 7) >> 1
                size = tl.where(power == 0, 2 * (codes & 1), (2 + (codes & 1)) << power).to(tl.float32) * 0.25
                wide = tl.where(codes >= 8, -size, size)
        else:
            is_byte = is_column[:, None] & is_input[None, :]
            codes = tl.load(codes_at[:, None] + (start + lane)[None, :], mask=is_byte, other=0)
            if KIND == INT8:
                wide = codes.to(tl.int8, bitcast=True).to(tl.float32)
            else:  # e4m3 has float16's form with a bit less of the exponent
                bits = codes.to(tl.int16)
                halves = ((bits & 0x7F) << 7) | ((bits & 0x80) << 8)
                wide = halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        group = start // GROUP
        if HAS_ZERO:
            wide -= tl.load(scales_at + NUM_GROUPS + group, mask=is_column, other=0.0)[:, None]
        wide *= tl.load(scales_at + group, mask=is_column, other=0.0)[:, None]
        weight = wide.to(given_at.dtype.element_ty)
        if UPCAST:
            given, weight = given.to(tl.float32), weight.to(tl.float32)
        acc = tl.dot(given, tl.trans(weight), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_at + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(out_at + at, acc.to(out_at.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
