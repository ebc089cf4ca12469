"""A vocabulary in parts: each rank of a replica chooses among its own tokens, and a few words per row meet.

Where the output head is split along the vocabulary, every rank would otherwise gather the logits [n, V] of all and
choose from them: n * V values through the links, and the same search on each rank. Here a rank makes the noise of its
own tokens only and sends the best total of score and noise, its token, its few likeliest tokens and the sum of its
weights. The best of the best is what `sampling.pick` chooses from the whole row. Limits (top-k, top-p, min-p) compare a
token with all others, so rows with limits are chosen from gathered logits, as are log-probabilities and processors.
"""

from __future__ import annotations

import torch

from lpr.core.accept import NOT_A_NUMBER
from lpr.model.noise import gumbel
from lpr.model.sampling import pick, score_steps
from lpr.model.selection import Selection


def may_be_in_parts(selection: Selection) -> bool:
    """Can what `selection` asks for be chosen part by part?"""
    return not (selection.filtered or selection.processor_paths or selection.num_logprobs is not None)


def choose_in_part(
    logits: torch.Tensor, selection: Selection, first: int, num_candidates: int, fixed_shapes: bool = False
) -> torch.Tensor:
    """What a rank sends: int32 [n, 2 or 3 + 2k] of its part `logits` [n, v], whose first column is token `first`.

    The bits of the best total, its token; with k candidates the bits of the logarithm of the sum of all weights, and of
    the k largest logits, and their tokens. A total is NaN where the part has no choice, and -inf where it has no token.
    """
    scores = logits.float()
    chosen = pick(logits, selection.from_token(first), fixed_shapes)
    place = chosen.clamp_min(0)
    best = scores.gather(1, place[:, None])[:, 0]
    if selection.sampled:
        warm = selection.temperature > 0
        noise = gumbel(selection.keys[selection.key_of], place + first)
        totals = torch.where(warm, best / torch.where(warm, selection.temperature, 1.0) + noise, best)
        empty = warm & (scores.amax(-1) == -torch.inf)
    else:
        totals, empty = best, torch.zeros_like(chosen, dtype=torch.bool)
    totals = torch.where(chosen < 0, torch.nan, totals)
    columns = [torch.where(empty, -torch.inf, totals)[:, None].view(torch.int32), (place + first)[:, None].int()]
    if num_candidates:
        top, tokens = scores.topk(min(num_candidates, scores.shape[1]), dim=-1)
        missing = num_candidates - top.shape[1]
        top = torch.nn.functional.pad(top, (0, missing), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens + first, (0, missing))
        sums = scores.logsumexp(-1, keepdim=True)
        columns += [sums.view(torch.int32), top.contiguous().view(torch.int32), tokens.int()]
    return torch.cat(columns, 1)


def choose_among_parts(
    parts: torch.Tensor, selection: Selection, num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From int32 [ranks, n, words] of `choose_in_part`: as `sampling.pick` and `sampling.candidates` of whole rows.

    The tokens [n] int64, and the candidates [n, k] int64 with their scores [n, k] uint8; k can be 0.
    """
    totals, tokens = parts[..., 0].contiguous().view(torch.float32), parts[..., 1].long()
    best = totals.amax(0)
    chosen = torch.where(totals == best, tokens, torch.iinfo(torch.int64).max).amin(0)  # of equal ones the lowest
    broken = totals.isnan().any(0)
    if selection.sampled:
        broken |= (selection.temperature > 0) & ~best.isfinite()
    chosen = torch.where(broken, NOT_A_NUMBER, chosen)
    k = num_candidates
    sums, top = (parts[..., at : at + width].contiguous().view(torch.float32) for at, width in ((2, 1), (3, k)))
    flat = top.transpose(0, 1).flatten(1)
    top, place = flat.topk(k, dim=-1)
    found = parts[..., 3 + k :].transpose(0, 1).flatten(1).gather(1, place).long()
    return chosen, found, score_steps(top - sums.logsumexp(0) if k else top)
