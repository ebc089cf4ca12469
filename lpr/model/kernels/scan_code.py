"""The device code of `scan_kernel`: linear attention with decay over a token tree, and its states' advance.

An entry is counted within its row, without padding; `first` is the first entry behind the trunk, the leading entries
of a row that are a chain and that all later ones descend from. The trunk takes the state along in registers, BLOCK_M
entries at a time. Behind it the state stays, and an entry adds up what its ancestors have written. Sums of decay are
those since `first`. Programs of one head write equal keys and sums to the same places.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHANNELS = tl.constexpr(16)
"""Channels of a decay per channel that are looked at together: [M, N, CHANNELS] values are in registers."""


@triton.jit
def softplus(x):
    """log(1 + exp(x)), x above 20; to a relative 1e-6, as log(1 + e) is not for a small e."""
    e = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + e
    small = whole == 1.0
    found = tl.where(small, e, tl.log(whole) * (e / tl.where(small, 1.0, whole - 1.0)))
    return tl.where(x > 20.0, x, found)


@triton.jit
def _rows(at, row, held, stride, dims, SIZE: tl.constexpr):
    """[M, D] in float32 of rows of SIZE values."""
    mask = held[:, None] & (dims < SIZE)[None, :]
    return tl.load(at + row[:, None] * stride + dims[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _length(values):
    """1 / |row|, [M]."""
    return tl.rsqrt(tl.sum(values * values, 1) + 1e-6)


@triton.jit
def _products(left, right):
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _visible(bits_at, row, held, entry, num_words):
    """[M, N] bool: the entries `entry` [N], of one word, are ancestors or selves of the rows in lines `row` of bits."""
    word = tl.load(bits_at + row * num_words + tl.min(entry, 0) // 64, mask=held, other=0)
    return ((word[:, None] >> (entry % 64).to(tl.int64)[None, :]) & 1) != 0


@triton.jit
def _by_channel(
    query_at, query_t, key_at, key_t, row, held, others_at, other, other_held, others_t,
    own_decay_at, own, own_t, other_decay_at, other_t, visible, inside,
    K: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    """Products [M, N] of queries, and of keys, with the keys of others, each channel with its own decay.

    Decays are sums since `first`, or, not SUMMED, logarithms to be summed over `inside`, the same entries' mask.
    """
    shown = tl.zeros([M, N], tl.float32)
    system = tl.zeros([M, N], tl.float32)
    for start in range(0, K, CHANNELS):
        dims = start + tl.arange(0, CHANNELS)
        query = _rows(query_at, row, held, query_t, dims, K)
        key = _rows(key_at, row, held, key_t, dims, K)
        others = _rows(others_at, other, other_held, others_t, dims, K)
        mine = _rows(own_decay_at, own, held, own_t, dims, K)
        if SUMMED:
            theirs = _rows(other_decay_at, other, other_held, other_t, dims, K)
        else:
            mine = _products(inside, mine)
            theirs = mine
        between = tl.where(visible[:, :, None], mine[:, None, :] - theirs[None, :, :], float("-inf"))
        reached = others[None, :, :] * tl.exp(between)
        shown += tl.sum(query[:, None, :] * reached, 2)
        system += tl.sum(key[:, None, :] * reached, 2)
    return shown, system


@triton.jit
def scan_tree(
    query_at, key_at, value_at, decay_at, beta_at, bias_at, skip_at, states_at, bits_at, cached_at, entries_at,
    slots_at, trunk_at, out_at, kept_key_at, kept_value_at, kept_decay_at, trunk_state_at,
    scale, low, high, num_tokens, num_words, num_kept,
    query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    decay_b, decay_t, decay_h, beta_b, beta_t, beta_h,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    SOLVE: tl.constexpr, PER_CHANNEL: tl.constexpr, NORM: tl.constexpr, HAS_RATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """All entries of one row, for BLOCK_V values of one head: outputs, and what `advance_scan` needs."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    num_entries = tl.load(entries_at + batch)
    start = num_tokens - num_entries
    trunk = tl.load(trunk_at + batch)
    first = trunk * BLOCK_M
    lane = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_K)
    dims_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    value_held = (dims_v < V)[None, :]
    out_at += (batch * num_tokens * NUM_HEADS + head) * V
    for padding in range(0, start, BLOCK_M):
        held = padding + lane < start
        out_place = out_at + (padding + lane)[:, None] * (NUM_HEADS * V) + dims_v[None, :]
        tl.store(out_place, tl.zeros([BLOCK_M, BLOCK_V], out_at.dtype.element_ty), mask=held[:, None] & value_held)

    slot = tl.load(slots_at + batch).to(tl.int64)
    places = dims[:, None] * V + dims_v[None, :]
    state_held = (dims < K)[:, None] & value_held
    known = tl.where(tl.load(cached_at + batch) > 0, K, 0)  # a sequence without computed tokens has no state
    state = tl.load(
        states_at + (slot * NUM_HEADS + head) * K * V + places, mask=(dims < known)[:, None] & value_held, other=0.0
    )

    query_at += batch * query_b + start * query_t + (head // GROUP) * query_h
    key_at += batch * key_b + start * key_t + (head // GROUP) * key_h
    value_at += batch * value_b + start * value_t + head * value_h
    beta_at += batch * beta_b + start * beta_t + head * beta_h
    if HAS_RATE:
        rate = tl.load(decay_at + head).to(tl.float32)
    else:
        rate = 1.0
        decay_at += batch * decay_b + start * decay_t + head * decay_h
    out_at += start * (NUM_HEADS * V)
    bits_at += (batch * num_tokens + start) * num_words
    NUM_KEYS: tl.constexpr = NUM_HEADS // GROUP
    kept_key_at += (batch * num_kept * NUM_KEYS + head // GROUP) * K
    kept_value_at += (batch * num_kept * NUM_HEADS + head) * V
    DECAYS: tl.constexpr = K if PER_CHANNEL else 1
    kept_decay_at += (batch * num_kept * NUM_HEADS + head) * DECAYS

    for block in range(0, tl.cdiv(num_entries, BLOCK_M)):
        begin = block * BLOCK_M
        row = begin + lane
        held = row < num_entries
        kept = row - first  # the row's place among what is kept
        is_tree = begin >= first
        query = _rows(query_at, row, held, query_t, dims, K)
        key = _rows(key_at, row, held, key_t, dims, K)
        value = _rows(value_at, row, held, value_t, dims_v, V)
        beta = tl.load(beta_at + row * beta_t, mask=held, other=0.0).to(tl.float32)
        if HAS_BIAS:
            beta += tl.load(bias_at + head).to(tl.float32)
        if SOFTPLUS:
            beta = softplus(beta)
        if HAS_RATE:
            beta = tl.where(held, tl.minimum(tl.maximum(beta, low), high), 0.0)
        query_scale = tl.zeros([BLOCK_M], tl.float32) + scale
        key_scale = tl.zeros([BLOCK_M], tl.float32) + 1.0
        if NORM:
            query_scale *= _length(query)
            key_scale = _length(key)
        query *= query_scale[:, None]
        key *= key_scale[:, None]

        # Decays along paths: those within the block, then that of the last ancestor before it.
        within = _visible(bits_at, row, held, row, num_words)
        strictly = within & (lane[:, None] > lane[None, :])
        inside = within.to(tl.float32)
        ancestor = tl.full([BLOCK_M], -1, tl.int32)
        for other in range(first // BLOCK_N * BLOCK_N, begin, BLOCK_N):
            column = other + tl.arange(0, BLOCK_N)
            earlier = _visible(bits_at, row, held, column, num_words) & ((column >= first) & (column < begin))[None, :]
            ancestor = tl.maximum(ancestor, tl.max(tl.where(earlier, column[None, :], -1), 1))
        above = ancestor - first
        is_below = ancestor >= 0
        if PER_CHANNEL:
            own = _products(inside, _rows(decay_at, row, held, decay_t, dims, K))
            total = own + _rows(kept_decay_at, above, is_below, NUM_HEADS * K, dims, K)
            reach = tl.exp(total)
        else:
            if HAS_RATE:
                logarithm = rate * beta
            else:
                logarithm = tl.load(decay_at + row * decay_t, mask=held, other=0.0).to(tl.float32)
            own = tl.sum(inside * logarithm[None, :], 1)
            total = own + tl.load(kept_decay_at + above * NUM_HEADS, mask=is_below, other=0.0)
            reach = tl.exp(total)[:, None]
        if is_tree:
            key_place = kept_key_at + kept[:, None] * (NUM_KEYS * K) + dims[None, :]
            tl.store(key_place, key, mask=held[:, None] & (dims < K)[None, :])
            if PER_CHANNEL:
                decay_place = kept_decay_at + kept[:, None] * (NUM_HEADS * K) + dims[None, :]
                tl.store(decay_place, total, mask=held[:, None] & (dims < K)[None, :])
            else:
                tl.store(kept_decay_at + kept * NUM_HEADS, total, mask=held)
            tl.debug_barrier()  # what a thread has stored is there for the others

        # What the state and earlier blocks give.
        seen = _products(query * reach, state)
        wanted = value
        if SOLVE:
            wanted -= _products(key * reach, state)
        for other in range(first // BLOCK_N * BLOCK_N, begin, BLOCK_N):
            column = other + tl.arange(0, BLOCK_N)
            is_earlier = (column >= first) & (column < begin)
            earlier = _visible(bits_at, row, held, column, num_words) & is_earlier[None, :]
            place = column - first
            written = _rows(kept_value_at, place, is_earlier, NUM_HEADS * V, dims_v, V)
            if PER_CHANNEL:
                shown, system = _by_channel(
                    query_at, query_t, key_at, key_t, row, held, kept_key_at, place, is_earlier, NUM_KEYS * K,
                    kept_decay_at, kept, NUM_HEADS * K, kept_decay_at, NUM_HEADS * K, earlier, inside,
                    K, BLOCK_M, BLOCK_N, True,
                )  # fmt: skip
                shown *= query_scale[:, None]
                system *= key_scale[:, None]
            else:
                others = tl.trans(_rows(kept_key_at, place, is_earlier, NUM_KEYS * K, dims, K))
                there = tl.load(kept_decay_at + place * NUM_HEADS, mask=is_earlier, other=0.0)
                between = tl.exp(tl.where(earlier, total[:, None] - there[None, :], float("-inf")))
                shown = _products(query, others) * between
                if SOLVE:
                    system = _products(key, others) * between
            seen += _products(shown, written)
            if SOLVE:
                wanted -= _products(system, written)

        # Within the block: forward substitution, all entries of a depth at once.
        wanted *= beta[:, None]
        if PER_CHANNEL:
            shown, system = _by_channel(
                query_at, query_t, key_at, key_t, row, held, key_at, row, held, key_t,
                decay_at, row, decay_t, decay_at, decay_t, within, inside, K, BLOCK_M, BLOCK_M, False,
            )  # fmt: skip
            shown *= query_scale[:, None] * key_scale[None, :]
            system *= key_scale[:, None] * key_scale[None, :]
        else:
            between = tl.exp(tl.where(within, own[:, None] - own[None, :], float("-inf")))
            shown = _products(query, tl.trans(key)) * between
            if SOLVE:
                system = _products(key, tl.trans(key)) * between
        written = wanted
        if SOLVE:
            system = tl.where(strictly, system * beta[:, None], 0.0)
            for _ in range(0, tl.max(tl.sum(within.to(tl.int32), 1), 0) - 1):
                written = wanted - _products(system, written)
        seen += _products(shown, written)
        if HAS_SKIP:
            seen += tl.load(skip_at + head).to(tl.float32) * value
        out_place = out_at + row[:, None] * (NUM_HEADS * V) + dims_v[None, :]
        tl.store(out_place, seen.to(out_at.dtype.element_ty), mask=held[:, None] & value_held)
        if is_tree:
            value_place = kept_value_at + kept[:, None] * (NUM_HEADS * V) + dims_v[None, :]
            tl.store(value_place, written, mask=held[:, None] & value_held)
            tl.debug_barrier()
        else:  # a block of the trunk: the state follows
            is_last = lane == BLOCK_M - 1
            if PER_CHANNEL:
                end = tl.sum(tl.where(is_last[:, None], total, 0.0), 0)
                left = key * tl.exp(end[None, :] - total)
                state = state * tl.exp(end)[:, None] + _products(tl.trans(left), written)
            else:
                end = tl.sum(tl.where(is_last, total, 0.0), 0)
                left = key * tl.exp(end - total)[:, None]
                state = state * tl.exp(end) + _products(tl.trans(left), written)
    if trunk > 0:
        tl.store(trunk_state_at + (batch * NUM_HEADS + head) * K * V + places, state, mask=state_held)


@triton.jit
def advance_scan(
    kept_key_at, kept_value_at, kept_decay_at, trunk_state_at, states_at, bits_at, cached_at, entries_at, slots_at,
    trunk_at, last_at, num_tokens, num_words, num_kept,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """The state of a row's slot follows the path to its entry `last`; below 0 it stays as it is."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    last = tl.load(last_at + batch)
    if last < 0:
        return
    trunk = tl.load(trunk_at + batch)
    first = trunk * BLOCK_M
    slot = tl.load(slots_at + batch).to(tl.int64)
    dims = tl.arange(0, BLOCK_K)
    dims_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    places = dims[:, None] * V + dims_v[None, :]
    state_held = (dims < K)[:, None] & (dims_v < V)[None, :]
    states_at += (slot * NUM_HEADS + head) * K * V + places
    known = tl.where((trunk == 0) & (tl.load(cached_at + batch) > 0), K, 0)
    state = tl.load(states_at, mask=state_held & (dims < known)[:, None], other=0.0)
    known = tl.where(trunk > 0, K, 0)
    trunk_state_at += (batch * NUM_HEADS + head) * K * V + places
    state += tl.load(trunk_state_at, mask=state_held & (dims < known)[:, None], other=0.0)
    NUM_KEYS: tl.constexpr = NUM_HEADS // GROUP
    DECAYS: tl.constexpr = K if PER_CHANNEL else 1
    kept_key_at += (batch * num_kept * NUM_KEYS + head // GROUP) * K
    kept_value_at += (batch * num_kept * NUM_HEADS + head) * V
    kept_decay_at += (batch * num_kept * NUM_HEADS + head) * DECAYS
    bits_at += (batch * num_tokens + num_tokens - tl.load(entries_at + batch) + last) * num_words
    is_below = last >= first  # else the path ends with the trunk
    if PER_CHANNEL:
        at = kept_decay_at + (last - first) * (NUM_HEADS * K) + dims
        end = tl.load(at, mask=dims < tl.where(is_below, K, 0), other=0.0)
        state = state * tl.exp(end)[:, None]
    else:
        end = tl.load(kept_decay_at + (last - first) * NUM_HEADS, mask=is_below, other=0.0)
        state = state * tl.exp(end)
    for begin in range(first // BLOCK_N * BLOCK_N, last + 1, BLOCK_N):
        entry = begin + tl.arange(0, BLOCK_N)
        word = tl.load(bits_at + begin // 64)
        held = (((word >> (entry % 64).to(tl.int64)) & 1) != 0) & (entry >= first)
        place = entry - first
        key = _rows(kept_key_at, place, held, NUM_KEYS * K, dims, K)
        written = _rows(kept_value_at, place, held, NUM_HEADS * V, dims_v, V)
        if PER_CHANNEL:
            left = tl.minimum(end[None, :] - _rows(kept_decay_at, place, held, NUM_HEADS * K, dims, K), 0.0)
        else:
            left = tl.minimum(end - tl.load(kept_decay_at + place * NUM_HEADS, mask=held, other=0.0), 0.0)[:, None]
        state += _products(tl.trans(key * tl.exp(left)), written)
    tl.store(states_at, state, mask=state_held)
