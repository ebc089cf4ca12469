"""The device code of `scan_kernel` besides linear attention: parents, convolutions, Mamba 1's selective scan.

Entries, `first` and the trunk as in `scan_code`; here the trunk advances one entry at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lpr.model.kernels.scan_code import softplus


@triton.jit
def _highest_bit(word):
    """The index of the highest set bit of nonzero words."""
    word = word.to(tl.uint64)
    place = tl.zeros(word.shape, tl.int32)
    for power in tl.static_range(6):
        high = word >> (32 >> power)
        place += tl.where(high != 0, 32 >> power, 0)
        word = tl.where(high != 0, high, word)
    return place


@triton.jit
def find_parents(bits_at, entries_at, parents_at, num_tokens, num_words, BLOCK: tl.constexpr):
    """Per entry, its parent (its last ancestor), -1 for none; undefined after the last entry."""
    batch = tl.program_id(1).to(tl.int64)
    num_entries = tl.load(entries_at + batch)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    held = entry < num_entries
    bits_at += (batch * num_tokens + num_tokens - num_entries + entry) * num_words
    parent = tl.full([BLOCK], -1, tl.int32)
    for index in range(0, tl.cdiv(num_entries, 64)):
        word = tl.load(bits_at + index, mask=held, other=0)
        its_own = tl.full([BLOCK], 1, tl.int64) << (entry % 64).to(tl.int64)
        word = tl.where(entry // 64 == index, word & ~its_own, word)
        parent = tl.where(word != 0, index * 64 + _highest_bit(word), parent)
    tl.store(parents_at + batch * num_tokens + entry, parent, mask=entry < num_tokens)


@triton.jit
def convolve_tree(
    x_at, weight_at, bias_at, states_at, parents_at, cached_at, entries_at, slots_at, first_at, out_at, kept_at,
    num_tokens, num_kept, x_b, x_c, x_t, out_b, out_c, out_t, weight_c, weight_w,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """A causal convolution per channel along paths, for BLOCK_T entries of one row and BLOCK_C channels.

    The inputs from entry `first` - (WIDTH - 1) on are kept, because a commit may need them.
    """
    batch = tl.program_id(2).to(tl.int64)
    num_entries = tl.load(entries_at + batch)
    start = num_tokens - num_entries
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    entry = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T) - start  # padding below 0
    real = (entry >= 0) & (entry < num_entries)
    mask = real[:, None] & (channel < C)[None, :]
    first = tl.load(first_at + batch)
    known = tl.where(tl.load(cached_at + batch) > 0, WIDTH, 0)  # inputs before those of the step
    x_at += batch * x_b + start * x_t
    states_at += (tl.load(slots_at + batch).to(tl.int64) * C + channel) * (WIDTH - 1)
    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_at + channel, mask=channel < C, other=0.0).to(tl.float32)[None, :]
    at = tl.where(real, entry, 0)
    for back in tl.static_range(WIDTH):
        is_entry = at >= 0
        found = tl.load(
            x_at + at[:, None] * x_t + (channel * x_c)[None, :], mask=mask & is_entry[:, None], other=0.0
        ).to(tl.float32)
        if back == 0:
            place = entry - first + WIDTH - 1
            kept = kept_at + (batch * num_kept + place)[:, None] * C + channel[None, :]
            tl.store(kept, found.to(kept_at.dtype.element_ty), mask=mask & (place >= 0)[:, None])
        else:
            held = states_at[None, :] + (WIDTH - 1 + at)[:, None]
            found += tl.load(held, mask=mask & ((at < 0) & (at >= -known))[:, None], other=0.0).to(tl.float32)
        weight = tl.load(
            weight_at + channel * weight_c + (WIDTH - 1 - back) * weight_w, mask=channel < C, other=0.0
        ).to(tl.float32)
        total += found * weight[None, :]
        above = tl.load(parents_at + batch * num_tokens + at, mask=is_entry, other=-1)
        at = tl.where(is_entry, above, at - 1)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    total = tl.where(real[:, None], total, 0.0)
    out = out_at + batch * out_b + ((start + entry) * out_t)[:, None] + (channel * out_c)[None, :]
    mask = (start + entry < num_tokens)[:, None] & (channel < C)[None, :]
    tl.store(out, total.to(out_at.dtype.element_ty), mask=mask)


@triton.jit
def advance_convolution(
    kept_at, states_at, parents_at, cached_at, slots_at, first_at, last_at, num_tokens, num_kept,
    C: tl.constexpr, WIDTH: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of the path to a row's entry `last` to its slot; no change for `last` < 0."""
    batch = tl.program_id(1).to(tl.int64)
    last = tl.load(last_at + batch)
    if last < 0:
        return
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    mask = (channel < C)[:, None]
    first = tl.load(first_at + batch)
    known = tl.where(tl.load(cached_at + batch) > 0, WIDTH, 0)
    states_at += (tl.load(slots_at + batch).to(tl.int64) * C + channel[:, None]) * (WIDTH - 1)
    lane = tl.arange(0, BLOCK_W)
    places = tl.full([BLOCK_W], 0, tl.int32)  # by column of the state, the entry whose input it becomes
    at = last
    for back in tl.static_range(WIDTH - 1):
        places = tl.where(lane == WIDTH - 2 - back, at, places)
        above = tl.load(parents_at + batch * num_tokens + at, mask=at >= 0, other=-1)
        at = tl.where(at >= 0, above, at - 1)
    column = (lane < WIDTH - 1)[None, :]
    kept = kept_at + (batch * num_kept + places - first + WIDTH - 1)[None, :] * C + channel[:, None]
    found = tl.load(kept, mask=mask & column & (places >= 0)[None, :], other=0.0)
    held = states_at + (WIDTH - 1 + places)[None, :]
    found += tl.load(held, mask=mask & column & ((places < 0) & (places >= -known))[None, :], other=0.0)
    tl.debug_barrier()  # all threads have read the state
    tl.store(states_at + lane[None, :], found, mask=mask & column)


@triton.jit
def _step(dt_at, bias, SOFTPLUS: tl.constexpr, held):
    step = tl.load(dt_at, mask=held, other=0.0).to(tl.float32) + bias
    if SOFTPLUS:
        step = softplus(step)
    return step


@triton.jit
def select_tree(
    x_at, dt_at, rates_at, b_at, c_at, skip_at, gate_at, bias_at, states_at, parents_at, cached_at, entries_at,
    slots_at, first_at, out_at, scratch_at, kept_x_at, kept_dt_at, kept_b_at, trunk_state_at, num_tokens, num_kept,
    x_b, x_c, x_t, dt_b, dt_c, dt_t, b_b, b_k, b_t, c_b, c_k, c_t, gate_b, gate_c, gate_t, out_b, out_c, out_t,
    C: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Mamba 1's selective scan of one row, for BLOCK_C channels: each entry in turn, from its parent's state.

    States of the tree's entries are in `scratch`, [B, num_kept, C, K]; that of the previous entry is in registers.
    """
    batch = tl.program_id(1).to(tl.int64)
    num_entries = tl.load(entries_at + batch)
    start = num_tokens - num_entries
    first = tl.load(first_at + batch)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    held = channel < C
    lane = tl.arange(0, BLOCK_K)
    places = channel[:, None] * K + lane[None, :]
    mask = held[:, None] & (lane < K)[None, :]
    out_at += batch * out_b + channel * out_c
    for column in range(0, start):
        tl.store(out_at + column * out_t, tl.zeros([BLOCK_C], out_at.dtype.element_ty), mask=held)
    known = tl.where(tl.load(cached_at + batch) > 0, C, 0)
    slot = tl.load(slots_at + batch).to(tl.int64)
    root = tl.load(states_at + slot * C * K + places, mask=mask & (channel < known)[:, None], other=0.0)
    state = root
    rates = tl.load(rates_at + places, mask=mask, other=0.0).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(bias_at + channel, mask=held, other=0.0).to(tl.float32)
    skip = tl.zeros([BLOCK_C], tl.float32)
    if HAS_SKIP:
        skip = tl.load(skip_at + channel, mask=held, other=0.0).to(tl.float32)
    x_at += batch * x_b + channel * x_c + start * x_t
    dt_at += batch * dt_b + channel * dt_c + start * dt_t
    b_at += batch * b_b + lane * b_k + start * b_t
    c_at += batch * c_b + lane * c_k + start * c_t
    gate_at += batch * gate_b + channel * gate_c + start * gate_t
    out_at += start * out_t
    parents_at += batch * num_tokens
    for entry in range(0, num_entries):
        kept = batch * num_kept + entry - first
        parent = tl.load(parents_at + entry)
        in_tree = parent >= first
        is_next = parent == entry - 1
        known = tl.where(in_tree & (parent != entry - 1), C, 0)
        at = scratch_at + (kept - entry + parent) * C * K + places
        above = tl.load(at, mask=mask & (channel < known)[:, None], other=0.0)
        above = tl.where(in_tree, above, root)
        above = tl.where(is_next, state, above)
        x = tl.load(x_at + entry * x_t, mask=held, other=0.0).to(tl.float32)
        step = _step(dt_at + entry * dt_t, bias, SOFTPLUS, held)
        b = tl.load(b_at + entry * b_t, mask=lane < K, other=0.0).to(tl.float32)
        c = tl.load(c_at + entry * c_t, mask=lane < K, other=0.0).to(tl.float32)
        state = tl.exp(step[:, None] * rates) * above + (step * x)[:, None] * b[None, :]
        result = tl.sum(state * c[None, :], 1) + skip * x
        if HAS_GATE:
            gate = tl.load(gate_at + entry * gate_t, mask=held, other=0.0).to(tl.float32)
            result *= gate / (1.0 + tl.exp(-gate))
        tl.store(out_at + entry * out_t, result.to(out_at.dtype.element_ty), mask=held)
        if entry < first:
            root = state
        else:
            tl.store(scratch_at + kept * C * K + places, state, mask=mask)
            tl.store(kept_x_at + kept * C + channel, x, mask=held)
            tl.store(kept_dt_at + kept * C + channel, step, mask=held)
            tl.store(kept_b_at + kept * K + lane, b, mask=lane < K)
            tl.debug_barrier()
    if first > 0:
        tl.store(trunk_state_at + batch * C * K + places, root, mask=mask)


@triton.jit
def advance_selective(
    kept_x_at, kept_dt_at, kept_b_at, trunk_state_at, rates_at, states_at, bits_at, cached_at, entries_at, slots_at,
    first_at, last_at, num_tokens, num_words, num_kept,
    C: tl.constexpr, K: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Advance the state of a row's slot along the path to its entry `last`; no change for `last` < 0."""
    batch = tl.program_id(1).to(tl.int64)
    last = tl.load(last_at + batch)
    if last < 0:
        return
    first = tl.load(first_at + batch)
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    held = channel < C
    lane = tl.arange(0, BLOCK_K)
    places = channel[:, None] * K + lane[None, :]
    mask = held[:, None] & (lane < K)[None, :]
    states_at += tl.load(slots_at + batch).to(tl.int64) * C * K + places
    known = tl.where((first == 0) & (tl.load(cached_at + batch) > 0), C, 0)
    state = tl.load(states_at, mask=mask & (channel < known)[:, None], other=0.0)
    known = tl.where(first > 0, C, 0)
    state += tl.load(trunk_state_at + batch * C * K + places, mask=mask & (channel < known)[:, None], other=0.0)
    rates = tl.load(rates_at + places, mask=mask, other=0.0).to(tl.float32)
    bits_at += (batch * num_tokens + num_tokens - tl.load(entries_at + batch) + last) * num_words
    for entry in range(first, last + 1):
        word = tl.load(bits_at + entry // 64)
        if ((word >> (entry % 64)) & 1) != 0:
            kept = batch * num_kept + entry - first
            x = tl.load(kept_x_at + kept * C + channel, mask=held, other=0.0)
            step = tl.load(kept_dt_at + kept * C + channel, mask=held, other=0.0)
            b = tl.load(kept_b_at + kept * K + lane, mask=lane < K, other=0.0)
            state = tl.exp(step[:, None] * rates) * state + (step * x)[:, None] * b[None, :]
    tl.store(states_at, state, mask=mask)
