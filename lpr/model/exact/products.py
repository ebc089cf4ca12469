"""Attention and shapes by which a step's logits are the same bits however it was drafted, batched or cut.

Rounding depends on the order of additions. Where a token stands among others must not change that order, so:

* A row of a matrix product with the model's weights has the same bits for any number of rows, wherever it stands, from
  a height on that lpr.model.exact.check asks the machine for when a model is loaded: 4 for MKL in float32 with
  one thread and 12 with two, 1 or 2 in half precision. No step has fewer rows, and no product of attention.
* The softmax is written out over blocks of BLOCK *positions*, cut at multiples of BLOCK of the absolute position and
  added from the first block on. Blocks behind an entry, and padding, add exact zeros.
* A score is one product of two vectors, so it does not matter in which cache row a key lies: scores of tree entries are
  brought into the order of positions afterwards. Values are summed over rows, so from the block on in which the tree
  first branches, the *tail*, each entry below has its values gathered in the order of positions. All before is shared.

Attention is computed in float32 and rounded once.

This is how it is done without the extension. With it, `in_order` takes every entry by itself, five times as fast; both
keep the promise, and their bits differ from each other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

BLOCK = 64
"""Positions whose values are summed by one matrix product."""


@dataclass(frozen=True)
class Tail:
    """The last n entries of a sequence, all that follow its first chain, from the block of the first branch on."""

    floor: int
    """Position at which the tail begins, a multiple of BLOCK."""
    rows: torch.Tensor
    """[n, L] int64: the cache row, within the slot, of what stands at position `floor` + i on the entry's path."""
    held: torch.Tensor
    """[n, L] bool: is there anything, up to the entry itself?"""
    num_shared: int
    """Cache rows, a multiple of BLOCK, that hold all committed tokens and the chain."""


def find_tail(parents: Sequence[int], num_cached: int) -> Tail | None:
    """The tail of a row of entries with these `parents`; None if they are one chain."""
    count = len(parents)
    chain = 0
    while chain < count and parents[chain] == chain - 1:
        chain += 1
    if chain == count:
        return None
    below = [entry for entry in range(count) if entry < chain]  # the chain entry that each entry hangs below
    depths = list(range(chain))
    for entry in range(chain, count):
        parent = parents[entry]
        below.append(below[parent] if parent >= 0 else -1)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    branch = num_cached + min(below[chain:]) + 1
    floor = branch // BLOCK * BLOCK
    length = -(-(num_cached + max(depths) + 1 - floor) // BLOCK) * BLOCK
    rows = np.zeros((count, length), np.int64)
    committed = np.arange(floor, max(floor, num_cached))
    rows[:, : len(committed)] = committed
    for entry, (parent, depth) in enumerate(zip(parents, depths, strict=True)):
        if parent >= 0:
            rows[entry] = rows[parent]
        if num_cached + depth >= floor:
            rows[entry, num_cached + depth - floor] = num_cached + entry
    last = num_cached + np.array(depths[chain:])[:, None] - floor
    held = np.arange(length) <= last
    num_shared = -(-(num_cached + chain) // BLOCK) * BLOCK
    return Tail(floor, torch.from_numpy(rows[chain:] * held), torch.from_numpy(held), num_shared)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    floor: torch.Tensor,
    tails: Sequence[Tail | None],
    height: int,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query` [B, Hq, T, D] over `key`, `value` [B, Hk, KV, D(v)], [B, Hq, T, Dv] in `query`'s dtype.

    `floor` is `score_floor`'s; `tails` has one element per sequence. Products have at least `height` rows, as
    those of `floor` do. Cache rows behind what is visible are finite.
    """
    length, padded = query.shape[2], floor.shape[2]
    if padded > length:
        query = F.pad(query, (0, 0, padded - length, 0))
    rows = zip(query, key, value, floor, tails, strict=True)
    return torch.stack([_attend_row(*row, height, scale, softcap, sinks)[:, padded - length :] for row in rows])


def score_floor(mask: torch.Tensor, group: int, height: int) -> torch.Tensor:
    """[B, G, T, KV] float32, to be added to scores: `mask` [B, 1, T, KV], 0 where visible, as 0 and -inf.

    In front come entries that nobody reads and that see everything, where G * T would be below `height`.
    """
    length = max(mask.shape[2], -(-height // group))
    floor = torch.zeros(len(mask), group, length, mask.shape[3])
    floor[:, :, length - mask.shape[2] :].masked_fill_(mask != 0, -torch.inf)
    return floor


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    floor: torch.Tensor,
    tail: Tail | None,
    height: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence: `query` [Hq, T, D], `key`, `value` [Hk, KV, D(v)], `floor` [G, T, KV]."""
    num_heads, length, dim = query.shape
    num_kv_heads, num_kv = key.shape[:2]
    group = num_heads // num_kv_heads
    asked = (query.float() * scale).reshape(num_kv_heads, group * length, dim)
    scores = (asked @ key.float().transpose(1, 2)).view(num_kv_heads, group, length, num_kv)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores += floor
    highest = scores.amax(-1, keepdim=True)
    sink = None
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, group, 1, 1)
        highest = torch.maximum(highest, sink)
    weights = scores.sub_(highest).exp_()
    if num_kv % BLOCK:  # a padding of nothing is a copy as well
        weights = F.pad(weights, (0, -num_kv % BLOCK))
    num_shared = weights.shape[3] if tail is None else tail.num_shared
    apart = None
    if tail is not None:
        count = len(tail.rows)
        apart = weights[:, :, -count:].gather(3, tail.rows.expand(num_kv_heads, group, -1, -1)) * tail.held
        weights[:, :, -count:, tail.floor : num_shared] = 0
    shared = weights[..., :num_shared].unflatten(3, (-1, BLOCK))  # [Hk, G, T, blocks, BLOCK]
    values = value[:, :num_shared].float()
    if num_shared > values.shape[1]:
        values = F.pad(values, (0, 0, 0, num_shared - values.shape[1]))
    values = values.reshape(num_kv_heads, -1, BLOCK, value.shape[2])
    total = _sum_in_order(shared.sum(-1), 3)
    products = shared.permute(0, 3, 1, 2, 4).flatten(2, 3) @ values  # [Hk, blocks, G * T, Dv]
    out = _sum_in_order(products, 1).view(num_kv_heads, group, length, -1)
    if apart is not None and tail is not None:
        apart = apart.unflatten(3, (-1, BLOCK))
        total[:, :, -count:] = _sum_in_order(apart.sum(-1), 3, total[:, :, -count:])
        out[:, :, -count:] = _sum_in_order(_tail_products(apart, value, tail.rows, height), 3, out[:, :, -count:])
    if sink is not None:
        total = total + torch.exp(sink - highest)[..., 0]
    return (out / total[..., None]).reshape(num_heads, length, -1).to(query.dtype)


def _tail_products(weights: torch.Tensor, value: torch.Tensor, rows: torch.Tensor, height: int) -> torch.Tensor:
    """[Hk, G, n, blocks, Dv]: of `weights` [Hk, G, n, blocks, BLOCK] with each entry's own values of `value`."""
    group = weights.shape[1]
    by_row = value.transpose(0, 1).index_select(0, rows.flatten())  # [n * L, Hk, Dv]
    by_head = by_row.view(len(rows), -1, BLOCK, *by_row.shape[1:]).permute(3, 0, 1, 2, 4)
    gathered = by_head.to(torch.float32, memory_format=torch.contiguous_format)  # [Hk, n, blocks, BLOCK, Dv]
    stacked = weights.permute(0, 2, 3, 1, 4)  # [Hk, n, blocks, G, BLOCK]
    if group < height:
        stacked = F.pad(stacked, (0, 0, 0, height - group))
    return (stacked @ gathered)[..., :group, :].permute(0, 3, 1, 2, 4)


def _sum_in_order(parts: torch.Tensor, dim: int, start: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over axis `dim`, one part after the other, so that zeros behind the last part that counts add nothing."""
    total = start
    for part in parts.unbind(dim):
        total = part if total is None else total + part
    assert total is not None
    return total
