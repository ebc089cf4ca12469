"""Vocab-parallel sampling: each tp rank samples from its own tokens, and a few words per row are gathered.

A rank computes the noise of its own tokens only, and sends its best total of score and noise, that token, its likeliest
tokens and the sum of its weights. The best over all ranks is the token that `choice.pick` would choose from the whole
row. With top-k, top-p or min-p there are two exchanges and a GPU kernel (kernels.parts_code): first each rank's list of
tokens that could win under some limits, and its TOP_K largest scores; then, per listed token, the weight before it.
Full logits are gathered for limits on a CPU, for a larger top-k, for log-probabilities and for processors.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lpr.config import SamplingParams
from lpr.core.accept import NOT_A_NUMBER
from lpr.model.sampling.choice import TRIED, agrees, likeliest, pick_with_totals, score_steps
from lpr.model.sampling.selection import TOP_K, Selection

LENGTH = 64
"""Length of a rank's list per row. Expected are at most log(V) + 0.6 tokens (12 for 128k; a sum of independent
records). A longer list has a probability below 1e-22, and gives a row without a choice, never a wrong choice."""


def may_be_in_parts(selection: Selection, with_limits: bool = False) -> bool:
    """True if `selection` can be sampled vocab-parallel; `with_limits` if that holds for limits too."""
    if selection.processor_paths or selection.num_logprobs is not None:
        return False
    return not selection.filtered or (with_limits and not selection.is_wide)


def choose_in_part(
    logits: Tensor, selection: Selection, first: int, num_candidates: int, fixed_shapes: bool = False
) -> Tensor:
    """A rank's message: int32 [n, 2 or 3 + 2k] from its part `logits` [n, v], whose first column is token `first`.

    It has the bits of the best total (NaN: no valid choice; -inf: no token), that token, and `_likeliest`.
    """
    chosen, totals = pick_with_totals(logits, selection.from_token(first), fixed_shapes)
    if selection.sampled:
        totals = torch.where(logits.amax(-1) == -torch.inf, -torch.inf, totals)
    columns = [totals.float()[:, None].view(torch.int32), (chosen.clamp_min(0) + first)[:, None].int()]
    return torch.cat([*columns, *_likeliest(logits, first, num_candidates)], 1)


def _likeliest(logits: Tensor, first: int, num_candidates: int) -> list[Tensor]:
    """The last 1 + 2k words of a row (none if k is 0): the log of the sum of weights, k logits and their tokens."""
    if not num_candidates:
        return []
    top, tokens, sums = likeliest(logits, num_candidates)
    tokens = tokens + first
    if missing := num_candidates - top.shape[1]:  # padding with 0 columns would launch a copy
        top = torch.nn.functional.pad(top, (0, missing), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, (0, missing))
    return [sums[:, None].view(torch.int32), top.contiguous().view(torch.int32), tokens.int()]


def choose_among_parts(parts: Tensor, selection: Selection, num_candidates: int) -> tuple[Tensor, Tensor, Tensor]:
    """From int32 [ranks, n, words] of `choose_in_part`: as `choice.pick` and `choice.candidates` of whole rows.

    The tokens [n] int64, and the candidates [n, k] int64 with their scores [n, k] uint8; k can be 0.
    """
    totals, tokens = parts[..., 0].contiguous().view(torch.float32), parts[..., 1].long()
    best = totals.amax(0)
    chosen = tokens.masked_fill_(totals != best, torch.iinfo(torch.int64).max).amin(0)  # of equal ones the lowest
    broken = totals.isnan().any(0) | (best == -torch.inf)
    if selection.sampled:
        broken |= (selection.temperature > 0) & ~best.isfinite()
    return chosen.masked_fill_(broken, NOT_A_NUMBER), *_likeliest_of_all(parts[..., 2:], num_candidates)


def _likeliest_of_all(words: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """From int32 [ranks, n, 1 + 2k] of `_likeliest`: the k candidates [n, k] int64 and their scores uint8."""
    if not k:
        none = words.new_empty(words.shape[1], 0)
        return none.long(), none.to(torch.uint8)
    sums, top = (words[..., at : at + width].contiguous().view(torch.float32) for at, width in ((0, 1), (1, k)))
    top, place = _side_by_side(top).topk(k, dim=-1)
    found = _side_by_side(words[..., 1 + k :]).gather(1, place).long()
    return found, score_steps(top - sums.logsumexp(0))


def _side_by_side(parts: Tensor) -> Tensor:
    return parts.transpose(0, 1).flatten(1)


def list_in_part(logits: Tensor, selection: Selection, first: int, num_candidates: int, length: int = LENGTH) -> Tensor:
    """A rank's first message: int32 [n, 3 * length + TOP_K (+ 1 + 2k)] of its part `logits` [n, v].

    Scores, tokens and totals of `find_winners`, its largest scores by temperature, and its likeliest tokens.
    """
    listed = _kernels().find_winners(logits, selection.from_token(first), length)
    warm = selection.temperature > 0
    scaled = logits.topk(min(TOP_K, logits.shape[1]), dim=-1).values.float()
    scaled = scaled / torch.where(warm, selection.temperature, 1.0)[:, None]
    scaled = torch.nn.functional.pad(scaled, (0, TOP_K - scaled.shape[1]), value=-torch.inf)
    columns = [each.contiguous().view(torch.int32) for each in (*listed, scaled)]
    return torch.cat([*columns, *_likeliest(logits, first, num_candidates)], 1)


def weigh_in_part(logits: Tensor, selection: Selection, first: int, parts: Tensor, length: int = LENGTH) -> Tensor:
    """A rank's second message: int32 [n, 2m + 2], the bits of `weigh`'s float64 for the m listed tokens, and of all."""
    listed, kept, top = _listed(parts, selection, length)
    before, whole = _kernels().weigh(logits, selection.from_token(first), listed, kept, top)
    return torch.cat([before, whole[:, None]], 1).view(torch.int32)


def choose_within_limits(
    parts: Tensor, weights: Tensor, selection: Selection, num_candidates: int, length: int = LENGTH
) -> tuple[Tensor, Tensor, Tensor]:
    """As `choose_among_parts`, from what the ranks sent first and then, int32 [ranks, n, words] each."""
    (scores, tokens, totals), kept, top = _listed(parts, selection, length)
    sums = weights.contiguous().view(torch.float64)
    total = sums[0]
    for each in sums[1:]:  # in order: the same bits on every rank, with any backend
        total = total + each
    before, whole = total[:, :-1], total[:, -1:]
    ids = tokens.long()
    of_top = torch.where(scores == top[:, None], ids, torch.iinfo(torch.int64).max)
    top_p, min_p = selection.top_p[:, None], selection.min_p[:, None].double()
    allowed = (before < top_p.double() * whole) | (top_p >= 1) | (ids == of_top.amin(1, keepdim=True))
    allowed &= (scores >= kept[:, None]) & ((scores.double() - top[:, None].double()).exp() >= min_p)
    allowed |= selection.temperature[:, None] == 0
    broken = totals.isnan().any(1)
    totals = torch.where(allowed, totals, -torch.inf)
    best = totals.amax(1)
    chosen = torch.where(totals == best[:, None], ids, torch.iinfo(torch.int64).max).amin(1)
    broken |= (best == -torch.inf) | ((selection.temperature > 0) & ~best.isfinite())
    found = _likeliest_of_all(parts[..., 3 * length + TOP_K :], num_candidates)
    return torch.where(broken, NOT_A_NUMBER, chosen), *found


def _kernels() -> Any:
    return import_module("lpr.model.kernels.sampling_kernel")


def _listed(parts: Tensor, selection: Selection, length: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """The lists of all parts [n, m], scores, tokens and totals; the score [n] that top-k keeps, and the largest."""
    words = [_side_by_side(each) for each in parts[..., : 3 * length + TOP_K].split([length] * 3 + [TOP_K], -1)]
    scores, totals, scaled = (words[at].contiguous().view(torch.float32) for at in (0, 2, 3))
    at = (selection.top_k - 1).clamp(0, TOP_K - 1)[:, None]
    kth = scaled.topk(min(TOP_K, scaled.shape[1]), dim=-1).values.gather(1, at)[:, 0]
    kept = torch.where(selection.top_k > 0, kth, -torch.inf)
    return (scores, words[1], totals), kept, scores.amax(1)


def choose_by_parts(
    logits: Tensor,
    selection: Selection,
    first: int,
    gather: Callable[[Tensor], Tensor],
    num_candidates: int,
    fixed_shapes: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `choose_among_parts`, by all ranks that `gather` int32 [n, w] to [ranks, n, w]."""
    if not selection.filtered:
        parts = gather(choose_in_part(logits, selection, first, num_candidates, fixed_shapes))
        return choose_among_parts(parts, selection, num_candidates)
    parts = gather(list_in_part(logits, selection, first, num_candidates))
    weights = gather(weigh_in_part(logits, selection, first, parts))
    return choose_within_limits(parts, weights, selection, num_candidates)


def limits_work(device: torch.device) -> bool:
    """True if the kernels that choose with limits part by part give the specification's tokens on this device."""
    if device.type != "cuda":
        return False

    def by_two(logits: Tensor, selection: Selection) -> Tensor:
        edges = ((0, 600), (600, 1000))
        parts = torch.stack([list_in_part(logits[:, a:b], selection, a, 0) for a, b in edges])
        weights = torch.stack([weigh_in_part(logits[:, a:b], selection, a, parts) for a, b in edges])
        return choose_within_limits(parts, weights, selection, 0)[0]

    tried = (SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(temperature=1.0, top_k=40, min_p=0.01))
    return agrees(by_two, device, tried, "limits are applied to gathered logits, which is slower", TRIED[:1])
