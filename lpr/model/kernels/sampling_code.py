"""The device code of `sampling_kernel`: one program chooses the next token of one row of logits.

Written for Triton 3.x. Limits (top-k, top-p, min-p) allow a prefix of a row's tokens in the order (score descending, id
ascending), so no sort is needed. The token with the best total of score and noise is found among all tokens. One pass
over the row sums the number and probability of the tokens before it, which decides if the limits allow it. If not, they
allow no token after it either, and the search continues among the tokens before it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lpr.model.kernels import jit

LEAST = tl.constexpr(-2147483648)  # below every score, as `_ordered` has them
LAST_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _mix32(x):
    """`lpr.model.sampling.specification._mix32`, on uint32 words."""
    x ^= x >> 17
    x *= tl.full(x.shape, 0xED5AD4BB, tl.uint32)
    x ^= x >> 11
    x *= tl.full(x.shape, 0xAC4C1B51, tl.uint32)
    x ^= x >> 15
    x *= tl.full(x.shape, 0x31848BAB, tl.uint32)
    return x ^ (x >> 14)


@triton.jit
def _minus_log1p(x):
    """-log(1 - x) for x in (0, 1), to a few ulp: the factor x / (w - 1) corrects the rounding of w = 1 - x.

    (HP-15C Advanced Functions Handbook, 1982; libdevice's log1p is not available in the interpreter.)
    """
    rest = 1.0 - x
    return tl.where(rest == 1.0, x, tl.log(rest) * tl.math.div_rn(x, tl.where(rest == 1.0, 1.0, rest - 1.0)))


@triton.jit
def _gumbel(key, tokens):
    """`lpr.model.sampling.specification.gumbel` of one key (uint32) and a block of token ids."""
    bits = _mix32(tokens.to(tl.uint32) ^ key)
    bits = _mix32(bits ^ (key * tl.full(bits.shape, 0x85EBCA6B, tl.uint32)))
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    uniform = tl.minimum(uniform, 0.999999940395355224609375)  # 1 - 2^-24
    return -tl.log(_minus_log1p(uniform))


@triton.jit
def _scores(row_at, tokens, held, temperature):
    return tl.math.div_rn(tl.load(row_at + tokens, mask=held, other=float("-inf")).to(tl.float32), temperature)


@triton.jit
def _ordered(scores):
    """Integers (int64) in the order of the scores, which are not NaN; -0 and 0 map to the same one."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _kth(row_at, temperature, k, vocabulary, DIGITS: tl.constexpr, BLOCK: tl.constexpr):
    """The k-th largest score of a row, as an `_ordered` integer, by radix selection: 8 more bits with each pass.

    The selection uses logits, whose order a temperature keeps. They differ within DIGITS digits of 8 bits: 2 in
    bfloat16, 3 in float16, 4 in float32.
    """
    bins = tl.arange(0, 256)
    known = tl.full([], 0, tl.int64)  # the first digits of the k-th logit
    for digit in tl.static_range(DIGITS):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, vocabulary, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            held = tokens < vocabulary
            order = _ordered(tl.load(row_at + tokens, mask=held, other=0.0).to(tl.float32)) - LEAST
            counted = held & ((order >> (32 - 8 * digit)) == known)
            digits = ((order >> (24 - 8 * digit)) & 255).to(tl.int32)
            others = tl.sum((counted == 0).to(tl.int32), 0)
            counts += tl.histogram(tl.where(counted, digits, 0), 256) - tl.where(bins == 0, others, 0)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # logits with this digit, or a larger one
        found = tl.sum((above >= k).to(tl.int32), 0) - 1
        k -= tl.sum(tl.where(bins > found, counts, 0), 0)
        known = (known << 8) + found
    # Digits that are not inspected are zeros in the float, which `_ordered` inverts for negative numbers.
    order = (known << (32 - 8 * DIGITS)) + LEAST
    order = tl.where(order < 0, order + ((1 << (32 - 8 * DIGITS)) - 1), order)
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.int32)
    return _ordered(tl.math.div_rn(bits.to(tl.float32, bitcast=True), temperature))


@triton.jit
def _largest(row_at, vocabulary, BLOCK: tl.constexpr):
    """The largest logit of a row, its first token, and a flag for a NaN in the row."""
    top = tl.full([], float("-inf"), tl.float32)
    first = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        held = tokens < vocabulary
        scores = tl.load(row_at + tokens, mask=held, other=float("-inf")).to(tl.float32)
        broken += tl.sum((scores != scores).to(tl.int32), 0)
        scores = tl.where(scores == scores, scores, float("-inf"))
        best = tl.max(scores, 0)
        place = tl.min(tl.where((scores == best) & held, tokens, LAST_TOKEN), 0)
        first = tl.where(best > top, place, first)
        top = tl.maximum(best, top)
    return top, first, broken


@triton.jit
def _best_before(
    row_at, temperature, key, kept, end, end_token, vocabulary, first_token, BLOCK: tl.constexpr
):  # fmt: skip
    """The best total of score and noise among the tokens before (score `end`, id `end_token`) in sorted order.

    Returns the total (-inf if there is none), its first token, and that token's score.
    """
    best = tl.full([], float("-inf"), tl.float32)
    chosen = tl.full([], 0, tl.int32)
    score = tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        held = tokens < vocabulary
        scores = _scores(row_at, tokens, held, temperature)
        order = _ordered(scores)
        left = held & (order >= kept) & ((order > end) | ((order == end) & (tokens < end_token)))
        totals = tl.where(left, scores + _gumbel(key, tokens + first_token), float("-inf"))
        here = tl.max(totals, 0)
        place = tl.min(tl.where((totals == here) & left, tokens, LAST_TOKEN), 0)
        its_score = tl.max(tl.where(tokens == place, scores, float("-inf")), 0)
        better = here > best
        chosen = tl.where(better, place, chosen)
        score = tl.where(better, its_score, score)
        best = tl.maximum(here, best)
    return best, chosen, score


@triton.jit
def _weights_before(row_at, temperature, top, kept, end, end_token, vocabulary, BLOCK: tl.constexpr):
    """Sums of exp(score - `top`): of the kept tokens before `end_token` with score `end`, and of all kept tokens."""
    before = tl.full([], 0.0, tl.float64)
    whole = tl.full([], 0.0, tl.float64)
    for start in range(0, vocabulary, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        held = tokens < vocabulary
        scores = _scores(row_at, tokens, held, temperature)
        order = _ordered(scores)
        counted = held & (order >= kept)
        weights = tl.where(counted, tl.exp(scores.to(tl.float64) - top.to(tl.float64)), 0.0)
        earlier = counted & ((order > end) | ((order == end) & (tokens < end_token)))
        whole += tl.sum(weights, 0)
        before += tl.sum(tl.where(earlier, weights, 0.0), 0)
    return before, whole


@jit(addresses=("keys_at", "key_of_at", "temperature_at", "top_k_at", "top_p_at", "min_p_at"))
def choose_rows(
    logits_at, keys_at, key_of_at, temperature_at, top_k_at, top_p_at, min_p_at, chosen_at, totals_at,
    vocabulary, row_stride, first_token, NOT_A_NUMBER: tl.constexpr, LIMITED: tl.constexpr, DIGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The chosen column of row `program_id(0)`, and its total of score and noise, NaN if there is no choice.

    At temperature 0 the choice is the first largest logit, unless all are -inf. Column 0 is token `first_token`.
    """
    row = tl.program_id(0).to(tl.int64)
    row_at = logits_at + row * row_stride
    temperature = tl.load(temperature_at + row)
    top, chosen, broken = _largest(row_at, vocabulary, BLOCK)
    total = top
    broken = tl.where(top > float("-inf"), broken, 1)
    if temperature > 0:
        top = tl.math.div_rn(top, temperature)
        finite = (top < float("inf")) & (top > float("-inf"))
        broken = tl.where(finite, broken, 1)
        key = tl.load(keys_at + tl.load(key_of_at + row)).to(tl.uint32)
        top_k = tl.full([], 0, tl.int64)
        top_p = tl.full([], 1.0, tl.float32)
        min_p = tl.full([], 0.0, tl.float32)
        kept = tl.full([], LEAST, tl.int64)  # the least score that top-k keeps
        if LIMITED:
            top_k = tl.load(top_k_at + row)
            top_p = tl.load(top_p_at + row)
            min_p = tl.load(min_p_at + row)
            if (top_k > 0) & (top_k < vocabulary) & (broken == 0):
                kept = _kth(row_at, temperature, top_k, vocabulary, DIGITS, BLOCK)
        # The end of the remaining tokens: they have a larger score, or this score and a lower id.
        end = tl.full([], LEAST, tl.int64) - 1
        end_token = tl.full([], 0, tl.int32)
        searching = broken == 0
        while searching:
            total, chosen, score = _best_before(
                row_at, temperature, key, kept, end, end_token, vocabulary, first_token, BLOCK
            )
            searching = False
            if LIMITED:
                end = _ordered(score)
                end_token = chosen
                if (top_p < 1.0) | (min_p > 0.0):
                    before, whole = _weights_before(row_at, temperature, top, kept, end, end_token, vocabulary, BLOCK)
                    weight = tl.exp(score.to(tl.float64) - top.to(tl.float64))
                    allowed = (before < top_p.to(tl.float64) * whole) | (top_p >= 1.0) | (before == 0.0)
                    allowed = allowed & (weight >= min_p.to(tl.float64))
                    searching = allowed == 0
    tl.store(totals_at + row, tl.where(broken > 0, float("nan"), total))
    tl.store(chosen_at + row, tl.where(broken > 0, NOT_A_NUMBER, chosen).to(tl.int64))
