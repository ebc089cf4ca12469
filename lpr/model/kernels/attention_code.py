"""The device code of `attention_kernel`: a block of query rows over one split of the keys; the combination.

Written for Triton 3.x. All lengths are read on the device. UPCAST is for the interpreter only, whose bfloat16 products
multiply bit patterns (triton issue 11584) and whose casts truncate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lpr.model.kernels import jit

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)  # a running maximum below every score; -inf would make NaN of a row without a key


@triton.jit
def _tanh(x):
    """Tanh to about 1e-7 absolute (libdevice's is not available in the interpreter)."""
    square = x * x
    small = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp(-2 * tl.abs(x))
    large = (1 - decay) / (1 + decay)
    return tl.where(square < 0.04, small, tl.where(x < 0, -large, large))


@triton.jit
def _absorb(
    query, key_at, value_at, held, visible, acc, top, total, scale, softcap,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One block of keys into the running softmax: `acc` [M, DV], `top` and `total` [M], scores in powers of two.

    Keys and values of another type (fp8) are multiplied in the query's.
    """
    if BLOCK_D == D:
        key = tl.load(key_at, mask=held[:, None], other=0.0)
    else:
        key = tl.load(key_at, mask=held[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    scores = tl.dot(query, tl.trans(key.to(query.dtype)), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores / softcap)
    scores = tl.where(visible, scores * LOG2E, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(top - highest)
    if BLOCK_DV == DV:
        value = tl.load(value_at, mask=held[:, None], other=0.0)
    else:
        value = tl.load(value_at, mask=held[:, None] & (tl.arange(0, BLOCK_DV) < DV)[None, :], other=0.0)
    value = value.to(query.dtype)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee")
    return acc, highest, total * shrink + tl.sum(weights, 1)


@triton.jit
def _rows_of(table_at, column, held, PAGE: tl.constexpr):
    """The cache rows of some keys of a sequence; without pages, key j is row j."""
    if PAGE == 0:
        return column.to(tl.int64)
    page = tl.load(table_at + column // PAGE, mask=held, other=0).to(tl.int64)
    return page * PAGE + column % PAGE


@triton.jit
def _sequence_of(starts_at, block, num_sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The packed sequence that a block of query rows belongs to; each sequence starts with a new block."""
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(starts_at + middle) * GROUP // BLOCK_M + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit(
    ("num_tokens", "num_words", "num_q_blocks", "num_splits", "num_sequences", "num_entries", "table_b"),
    ("table_at", "bits_at", "cached_at", "entries_at", "positions_at", "starts_at", "slots_at", "arrived_at"),
)
def attend(
    query_at, key_at, value_at, table_at, bits_at, cached_at, entries_at, positions_at, starts_at, slots_at, sinks_at,
    out_at, part_acc_at, part_top_at, part_total_at, arrived_at,
    scale, softcap, window, chunk, num_tokens, num_words, num_q_blocks, num_splits, num_sequences, num_entries,
    query_b, query_h, query_t, key_b, key_h, key_n, value_b, value_h, value_n, table_b,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    IS_SPLIT: tl.constexpr, JOINS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr, UPCAST: tl.constexpr, PAGE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Attention over split number `split` of the keys, for one block of query rows of one K/V head.

    `num_entries` is the total over all sequences. A sequence's entries are contiguous, after its padding. With JOINS
    the program of a block that ends last combines its splits; `arrived_at` counts those that have ended, and is 0 again
    then. The order in which they end does not change a bit of the result.
    """
    q_block = tl.program_id(0) % num_q_blocks
    arrived_at += (tl.program_id(2) * NUM_KV_HEADS + tl.program_id(1)) * num_q_blocks + q_block
    split = tl.program_id(0) // num_q_blocks
    head = tl.program_id(1)
    if PACKED:
        batch = _sequence_of(starts_at, q_block, num_sequences, GROUP, BLOCK_M).to(tl.int64)
        begin_at = tl.load(starts_at + batch)
        width = tl.load(starts_at + batch + 1) - begin_at
        q_block = q_block - (begin_at * GROUP // BLOCK_M + batch).to(tl.int32)
        if q_block * BLOCK_M >= width * GROUP:
            return
        base = begin_at.to(tl.int64)
        query_at += base * query_t
        table_at += tl.load(slots_at + batch).to(tl.int64) * table_b
    else:
        batch = tl.program_id(2).to(tl.int64)
        width = num_tokens
        base = batch * num_tokens
        query_at += batch * query_b
        table_at += batch * table_b
    num_cached = tl.load(cached_at + batch)
    start = width - tl.load(entries_at + batch)  # entries before it are padding

    # The query rows: row r is head r % GROUP of the group, of token r // GROUP.
    rows = q_block * BLOCK_M + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    real = (token < width) & (token >= start)
    q_head = head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    query = tl.load(
        query_at + (q_head * query_h + token * query_t)[:, None] + dims[None, :],
        mask=real[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    if UPCAST:
        query = query.to(tl.float32)
    positions_at += base
    lowest = tl.zeros([BLOCK_M], tl.int32)  # the first position that a row may see
    if HAS_WINDOW or HAS_CHUNK:
        position = tl.load(positions_at + token, mask=real, other=0).to(tl.int32)
        if HAS_WINDOW:
            lowest = tl.maximum(lowest, position - window + 1)
        if HAS_CHUNK:
            lowest = tl.maximum(lowest, position - position % chunk)

    # Key blocks: committed ones, then the tree's. No entry sees a later one, so the loop ends with the last query row.
    last_token = tl.minimum((q_block * BLOCK_M + BLOCK_M - 1) // GROUP, width - 1)
    num_seen = tl.maximum(last_token - start + 1, 0)
    num_committed = tl.cdiv(num_cached, BLOCK_N)
    first = tl.minimum(tl.min(tl.where(real, lowest, 2147483647)) // BLOCK_N, num_committed)
    num_blocks = tl.where(num_seen > 0, num_committed + tl.cdiv(num_seen, BLOCK_N), first)
    share = tl.cdiv(num_blocks - first, num_splits)
    begin = first + split * share
    end = tl.minimum(begin + share, num_blocks)

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lane = tl.arange(0, BLOCK_N)
    key_at += batch * key_b + head * key_h
    value_at += batch * value_b + head * value_h
    for block in range(begin, tl.minimum(end, num_committed)):
        column = block * BLOCK_N
        held = column + lane < num_cached
        visible = real[:, None] & held[None, :]
        if HAS_WINDOW or HAS_CHUNK:
            visible = visible & ((column + lane)[None, :] >= lowest[:, None])
        row = _rows_of(table_at, column + lane, held, PAGE)
        acc, top, total = _absorb(
            query, key_at + (row * key_n)[:, None] + dims[None, :],
            value_at + (row * value_n)[:, None] + dims_v[None, :], held, visible, acc, top, total,
            scale, softcap, D, DV, BLOCK_D, BLOCK_DV, HAS_SOFTCAP,
        )  # fmt: skip
    bits_at += (base + token) * num_words
    for block in range(tl.maximum(begin, num_committed), end):
        entry = (block - num_committed) * BLOCK_N  # BLOCK_N divides 64: one word holds the whole block
        held = entry + lane < num_seen
        word = tl.load(bits_at + entry // 64, mask=real, other=0)
        visible = ((word[:, None] >> (entry % 64 + lane).to(tl.int64)[None, :]) & 1) != 0
        if HAS_WINDOW or HAS_CHUNK:
            held_position = tl.load(positions_at + start + entry + lane, mask=held, other=0).to(tl.int32)
            visible = visible & (held_position[None, :] >= lowest[:, None])
        row = _rows_of(table_at, num_cached + entry + lane, held, PAGE)
        acc, top, total = _absorb(
            query, key_at + (row * key_n)[:, None] + dims[None, :],
            value_at + (row * value_n)[:, None] + dims_v[None, :], held, visible, acc, top, total,
            scale, softcap, D, DV, BLOCK_D, BLOCK_DV, HAS_SOFTCAP,
        )  # fmt: skip

    in_range = token < width
    out_row = (base + token) * (NUM_KV_HEADS * GROUP) + q_head
    out_at += out_row[:, None] * DV + dims_v[None, :]
    written = in_range[:, None] & (dims_v < DV)[None, :]
    if not IS_SPLIT:
        if HAS_SINKS:
            sink = tl.load(sinks_at + q_head).to(tl.float32) * LOG2E
            highest = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - highest)[:, None]
            total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # padding has no key: 0
        tl.store(out_at, acc.to(out_at.dtype.element_ty), mask=written)
    else:
        part = (head.to(tl.int64) * (num_entries * GROUP) + base * GROUP + rows) * num_splits + split
        tl.store(part_top_at + part, top, mask=in_range)
        tl.store(part_total_at + part, total, mask=in_range)
        seen = in_range & (total > 0)  # other rows are not read
        tl.store(part_acc_at + part[:, None] * DV + dims_v[None, :], acc, mask=seen[:, None] & (dims_v < DV)[None, :])
        if JOINS:
            tl.debug_barrier()  # all threads of this program have written
            if tl.atomic_add(arrived_at, 1, sem="acq_rel") == num_splits - 1:
                tl.store(arrived_at, 0)
                part -= split
                top = tl.full([BLOCK_M], NOTHING, tl.float32)
                for each in range(num_splits):
                    other = tl.load(part_top_at + part + each, mask=in_range, other=NOTHING, cache_modifier=".cg")
                    top = tl.maximum(top, other)
                if HAS_SINKS:
                    sink = tl.load(sinks_at + q_head).to(tl.float32) * LOG2E
                    top = tl.maximum(top, sink)
                acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                for each in range(num_splits):  # not in the order of arrival
                    place = part + each
                    weight = tl.load(part_top_at + place, mask=in_range, other=NOTHING, cache_modifier=".cg")
                    weight = tl.exp2(weight - top)
                    held = tl.load(part_total_at + place, mask=in_range, other=0.0, cache_modifier=".cg")
                    total += held * weight
                    acc += weight[:, None] * tl.load(
                        part_acc_at + place[:, None] * DV + dims_v[None, :],
                        mask=(held > 0)[:, None] & (dims_v < DV)[None, :], other=0.0, cache_modifier=".cg",
                    )  # fmt: skip
                if HAS_SINKS:
                    total += tl.exp2(sink - top)
                acc = acc / tl.where(total > 0, total, 1.0)[:, None]
                tl.store(out_at, acc.to(out_at.dtype.element_ty), mask=written)


@jit(("num_entries",))
def combine(
    part_acc_at, part_top_at, part_total_at, sinks_at, out_at, num_entries,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    NUM_SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the partial softmaxes of all splits, for one query row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    q_head = head * GROUP + row % GROUP
    part = (head.to(tl.int64) * (num_entries * GROUP) + row) * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims_v = tl.arange(0, BLOCK_DV)
    top = tl.load(part_top_at + part)
    total = tl.load(part_total_at + part)
    acc = tl.load(
        part_acc_at + part[:, None] * DV + dims_v[None, :],
        mask=(total > 0)[:, None] & (dims_v < DV)[None, :],
        other=0.0,
    )
    highest = tl.max(top, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_at + q_head).to(tl.float32) * LOG2E
        highest = tl.maximum(highest, sink)
    weight = tl.exp2(top - highest)
    whole = tl.sum(total * weight, 0)
    if HAS_SINKS:
        whole += tl.exp2(sink - highest)
    result = tl.sum(acc * weight[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    out_row = row // GROUP * (NUM_KV_HEADS * GROUP) + q_head
    tl.store(out_at + out_row * DV + dims_v, result.to(out_at.dtype.element_ty), mask=dims_v < DV)
