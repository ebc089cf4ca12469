"""The device code of `elementwise_kernel`: the operations between the matrix products of a decoder layer.

Results are rounded where the modules of transformers round. The order of a norm's sum depends on the width only, not on
the number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lpr.model.kernels.attention_code import _tanh


@triton.jit
def normalise(
    states_at, added_at, weight_at, out_at, stride, out_stride, epsilon,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WEIGHING: tl.constexpr, HAS_ADDED: tl.constexpr,
):  # fmt: skip
    """The RMS norm of one head of one row; with HAS_ADDED, of its sum with `added`, which is written to `states`."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    held = lane < WIDTH
    place = row * stride + tl.program_id(1) * WIDTH + lane
    given = tl.load(states_at + place, mask=held, other=0.0)
    if HAS_ADDED:
        added = tl.load(added_at + place, mask=held, other=0.0)
        given = (given.to(tl.float32) + added.to(tl.float32)).to(given.dtype)
        tl.store(states_at + place, given, mask=held)
    wide = given.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + epsilon)
    weight = tl.load(weight_at + lane, mask=held, other=0.0).to(tl.float32)
    if WEIGHING == 0:  # Weighing.ROUNDED
        result = wide.to(given.dtype).to(tl.float32) * weight
    elif WEIGHING == 1:  # Weighing.ONE_PLUS
        result = wide * (1.0 + weight)
    else:  # Weighing.WIDE
        result = wide * weight
    out = row * out_stride + tl.program_id(1) * WIDTH + lane
    tl.store(out_at + out, result.to(given.dtype), mask=held)


@triton.jit
def rotate_heads(
    states_at, cosines_at, sines_at, stride, num_heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotary embedding of HEADS heads of one row, in place; value d is paired with value d + HALF."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    held = (head < num_heads)[:, None] & (lane < HALF)[None, :]
    place = states_at + row * stride + (head * (2 * HALF))[:, None] + lane[None, :]
    low, high = _rotated(place, cosines_at, sines_at, row, lane, held, HALF)
    tl.store(place, low, mask=held)
    tl.store(place + HALF, high, mask=held)


@triton.jit
def place_heads(
    states_at, cosines_at, sines_at, rows_at, keys_at, values_at, stride,
    key_row, key_head, value_row, value_head, num_queries, num_keys,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """As `rotate_heads` of a row's queries, which stay; its keys, rotated, and its values go to a row of the cache."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    inside = (lane < HALF)[None, :]
    place = states_at + row * stride + (head * (2 * HALF))[:, None] + lane[None, :]
    is_query, is_value = head < num_queries, head >= num_queries + num_keys
    is_key = (head >= num_queries) & (head < num_queries + num_keys)
    low, high = _rotated(place, cosines_at, sines_at, row, lane, (is_query | is_key)[:, None] & inside, HALF)
    tl.store(place, low, mask=is_query[:, None] & inside)
    tl.store(place + HALF, high, mask=is_query[:, None] & inside)
    target = tl.load(rows_at + row)
    key_at = keys_at + target * key_row + ((head - num_queries) * key_head)[:, None] + lane[None, :]
    tl.store(key_at, low, mask=is_key[:, None] & inside)
    tl.store(key_at + HALF, high, mask=is_key[:, None] & inside)
    held = (is_value & (head < num_queries + 2 * num_keys))[:, None] & inside
    value_at = values_at + target * value_row + ((head - num_queries - num_keys) * value_head)[:, None] + lane[None, :]
    tl.store(value_at, tl.load(place, mask=held, other=0.0), mask=held)
    tl.store(value_at + HALF, tl.load(place + HALF, mask=held, other=0.0), mask=held)


@triton.jit
def _rotated(place, cosines_at, sines_at, row, lane, held, HALF: tl.constexpr):
    """The rotated halves of the heads of a row at `place` [HEADS, BLOCK]."""
    angle = row * (2 * HALF) + lane
    low = tl.load(place, mask=held, other=0.0)
    high = tl.load(place + HALF, mask=held, other=0.0)
    kind = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    low_cos = tl.load(cosines_at + angle, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    high_cos = tl.load(cosines_at + angle + HALF, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    low_sin = tl.load(sines_at + angle, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    high_sin = tl.load(sines_at + angle + HALF, mask=lane < HALF, other=0.0).to(tl.float32)[None, :]
    new_low = (low * low_cos).to(kind).to(tl.float32) - (high * low_sin).to(kind).to(tl.float32)
    new_high = (high * high_cos).to(kind).to(tl.float32) + (low * high_sin).to(kind).to(tl.float32)
    return new_low.to(kind), new_high.to(kind)


@triton.jit
def gate_rows(states_at, out_at, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """activation(first half) * second half, of BLOCK values of one row [2 * width]."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = lane < width
    given = tl.load(states_at + row * 2 * width + lane, mask=held, other=0.0)
    value = tl.load(states_at + row * 2 * width + width + lane, mask=held, other=0.0).to(tl.float32)
    wide = given.to(tl.float32)
    if ACTIVATION == 0:  # Activation.SILU
        active = wide / (1.0 + tl.exp(-wide))
    else:  # Activation.GELU_TANH
        active = 0.5 * wide * (1.0 + _tanh(0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)))
    result = active.to(given.dtype).to(tl.float32) * value
    tl.store(out_at + row * width + lane, result.to(given.dtype), mask=held)
