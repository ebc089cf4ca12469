"""Tree attention in plain PyTorch: the specification of the GPU kernels."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from lpr.model.kernels.attention_kernel import Pages, Rules
from lpr.model.tree_mask import TreeMask


def dense(states: torch.Tensor, pages: Pages | None) -> torch.Tensor:
    """K or V [B, Hk, KV, D] of all rows of a cache [1, Hk, rows, D], by the pages of each row of a batch."""
    if pages is None or not pages.size:
        return states
    places = torch.arange(pages.num_kv, device=states.device)
    rows = pages.table[:, places // pages.size].long() * pages.size + places % pages.size
    return states[0][:, rows].transpose(0, 1)


def in_pages(
    key: torch.Tensor, value: torch.Tensor, size: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, Pages]:
    """All rows of a cache whose pages hold K and V [B, Hk, KV, D] in a random order, and the tables."""
    batch, _, num_kv, _ = key.shape
    per_row = -(-num_kv // size)
    order = torch.randperm(batch * per_row + 3, generator=torch.Generator().manual_seed(seed))[: batch * per_row]
    pages = Pages(order.view(batch, per_row).to(torch.int32).to(key.device), size, num_kv)
    pools = []
    for states in (key, value):
        pool = states.new_full((1, states.shape[1], (batch * per_row + 3) * size, states.shape[3]), torch.nan)
        for row in range(batch):
            places = torch.arange(num_kv)
            rows = (order.view(batch, per_row)[row, places // size] * size + places % size).to(key.device)
            pool[0][:, rows] = states[row]
        pools.append(pool)
    return pools[0], pools[1], pages


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: TreeMask,
    pages: Pages | None = None,
    **rules: Any,
) -> torch.Tensor:
    """Attention of `query` [B, Hq, T, D] over `key`, `value` [B, Hk, KV, D(v)], or by `pages`; returns [B, Hq, T, Dv].

    An entry attends to the committed tokens, its ancestors and itself, by `rules` (Rules); the other rows of the cache
    are not read. Padding entries return 0.
    """
    if mask.starts is not None:  # each packed sequence by itself
        assert pages is not None and mask.slots is not None
        parts = []
        for index, (begin, end) in enumerate(itertools.pairwise(mask.starts.tolist())):
            if begin == end:
                continue
            tables = pages._replace(table=pages.table[mask.slots[index]][None])
            of_one = mask.num_cached[index : index + 1], mask.num_entries[index : index + 1]
            one = TreeMask(mask.bits[:, begin:end], *of_one, mask.positions[:, begin:end])
            parts.append(tree_attention(query[:, :, begin:end], key, value, one, tables, **rules))
        return torch.cat(parts, 2)
    sinks, window, chunk, softcap, scale = Rules(**rules)
    key, value = dense(key, pages), dense(value, pages)
    num_kv = key.shape[2]
    group = query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scale is None else scale
    visible = mask.visible(num_kv)
    asked, held = mask.positions[:, :, None], mask.kv_positions(num_kv)[:, None]
    if window is not None:
        visible = visible & (held > asked - window)
    if chunk is not None:
        visible = visible & (held // chunk == asked // chunk)
    keys, values = (each.float().repeat_interleave(group, 1) for each in (key, value))
    scores = query.float() @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    if sinks is not None:
        sink = sinks.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    # A padding entry has no key: its probabilities are NaN (without a sink) and become 0.
    probs = torch.softmax(scores, -1)[..., :num_kv].masked_fill(~visible[:, None], 0.0)
    return (probs @ values).to(query.dtype)


def exact_tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: TreeMask,
    pages: Pages | None = None,
    block: int = 64,
    split: int = 8,
    **rules: Any,
) -> torch.Tensor:
    """As `tree_attention`, with the order of sums that exact mode has on a GPU, whatever the tree.

    An entry's keys stand in the order of positions. A running softmax takes `block` positions at a time, cut at
    multiples of it of the absolute position; after `split` blocks a new one begins; these are added in order.
    """
    sinks, window, chunk, softcap, scale = Rules(**rules)
    key, value = dense(key, pages), dense(value, pages)
    batch, num_heads, _, dim = query.shape
    group, num_kv_heads = num_heads // key.shape[1], key.shape[1]
    visible = mask.visible(key.shape[2])
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    for row in range(batch):
        for entry in range(query.shape[2] - int(mask.num_entries[row]), query.shape[2]):
            rows = visible[row, entry].nonzero()[:, 0]  # ascending, which is the order of positions along a path
            last = len(rows) - 1
            place = torch.arange(len(rows), device=rows.device)
            seen = torch.ones_like(rows, dtype=torch.bool)
            seen &= place > last - window if window is not None else True
            seen &= place // chunk == last // chunk if chunk is not None else True
            asked = query[row, :, entry].float().view(num_kv_heads, group, 1, dim)
            scores = (asked * key[row, :, rows].float()[:, None]).sum(-1) * (dim**-0.5 if scale is None else scale)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            scores = scores.masked_fill(~seen, -torch.inf)
            sink = None if sinks is None else sinks.float().view(num_kv_heads, group, 1)
            found = _running_softmax(scores, value[row, :, rows].float()[:, None], sink, block, split)
            out[row, :, entry] = found.reshape(num_heads, -1).to(query.dtype)
    return out


def _running_softmax(
    scores: torch.Tensor, values: torch.Tensor, sink: torch.Tensor | None, block: int, split: int
) -> torch.Tensor:
    """[Hk, G, Dv] of `scores` [Hk, G, L] and `values` [Hk, 1, L, Dv] in the order of positions."""
    short = -scores.shape[2] % block
    scores = torch.nn.functional.pad(scores, (0, short), value=-torch.inf)
    values = torch.nn.functional.pad(values, (0, 0, 0, short))
    whole: list[torch.Tensor] = []  # top, total and sum of values over the splits so far
    for start in range(0, scores.shape[2], block * split):
        top = torch.full_like(scores[..., :1], -1e30)
        total, acc = torch.zeros_like(top), torch.zeros(*scores.shape[:2], values.shape[3])
        for at in range(start, min(start + block * split, scores.shape[2]), block):
            its_scores, its_values = scores[..., at : at + block], values[:, :, at : at + block]
            highest = torch.maximum(top, its_scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(its_scores - highest), torch.exp(top - highest)
            acc = acc * shrink + (weights[..., None] * its_values).sum(2)
            total, top = total * shrink + weights.sum(-1, keepdim=True), highest
        if whole:
            highest = torch.maximum(whole[0], top)
            before, now = torch.exp(whole[0] - highest), torch.exp(top - highest)
            whole = [highest, whole[1] * before + total * now, whole[2] * before + acc * now]
        else:
            whole = [top, total, acc]
    top, total, acc = whole
    if sink is not None:
        highest = torch.maximum(top, sink)
        acc = acc * torch.exp(top - highest)
        total = total * torch.exp(top - highest) + torch.exp(sink - highest)
    return acc / total
