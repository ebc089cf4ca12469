"""The device code that finds the likeliest tokens (top-k) of rows of logits, in one pass.

One program per block of tokens writes the largest logits of its block, and a second kernel chooses among these. The
logits are not copied, and a single row occupies as many multiprocessors as it has blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lpr.model.kernels.sampling_code import LAST_TOKEN


@triton.jit
def _take_largest(scores, tokens, left):
    """The largest of the scores that are `left`, the first token with it, and the remaining mask."""
    best = tl.max(tl.where(left, scores, float("-inf")), 0)
    first = tl.min(tl.where(left & (scores == best), tokens, LAST_TOKEN), 0)
    return best, first, left & (tokens != first)


@triton.jit
def _finite(top):
    """The value to subtract before exp: 0 if the largest is infinite."""
    return tl.where((top > float("-inf")) & (top < float("inf")), top, 0.0)


@triton.jit
def list_likeliest(
    logits_at, tops_at, ids_at, sums_at, vocabulary, row_stride, COUNT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The COUNT largest logits, with their tokens, of block `program_id(1)` of row `program_id(0)`; ties: first token.

    Also the sum of exp(logit - largest, if finite); NaN if the block has a NaN.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    left = tokens < vocabulary
    scores = tl.load(logits_at + row * row_stride + tokens, mask=left, other=float("-inf")).to(tl.float32)
    broken = tl.sum((scores != scores).to(tl.int32), 0)
    scores = tl.where(scores == scores, scores, float("-inf"))
    top = tl.max(scores, 0)
    total = tl.sum(tl.exp(tl.minimum(scores - _finite(top), 0.0)), 0)
    total = tl.where(top < float("inf"), total, float("inf"))
    place = row * tl.num_programs(1) + block
    tl.store(sums_at + place, tl.where(broken > 0, float("nan"), total))
    for index in range(COUNT):
        best, first, left = _take_largest(scores, tokens, left)
        tl.store(tops_at + place * COUNT + index, best)
        tl.store(ids_at + place * COUNT + index, first)


@triton.jit
def choose_likeliest(
    tops_at, ids_at, sums_at, best_at, tokens_at, total_at, num_blocks,
    COUNT: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The COUNT largest logits of row `program_id(0)` over all blocks, and the log of the sum of all weights.

    BLOCKS is `num_blocks`, and BLOCK is `num_blocks * COUNT`, each rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    left = places < num_blocks * COUNT
    scores = tl.load(tops_at + row * num_blocks * COUNT + places, mask=left, other=float("-inf"))
    tokens = tl.load(ids_at + row * num_blocks * COUNT + places, mask=left, other=LAST_TOKEN)
    blocks = tl.arange(0, BLOCKS)
    held = blocks < num_blocks
    sums = tl.load(sums_at + row * num_blocks + blocks, mask=held, other=0.0)
    tops = tl.load(tops_at + (row * num_blocks + blocks) * COUNT, mask=held, other=float("-inf"))
    top = _finite(tl.max(tops, 0))
    # A block without a finite logit has a sum of 0, infinity or NaN, which no factor may hide.
    is_finite = (tops > float("-inf")) & (tops < float("inf"))
    total = tl.sum(sums * tl.exp(tl.where(is_finite, tl.minimum(tops - top, 0.0), 0.0)), 0)
    tl.store(total_at + row, tl.where(total == 0.0, float("-inf"), tl.log(tl.where(total == 0.0, 1.0, total)) + top))
    for index in range(COUNT):
        best, first, left = _take_largest(scores, tokens, left)
        tl.store(best_at + row * COUNT + index, best)
        tl.store(tokens_at + row * COUNT + index, first)
