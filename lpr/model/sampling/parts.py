"""Vocab-parallel sampling: each tp rank samples from its own tokens, and a few words per row are gathered.

A rank computes the noise of its own tokens only, and sends its best total of score and noise, that token, its likeliest
tokens and the sum of its weights. The best over all ranks is the token that `choice.pick` would choose from the whole
row. Full logits are gathered for top-k, top-p and min-p, for log-probabilities and for processors.
"""

import torch
from torch import Tensor

from lpr.core.accept import NOT_A_NUMBER
from lpr.model.sampling.choice import likeliest, pick_with_totals, score_steps
from lpr.model.sampling.selection import Selection


def may_be_in_parts(selection: Selection) -> bool:
    return not (selection.processor_paths or selection.filtered) and selection.num_logprobs is None


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
