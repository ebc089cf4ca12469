"""The device code of exact linear attention over a token tree: entry after entry, each from its parent's state.

`scan_code` processes a tree's entries in blocks. Here the instructions of an entry do not depend on its place, and
states advance by the same instructions. Entries, `first` and the trunk are as in `recurrent_code`, whose selective scan
has this form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lpr.model.kernels.scan_code import softplus


@triton.jit
def _write(state, key, value, decay, beta, SOLVE: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """The state [K, V] after an entry, from its parent's state."""
    if PER_CHANNEL:
        state = state * tl.exp(decay)[:, None]
    else:
        state = state * tl.exp(decay)
    if SOLVE:
        value = beta * (value - tl.sum(state * key[:, None], 0))
    return tl.fma(key[:, None] + tl.zeros_like(state), value[None, :] + tl.zeros_like(state), state)


@triton.jit
def walk_tree(
    query_at, key_at, value_at, decay_at, beta_at, bias_at, skip_at, states_at, parents_at, cached_at, entries_at,
    slots_at, first_at, out_at, scratch_at, kept_key_at, kept_value_at, kept_decay_at, kept_beta_at, trunk_state_at,
    scale, low, high, num_tokens, num_kept,
    query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    decay_b, decay_t, decay_h, beta_b, beta_t, beta_h,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SOLVE: tl.constexpr, PER_CHANNEL: tl.constexpr,
    NORM: tl.constexpr, HAS_RATE: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """All entries of one row, for BLOCK_V values of one head. `scratch` [B, num_kept, H, K, V] has states of a tree."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    num_entries = tl.load(entries_at + batch)
    start = num_tokens - num_entries
    first = tl.load(first_at + batch)
    dims = tl.arange(0, BLOCK_K)
    dims_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    value_held = dims_v < V
    places = dims[:, None] * V + dims_v[None, :]
    mask = (dims < K)[:, None] & value_held[None, :]
    out_at += (batch * num_tokens * NUM_HEADS + head) * V + dims_v
    for column in range(0, start):
        tl.store(out_at + column * (NUM_HEADS * V), tl.zeros([BLOCK_V], out_at.dtype.element_ty), mask=value_held)
    known = tl.where(tl.load(cached_at + batch) > 0, K, 0)
    slot = tl.load(slots_at + batch).to(tl.int64)
    states_at += (slot * NUM_HEADS + head) * K * V + places
    root = tl.load(states_at, mask=mask & (dims < known)[:, None], other=0.0)
    state = root
    query_at += batch * query_b + start * query_t + (head // GROUP) * query_h + dims
    key_at += batch * key_b + start * key_t + (head // GROUP) * key_h + dims
    value_at += batch * value_b + start * value_t + head * value_h + dims_v
    beta_at += batch * beta_b + start * beta_t + head * beta_h
    rate, bias, skip = 0.0, 0.0, 0.0
    if HAS_RATE:
        rate = tl.load(decay_at + head).to(tl.float32)
    else:
        decay_at += batch * decay_b + start * decay_t + head * decay_h
    if HAS_BIAS:
        bias = tl.load(bias_at + head).to(tl.float32)
    if HAS_SKIP:
        skip = tl.load(skip_at + head).to(tl.float32)
    out_at += start * (NUM_HEADS * V)
    parents_at += batch * num_tokens
    for entry in range(0, num_entries):
        kept = (batch * num_kept + entry - first) * NUM_HEADS + head
        parent = tl.load(parents_at + entry)
        in_tree = parent >= first
        is_next = parent == entry - 1
        known = tl.where(in_tree & (parent != entry - 1), K, 0)
        at = scratch_at + (kept + (parent - entry) * NUM_HEADS) * K * V + places
        above = tl.load(at, mask=mask & (dims < known)[:, None], other=0.0)
        above = tl.where(in_tree, above, root)
        above = tl.where(is_next, state, above)
        query = tl.load(query_at + entry * query_t, mask=dims < K, other=0.0).to(tl.float32)
        key = tl.load(key_at + entry * key_t, mask=dims < K, other=0.0).to(tl.float32)
        value = tl.load(value_at + entry * value_t, mask=value_held, other=0.0).to(tl.float32)
        beta = tl.load(beta_at + entry * beta_t).to(tl.float32) + bias
        if NORM:
            query *= tl.rsqrt(tl.sum(query * query, 0) + 1e-6)
            key *= tl.rsqrt(tl.sum(key * key, 0) + 1e-6)
        query *= scale
        if SOFTPLUS:
            beta = softplus(beta)
        written = value
        if HAS_RATE:
            beta = tl.minimum(tl.maximum(beta, low), high)
            decay = rate * beta
            written = value * beta
        elif PER_CHANNEL:
            decay = tl.load(decay_at + entry * decay_t + dims, mask=dims < K, other=0.0).to(tl.float32)
        else:
            decay = tl.load(decay_at + entry * decay_t).to(tl.float32)
        state = _write(above, key, written, decay, beta, SOLVE, PER_CHANNEL)
        result = tl.sum(state * query[:, None], 0)
        if HAS_SKIP:
            result += skip * value
        tl.store(out_at + entry * (NUM_HEADS * V), result.to(out_at.dtype.element_ty), mask=value_held)
        if entry < first:
            root = state
        else:
            tl.store(scratch_at + kept * K * V + places, state, mask=mask)
            tl.store(kept_key_at + kept * K + dims, key, mask=dims < K)
            tl.store(kept_value_at + kept * V + dims_v, written, mask=value_held)
            if PER_CHANNEL:
                tl.store(kept_decay_at + kept * K + dims, decay, mask=dims < K)
            else:
                tl.store(kept_decay_at + kept, decay)
            tl.store(kept_beta_at + kept, beta)
            tl.debug_barrier()
    if first > 0:
        tl.store(trunk_state_at + (batch * NUM_HEADS + head) * K * V + places, root, mask=mask)


@triton.jit
def advance_walk(
    kept_key_at, kept_value_at, kept_decay_at, kept_beta_at, trunk_state_at, states_at, bits_at, cached_at, entries_at,
    slots_at, first_at, last_at, num_tokens, num_words, num_kept,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, SOLVE: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Advance the state of a row's slot along the path to its entry `last`; no change for `last` < 0."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    last = tl.load(last_at + batch)
    if last < 0:
        return
    first = tl.load(first_at + batch)
    dims = tl.arange(0, BLOCK_K)
    dims_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    value_held = dims_v < V
    places = dims[:, None] * V + dims_v[None, :]
    mask = (dims < K)[:, None] & value_held[None, :]
    states_at += (tl.load(slots_at + batch).to(tl.int64) * NUM_HEADS + head) * K * V + places
    known = tl.where((first == 0) & (tl.load(cached_at + batch) > 0), K, 0)
    state = tl.load(states_at, mask=mask & (dims < known)[:, None], other=0.0)
    known = tl.where(first > 0, K, 0)
    trunk_state_at += (batch * NUM_HEADS + head) * K * V + places
    state = tl.where(first > 0, tl.load(trunk_state_at, mask=mask & (dims < known)[:, None], other=0.0), state)
    bits_at += (batch * num_tokens + num_tokens - tl.load(entries_at + batch) + last) * num_words
    for entry in range(first, last + 1):
        word = tl.load(bits_at + entry // 64)
        if ((word >> (entry % 64)) & 1) != 0:
            kept = (batch * num_kept + entry - first) * NUM_HEADS + head
            key = tl.load(kept_key_at + kept * K + dims, mask=dims < K, other=0.0)
            value = tl.load(kept_value_at + kept * V + dims_v, mask=value_held, other=0.0)
            if PER_CHANNEL:
                decay = tl.load(kept_decay_at + kept * K + dims, mask=dims < K, other=0.0)
            else:
                decay = tl.load(kept_decay_at + kept)
            state = _write(state, key, value, decay, tl.load(kept_beta_at + kept), SOLVE, PER_CHANNEL)
    tl.store(states_at, state, mask=mask)
