"""The device code of `exact_kernel`: every entry's keys in the order of positions, in tiles of one size.

The instructions that add a score or a value must not depend on the tree, so one loop processes all blocks of keys:
first those that all entries of a tile share, then those of single tokens, whose results only that token's rows use.
"""

from __future__ import annotations

import triton.language as tl

from lpr.model.kernels import jit
from lpr.model.kernels.attention_code import LOG2E, NOTHING, _absorb, _rows_of


@jit(
    ("num_tokens", "num_tiles", "num_splits", "table_b"),
    ("table_at", "path_at", "shared_at", "cached_at", "entries_at", "positions_at"),
)
def attend_exactly(
    query_at, key_at, value_at, table_at, path_at, shared_at, cached_at, entries_at, positions_at,
    part_acc_at, part_top_at, part_total_at,
    scale, softcap, window, chunk, num_tokens, num_tiles, num_splits,
    query_b, query_h, query_t, key_b, key_h, key_n, value_b, value_h, value_n, table_b,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, UPCAST: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Key blocks from `split * SPLIT` on, for the heads of one group of TOKENS entries of one sequence."""
    tile = tl.program_id(0) % num_tiles
    split = tl.program_id(0) // num_tiles
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    num_cached = tl.load(cached_at + batch)
    start = num_tokens - tl.load(entries_at + batch)  # entries before it are padding

    rows = tl.arange(0, BLOCK_M)
    token = tile * TOKENS + rows // GROUP
    in_range = (rows < TOKENS * GROUP) & (token < num_tokens)
    real = in_range & (token >= start)
    q_head = head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    dims_v = tl.arange(0, BLOCK_DV)
    query = tl.load(
        (query_at + batch * query_b) + (q_head * query_h + token * query_t)[:, None] + dims[None, :],
        mask=real[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    if UPCAST:
        query = query.to(tl.float32)
    positions_at += batch * num_tokens
    position = tl.load(positions_at + token, mask=real, other=-1).to(tl.int32)
    lowest = tl.zeros([BLOCK_M], tl.int32)
    if HAS_WINDOW:
        lowest = tl.maximum(lowest, position - window + 1)
    if HAS_CHUNK:
        lowest = tl.maximum(lowest, position - position % chunk)

    # Blocks end at absolute positions that are multiples of BLOCK_N, splits at multiples of SPLIT blocks.
    end = tl.minimum((tl.max(position) + BLOCK_N) // BLOCK_N, (split + 1) * SPLIT)
    begin = tl.maximum(tl.min(tl.where(real, lowest, 2147483647)) // BLOCK_N, split * SPLIT)
    begin = tl.minimum(begin, end)
    apart_from = tl.minimum(tl.maximum(tl.load(shared_at + batch) // BLOCK_N, begin), end)
    num_common = apart_from - begin

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    lane = tl.arange(0, BLOCK_N)
    key_at += batch * key_b + head * key_h
    value_at += batch * value_b + head * value_h
    table_at += batch * table_b
    path_at += batch * num_tokens * num_tokens
    for index in range(0, num_common + (end - apart_from) * TOKENS):
        past = index - num_common  # at least 0: a block of one token, `own`
        own = tile * TOKENS + past % TOKENS
        block = tl.where(past >= 0, apart_from + past // TOKENS, begin + index)
        column = block * BLOCK_N + lane
        mine = real & ((token == own) | (past + rows * 0 < 0))
        held = column <= tl.max(tl.where(mine, position, -1))
        step = column - num_cached  # along the path; below 0: a committed token
        is_gathered = held & (step >= 0) & (past + lane * 0 >= 0)
        entry = tl.load(path_at + own * num_tokens + step, mask=is_gathered, other=0)
        row = _rows_of(table_at, tl.where(is_gathered, num_cached + entry, column), held, PAGE)
        visible = mine[:, None] & (column[None, :] <= position[:, None]) & (column[None, :] >= lowest[:, None])
        new_acc, new_top, new_total = _absorb(
            query, key_at + (row * key_n)[:, None] + dims[None, :],
            value_at + (row * value_n)[:, None] + dims_v[None, :], held, visible, acc, top, total, scale, softcap,
            D, DV, BLOCK_D, BLOCK_DV, HAS_SOFTCAP,
        )  # fmt: skip
        acc = tl.where(mine[:, None], new_acc, acc)
        top = tl.where(mine, new_top, top)
        total = tl.where(mine, new_total, total)

    part = ((batch * NUM_KV_HEADS + head) * (num_tokens * GROUP) + token * GROUP + rows % GROUP) * num_splits + split
    tl.store(part_top_at + part, top, mask=in_range)
    tl.store(part_total_at + part, total, mask=in_range)
    tl.store(part_acc_at + part[:, None] * DV + dims_v[None, :], acc, mask=in_range[:, None] & (dims_v < DV)[None, :])


@jit(("num_tokens", "num_splits"))
def add_splits(
    part_acc_at, part_top_at, part_total_at, sinks_at, out_at, num_tokens, num_splits,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the partial softmaxes of all splits in order, for BLOCK_M query rows."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    in_range = rows < num_tokens * GROUP
    q_head = head * GROUP + rows % GROUP
    part = ((batch * NUM_KV_HEADS + head) * (num_tokens * GROUP) + rows) * num_splits
    dims_v = tl.arange(0, BLOCK_DV)
    stored = in_range[:, None] & (dims_v < DV)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    top = tl.full([BLOCK_M], NOTHING, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for split in range(0, num_splits):
        its_top = tl.load(part_top_at + part + split, mask=in_range, other=NOTHING)
        its_total = tl.load(part_total_at + part + split, mask=in_range, other=0.0)
        its_acc = tl.load(part_acc_at + (part + split)[:, None] * DV + dims_v[None, :], mask=stored, other=0.0)
        highest = tl.maximum(top, its_top)
        shrink, grow = tl.exp2(top - highest), tl.exp2(its_top - highest)
        acc = acc * shrink[:, None] + its_acc * grow[:, None]
        total = total * shrink + its_total * grow
        top = highest
    if HAS_SINKS:
        sink = tl.load(sinks_at + q_head).to(tl.float32) * LOG2E
        highest = tl.maximum(top, sink)
        acc = acc * tl.exp2(top - highest)[:, None]
        total = total * tl.exp2(top - highest) + tl.exp2(sink - highest)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]  # padding has no key: 0
    out_row = (batch * num_tokens + rows // GROUP) * (NUM_KV_HEADS * GROUP) + q_head
    tl.store(out_at + out_row[:, None] * DV + dims_v[None, :], acc.to(out_at.dtype.element_ty), mask=stored)
