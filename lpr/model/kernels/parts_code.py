"""The device code of vocab-parallel sampling with top-k, top-p and min-p.

Limits allow a prefix of a row's tokens in sorted order, as in `sampling_code`. The best token of a prefix is also the
best of its own rank's part of the prefix. So each rank lists the best token of every prefix of its part, about log(V)
tokens, and the choice is in one of the lists. Then each rank sums the weights of its tokens before each listed one, and
the sums decide which listed tokens the limits allow.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lpr.model.kernels.sampling_code import LEAST, _best_before, _largest, _ordered, _weights_before


@triton.jit
def list_winners(
    logits_at, keys_at, key_of_at, temperature_at, scores_at, tokens_at, totals_at, vocabulary, row_stride,
    first_token, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The list of row `program_id(0)`; for temperature 0 its first largest logit."""
    row = tl.program_id(0).to(tl.int64)
    row_at = logits_at + row * row_stride
    temperature = tl.load(temperature_at + row)
    top, first, broken = _largest(row_at, vocabulary, BLOCK)
    place_at = row * LENGTH
    if temperature > 0:
        broken = tl.where(top < float("inf"), broken, 1)  # a part of -inf alone has nothing, and others may
        key = tl.load(keys_at + tl.load(key_of_at + row)).to(tl.uint32)
        kept = tl.full([], LEAST, tl.int64)
        end = tl.full([], LEAST, tl.int64) - 1
        end_token = tl.full([], 0, tl.int32)
        left = LENGTH + 1
        while left > 0:
            total, token, score = _best_before(
                row_at, temperature, key, kept, end, end_token, vocabulary, first_token, BLOCK
            )
            end = _ordered(score)
            end_token = token
            if total > float("-inf"):
                left -= 1
                if left > 0:
                    at = place_at + LENGTH - left
                    tl.store(scores_at + at, score)
                    tl.store(tokens_at + at, token + first_token)
                    tl.store(totals_at + at, total)
                else:
                    broken = 1
            else:
                left = 0
    else:
        tl.store(scores_at + place_at, top)
        tl.store(tokens_at + place_at, first + first_token)
        tl.store(totals_at + place_at, top)
    if broken > 0:
        tl.store(totals_at + place_at, float("nan"))


@triton.jit
def weigh_prefixes(
    logits_at, temperature_at, scores_at, tokens_at, totals_at, kept_at, top_at, before_at, whole_at, vocabulary,
    row_stride, first_token, BLOCK: tl.constexpr,
):  # fmt: skip
    """This part's weight before listed token `program_id(1)` of row `program_id(0)`, and the part's total weight."""
    row = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1)
    at = row * tl.num_programs(1) + element
    row_at = logits_at + row * row_stride
    temperature = tl.load(temperature_at + row)
    listed = tl.load(totals_at + at) > float("-inf")
    if (temperature > 0) & (listed | (element == 0)):
        end = _ordered(tl.load(scores_at + at))
        end_token = tl.load(tokens_at + at) - first_token
        kept = _ordered(tl.load(kept_at + row))
        top = tl.load(top_at + row)
        before, whole = _weights_before(row_at, temperature, top, kept, end, end_token, vocabulary, BLOCK)
        tl.store(before_at + at, before)
        if element == 0:
            tl.store(whole_at + row, whole)
