"""The device code of `scan_kernel`: linear attention with decay over a token tree, and its states' advance.

Entries are indexed within their row, without padding. The *trunk* is the leading chain of a row from which all later
entries descend; `first` is the first entry after it. The trunk updates a copy of the state, BLOCK_M entries at a time.
After it the state is constant, and an entry adds the contributions of its ancestors. Sums of decay start at `first`.
Programs of one head write equal keys and sums to the same places. Keys are processed CHANNELS channels at a time,
because whole keys and the state exceed the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), and x above 20; relative error 1e-6, also for small exp(x)."""
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
def _products(left, right):
    """Matrix products in float32, as three TF32 products on tensor cores; without tensor cores operands spill."""
    return tl.dot(left, right, input_precision="tf32x3")


@triton.jit
def _visible(bits_at, row, held, entry, num_words):
    """[M, N] bool: the entries `entry` [N], of one word, are ancestors or selves of the rows in lines `row` of bits."""
    word = tl.load(bits_at + row * num_words + tl.min(entry, 0) // 64, mask=held, other=0)
    return ((word[:, None] >> (entry % 64).to(tl.int64)[None, :]) & 1) != 0


@triton.jit
def _decayed(query, key, others, mine, theirs, visible):
    """Products [M, N] of queries, and of keys, with the keys of other entries, with decay per channel."""
    between = tl.exp(tl.where(visible[:, :, None], mine[:, None, :] - theirs[None, :, :], float("-inf")))
    reached = others[None, :, :] * between
    return tl.sum(query[:, None, :] * reached, 2), tl.sum(key[:, None, :] * reached, 2)


@triton.jit
def scan_tree(
    query_at, key_at, value_at, decay_at, beta_at, bias_at, skip_at, states_at, bits_at, cached_at, entries_at,
    slots_at, trunk_at, out_at, kept_key_at, kept_value_at, kept_decay_at, trunk_state_at,
    scale, low, high, num_tokens, num_words, num_kept,
    query_b, query_t, query_h, key_b, key_t, key_h, value_b, value_t, value_h,
    decay_b, decay_t, decay_h, beta_b, beta_t, beta_h,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, CHANNELS: tl.constexpr,
    SOLVE: tl.constexpr, PER_CHANNEL: tl.constexpr, NORM: tl.constexpr, HAS_RATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_SKIP: tl.constexpr,
):  # fmt: skip
    """All entries of one row, for BLOCK_V values of one head: outputs, and the inputs of `advance_scan`."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    num_entries = tl.load(entries_at + batch)
    start = num_tokens - num_entries
    trunk = tl.load(trunk_at + batch)
    first = trunk * BLOCK_M
    lane = tl.arange(0, BLOCK_M)
    channel = tl.arange(0, CHANNELS)
    dims_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    value_held = (dims_v < V)[None, :]
    out_at += (batch * num_tokens * NUM_HEADS + head) * V
    for padding in range(0, start, BLOCK_M):
        held = padding + lane < start
        out_place = out_at + (padding + lane)[:, None] * (NUM_HEADS * V) + dims_v[None, :]
        tl.store(out_place, tl.zeros([BLOCK_M, BLOCK_V], out_at.dtype.element_ty), mask=held[:, None] & value_held)

    # The state is zero for a sequence without computed tokens. The trunk has a copy.
    state_at = states_at + (tl.load(slots_at + batch).to(tl.int64) * NUM_HEADS + head) * K * V
    known = tl.where(tl.load(cached_at + batch) > 0, K, 0)
    if trunk > 0:
        copy_at = trunk_state_at + (batch * NUM_HEADS + head) * K * V
        for begin in range(0, K, CHANNELS):
            dims = begin + channel
            state = _rows(state_at, dims, dims < known, V, dims_v, V)
            tl.store(copy_at + dims[:, None] * V + dims_v[None, :], state, mask=(dims < K)[:, None] & value_held)
        state_at = copy_at
        known = tl.where(trunk > 0, K, 0)
        tl.debug_barrier()  # what a thread has stored is there for the others

    query_at += batch * query_b + start * query_t + (head // GROUP) * query_h
    key_at += batch * key_b + start * key_t + (head // GROUP) * key_h
    value_at += batch * value_b + start * value_t + head * value_h
    beta_at += batch * beta_b + start * beta_t + head * beta_h
    if HAS_RATE:
        rate = tl.load(decay_at + head).to(tl.float32)
    else:
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
        kept_held = held & (kept >= 0)
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
            query_squares = tl.zeros([BLOCK_M], tl.float32)
            key_squares = tl.zeros([BLOCK_M], tl.float32)
            for some in range(0, K, CHANNELS):
                query = _rows(query_at, row, held, query_t, some + channel, K)
                key = _rows(key_at, row, held, key_t, some + channel, K)
                query_squares += tl.sum(query * query, 1)
                key_squares += tl.sum(key * key, 1)
            query_scale *= tl.rsqrt(query_squares + 1e-6)
            key_scale = tl.rsqrt(key_squares + 1e-6)

        # Decays along paths: those within the block, and that of the last ancestor before it.
        within = _visible(bits_at, row, held, row, num_words)
        inside = within.to(tl.float32)
        ancestor = tl.full([BLOCK_M], -1, tl.int32)
        for other in range(first // BLOCK_N * BLOCK_N, begin, BLOCK_N):
            column = other + tl.arange(0, BLOCK_N)
            earlier = _visible(bits_at, row, held, column, num_words) & ((column >= first) & (column < begin))[None, :]
            ancestor = tl.maximum(ancestor, tl.max(tl.where(earlier, column[None, :], -1), 1))
        above = ancestor - first
        is_below = ancestor >= 0
        if not PER_CHANNEL:
            if HAS_RATE:
                logarithm = rate * beta
            else:
                logarithm = tl.load(decay_at + row * decay_t, mask=held, other=0.0).to(tl.float32)
            own = tl.sum(inside * logarithm[None, :], 1)
            total = own + tl.load(kept_decay_at + above * NUM_HEADS, mask=is_below, other=0.0)
            tl.store(kept_decay_at + kept * NUM_HEADS, total, mask=kept_held)

        # The state's contribution, and the products within the block.
        seen = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        predicted = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        shown = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
        system = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
        for some in range(0, K, CHANNELS):
            dims = some + channel
            query = _rows(query_at, row, held, query_t, dims, K) * query_scale[:, None]
            key = _rows(key_at, row, held, key_t, dims, K) * key_scale[:, None]
            state = _rows(state_at, dims, dims < known, V, dims_v, V)
            mask = kept_held[:, None] & (dims < K)[None, :]
            tl.store(kept_key_at + kept[:, None] * (NUM_KEYS * K) + dims[None, :], key, mask=mask)
            if PER_CHANNEL:
                mine = _products(inside, _rows(decay_at, row, held, decay_t, dims, K))
                sums = mine + _rows(kept_decay_at, above, is_below, NUM_HEADS * K, dims, K)
                tl.store(kept_decay_at + kept[:, None] * (NUM_HEADS * K) + dims[None, :], sums, mask=mask)
                reach = tl.exp(sums)
                seen += _products(query * reach, state)
                predicted += _products(key * reach, state)
                part, its_system = _decayed(query, key, key, mine, mine, within)
                shown += part
                system += its_system
            else:
                seen += _products(query, state)
                shown += _products(query, tl.trans(key))
                if SOLVE:
                    predicted += _products(key, state)
                    system += _products(key, tl.trans(key))
        if not PER_CHANNEL:
            between = tl.exp(tl.where(within, own[:, None] - own[None, :], float("-inf")))
            shown *= between
            system *= between
            reach = tl.exp(total)[:, None]
            seen *= reach
            predicted *= reach
        wanted = value - predicted
        tl.debug_barrier()

        # The contributions of earlier blocks.
        for other in range(first // BLOCK_N * BLOCK_N, begin, BLOCK_N):
            column = other + tl.arange(0, BLOCK_N)
            is_earlier = (column >= first) & (column < begin)
            earlier = _visible(bits_at, row, held, column, num_words) & is_earlier[None, :]
            place = column - first
            scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            predicting = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for some in range(0, K, CHANNELS):
                dims = some + channel
                query = _rows(query_at, row, held, query_t, dims, K) * query_scale[:, None]
                key = _rows(kept_key_at, kept, held, NUM_KEYS * K, dims, K)
                others = _rows(kept_key_at, place, is_earlier, NUM_KEYS * K, dims, K)
                if PER_CHANNEL:
                    mine = _rows(kept_decay_at, kept, held, NUM_HEADS * K, dims, K)
                    theirs = _rows(kept_decay_at, place, is_earlier, NUM_HEADS * K, dims, K)
                    part, its_system = _decayed(query, key, others, mine, theirs, earlier)
                    scores += part
                    predicting += its_system
                else:
                    scores += _products(query, tl.trans(others))
                    if SOLVE:
                        predicting += _products(key, tl.trans(others))
            if not PER_CHANNEL:
                there = tl.load(kept_decay_at + place * NUM_HEADS, mask=is_earlier, other=0.0)
                decay = tl.exp(tl.where(earlier, total[:, None] - there[None, :], float("-inf")))
                scores *= decay
                predicting *= decay
            written = _rows(kept_value_at, place, is_earlier, NUM_HEADS * V, dims_v, V)
            seen += _products(scores, written)
            if SOLVE:
                wanted -= _products(predicting, written)

        # Within the block: forward substitution, all entries of a depth at once.
        wanted *= beta[:, None]
        written = wanted
        if SOLVE:
            system = tl.where(within & (lane[:, None] > lane[None, :]), system * beta[:, None], 0.0)
            for _ in range(0, tl.max(tl.sum(within.to(tl.int32), 1), 0) - 1):
                written = wanted - _products(system, written)
        seen += _products(shown, written)
        if HAS_SKIP:
            seen += tl.load(skip_at + head).to(tl.float32) * value
        out_place = out_at + row[:, None] * (NUM_HEADS * V) + dims_v[None, :]
        tl.store(out_place, seen.to(out_at.dtype.element_ty), mask=held[:, None] & value_held)
        value_place = kept_value_at + kept[:, None] * (NUM_HEADS * V) + dims_v[None, :]
        tl.store(value_place, written, mask=kept_held[:, None] & value_held)
        if begin < first:  # a block of the trunk, whose state follows
            is_last = lane == BLOCK_M - 1
            for some in range(0, K, CHANNELS):
                dims = some + channel
                key = _rows(key_at, row, held, key_t, dims, K) * key_scale[:, None]
                state = _rows(state_at, dims, dims < known, V, dims_v, V)
                if PER_CHANNEL:
                    sums = _products(inside, _rows(decay_at, row, held, decay_t, dims, K))
                    end = tl.sum(tl.where(is_last[:, None], sums, 0.0), 0)
                    state *= tl.exp(end)[:, None]
                    key *= tl.exp(tl.minimum(end[None, :] - sums, 0.0))
                else:
                    end = tl.sum(tl.where(is_last, own, 0.0), 0)
                    state *= tl.exp(end)
                    key *= tl.exp(tl.minimum(end - own, 0.0))[:, None]
                state += _products(tl.trans(key), written)
                tl.debug_barrier()  # all threads have read the state
                place_of_state = state_at + dims[:, None] * V + dims_v[None, :]
                tl.store(place_of_state, state, mask=(dims < K)[:, None] & value_held)
        tl.debug_barrier()


@triton.jit
def advance_scan(
    kept_key_at, kept_value_at, kept_decay_at, trunk_state_at, states_at, bits_at, cached_at, entries_at, slots_at,
    trunk_at, last_at, num_tokens, num_words, num_kept,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Advance the state of a row's slot along the path to its entry `last`; no change for `last` < 0."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    last = tl.load(last_at + batch)
    if last < 0:
        return
    trunk = tl.load(trunk_at + batch)
    first = trunk * BLOCK_M
    slot = tl.load(slots_at + batch).to(tl.int64)
    dims = tl.program_id(0) % tl.cdiv(K, BLOCK_K) * BLOCK_K + tl.arange(0, BLOCK_K)
    dims_v = tl.program_id(0) // tl.cdiv(K, BLOCK_K) * BLOCK_V + tl.arange(0, BLOCK_V)
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
