"""The specification of sampling, in operators of fixed shapes: for devices without a kernel, and for tests.

Its noise is a pure function of (seed, position, token id), from the same integers on every device.
"""

import torch

from lpr.core.accept import NOT_A_NUMBER
from lpr.core.noise_keys import MASK32, ROUNDS
from lpr.model.sampling.selection import Selection


def pick(logits: torch.Tensor, selection: Selection) -> torch.Tensor:
    """The argmax [n] int64 of logits [n, V] after temperature, limits and noise; NOT_A_NUMBER if there is none."""
    return choose(logits, selection)[0]


def choose(logits: torch.Tensor, selection: Selection) -> tuple[torch.Tensor, torch.Tensor]:
    """As `pick`, and the totals [n] of score and noise of the chosen tokens, NaN if there is no choice.

    It uses few kernels, because it runs in every step: masks are filled in place, and scores keep their dtype.
    """
    if not selection.sampled:
        best = logits.max(-1)  # unlike argmax it also returns a NaN, at the same cost
        return torch.where(best.values > -torch.inf, best.indices, NOT_A_NUMBER), best.values
    scores = logits.float()
    broken = scores.amax(-1).isnan()
    warm = selection.temperature[:, None] > 0
    scaled = scores / torch.where(warm, selection.temperature[:, None], torch.ones_like(scores[:, :1]))
    if selection.filtered:
        scaled = limit(scaled, selection)
    tokens = torch.arange(scores.shape[1], device=scores.device) + selection.first_token
    noise = gumbel(selection.keys[:, None], tokens[None])
    best = torch.where(warm, scaled + noise[selection.key_of], scores).max(-1)
    broken |= (best.values == -torch.inf) | (warm[:, 0] & ~best.values.isfinite())
    return torch.where(broken, NOT_A_NUMBER, best.indices), torch.where(broken, torch.nan, best.values)


def likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each row (all if fewer): values and tokens [n, k], and the logsumexp [n]."""
    scores = logits.float()
    top, tokens = scores.topk(min(count, scores.shape[1]), dim=-1)
    return top, tokens, scores.logsumexp(-1)


def limit(scaled: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Apply top-k, then top-p, then min-p to tempered logits [n, V], in transformers' order; excluded: -inf.

    Ties with the k-th score are kept. Among equal scores, top-p counts the lowest ids first. Probabilities are float64:
    in float32 the sum over a vocabulary of 262k has a relative error of 1e-4, which depends on the order.
    """
    ordered, index = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)[None]
    top_k = torch.where(selection.top_k > 0, selection.top_k, scaled.shape[1])[:, None]
    kth = ordered.gather(1, (top_k - 1).clamp_max(scaled.shape[1] - 1))
    keep = ordered >= kth
    probs = torch.softmax(ordered.double().masked_fill(~keep, float("-inf")), -1)
    before = probs.cumsum(-1) - probs
    # Rounding may make the sum exceed 1, which must not cut a row without a limit.
    keep &= (before < selection.top_p[:, None]) | (selection.top_p[:, None] >= 1) | (rank == 0)
    probs = torch.softmax(ordered.double().masked_fill(~keep, float("-inf")), -1)
    keep &= probs >= selection.min_p[:, None] * probs[:, :1]
    allowed = torch.zeros_like(keep).scatter(1, index, keep)
    return scaled.masked_fill(~allowed, float("-inf"))


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """`mix32` of 32-bit values held in int64: a product that wraps keeps its low 32 bits."""
    for shift, multiplier in ROUNDS:
        x = x ^ (x >> shift)
        x = (x * multiplier) & MASK32
    return x ^ (x >> 14)


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, for int64 `keys` and token ids that broadcast against each other.

    Two hash rounds with the key folded in between decorrelate neighbouring keys. log1p keeps the small values of the
    exponential, which decide the maximum, exact in float32.
    """
    bits = _mix32(_mix32(tokens ^ keys) ^ ((keys * 0x85EBCA6B) & MASK32))
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_max(1.0 - 2.0**-24)))
