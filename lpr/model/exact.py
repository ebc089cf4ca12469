"""Attention and shapes by which a step's logits are the same bits however it was drafted, batched or cut.

Rounding depends on the order of additions. Where a token stands among others must not change that order, so:

* Every matrix product has at least LEAST_HEIGHT rows. From there on a row of a product on a CPU has the same bits for
  any number of rows, wherever it stands (MKL and oneDNN take other kernels for one to three rows in float32);
  `changing_heights` asks the machine for it when a model is loaded.
* The softmax is written out over blocks of BLOCK *positions*, cut at multiples of BLOCK of the absolute position and
  added from the first block on. Blocks behind an entry, and padding, add exact zeros.
* A score is one product of two vectors, so it does not matter in which cache row a key lies: scores of tree entries are
  brought into the order of positions afterwards. Values are summed over rows, so from the block on in which the tree
  first branches, the *tail*, each entry below has its values gathered in the order of positions. All before is shared.

Attention is computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 64
"""Positions whose values are summed by one matrix product."""
LEAST_HEIGHT = 4
"""Rows of a matrix product, at least."""
_HEIGHTS = (4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 128, 255)
_MOST_LOGITS = 65
"""Heights of the output head that are asked about: no step has many more results."""


@dataclass(frozen=True)
class Tail:
    """The last n entries of a sequence, all that follow its first chain, from the block of the first branch on."""

    floor: int
    """Position at which the tail begins, a multiple of BLOCK."""
    rows: torch.Tensor
    """[n, L] int64: the cache row, within the slot, of what stands at position `floor` + i on the entry's path."""
    held: torch.Tensor
    """[n, L] bool: is there anything, up to the entry itself?"""


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
    return Tail(floor, torch.from_numpy(rows[chain:] * held), torch.from_numpy(held))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    tails: Sequence[Tail | None],
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query` [B, Hq, T, D] over `key`, `value` [B, Hk, KV, D(v)], [B, Hq, T, Dv] in `query`'s dtype.

    `mask` [B, 1, T, KV] is 0 where an entry sees a cache row; `tails` has one element per sequence. T is at least
    LEAST_HEIGHT; cache rows behind what is visible are finite.
    """
    rows = zip(query, key, value, mask, tails, strict=True)
    return torch.stack([_attend_row(q, k, v, m[0] == 0, tail, scale, softcap, sinks) for q, k, v, m, tail in rows])


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    tail: Tail | None,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence: `query` [Hq, T, D], `key`, `value` [Hk, KV, D(v)], `visible` [T, KV] bool."""
    num_heads, length, dim = query.shape
    num_kv_heads, num_kv = key.shape[:2]
    group = num_heads // num_kv_heads
    asked = query.float().reshape(num_kv_heads, group * length, dim)
    scores = (asked @ key.float().transpose(1, 2) * scale).view(num_kv_heads, group, length, num_kv)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    apart = None
    if tail is not None:
        count = len(tail.rows)
        apart = scores[:, :, -count:].gather(3, tail.rows.expand(num_kv_heads, group, -1, -1))
        apart = apart.masked_fill(~tail.held, -torch.inf)
        scores[:, :, -count:, tail.floor :] = -torch.inf
    scores = F.pad(scores, (0, -num_kv % BLOCK), value=-torch.inf)
    values = F.pad(value.float(), (0, 0, 0, -num_kv % BLOCK)).view(num_kv_heads, -1, BLOCK, value.shape[2])
    highest = scores.amax(-1, keepdim=True)
    if apart is not None:
        highest[:, :, -count:] = torch.maximum(highest[:, :, -count:], apart.amax(-1, keepdim=True))
    sink = None
    if sinks is not None:
        sink = sinks.float().view(num_kv_heads, group, 1, 1)
        highest = torch.maximum(highest, sink)
    weights = torch.exp(scores - highest).unflatten(3, (-1, BLOCK))  # [Hk, G, T, blocks, BLOCK]
    total = _sum_in_order(weights.sum(-1), 3)
    products = weights.permute(0, 3, 1, 2, 4).flatten(2, 3) @ values  # [Hk, blocks, G * T, Dv]
    out = _sum_in_order(products, 1).view(num_kv_heads, group, length, -1)
    if apart is not None and tail is not None:
        weights = torch.exp(apart - highest[:, :, -count:]).unflatten(3, (-1, BLOCK))
        total[:, :, -count:] = _sum_in_order(weights.sum(-1), 3, total[:, :, -count:])
        products = _tail_products(weights, value, tail.rows)
        out[:, :, -count:] = _sum_in_order(products, 3, out[:, :, -count:])
    if sink is not None:
        total = total + torch.exp(sink - highest)[..., 0]
    return (out / total[..., None]).reshape(num_heads, length, -1).to(query.dtype)


def _tail_products(weights: torch.Tensor, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[Hk, G, n, blocks, Dv]: of `weights` [Hk, G, n, blocks, BLOCK] with each entry's own values of `value`."""
    group = weights.shape[1]
    gathered = value[:, rows.flatten()].float()
    gathered = gathered.view(len(value), len(rows), -1, BLOCK, value.shape[2])  # [Hk, n, blocks, BLOCK, Dv]
    stacked = weights.permute(0, 2, 3, 1, 4)  # [Hk, n, blocks, G, BLOCK]
    if group < LEAST_HEIGHT:
        stacked = F.pad(stacked, (0, 0, 0, LEAST_HEIGHT - group))
    return (stacked @ gathered)[..., :group, :].permute(0, 3, 1, 2, 4)


def _sum_in_order(parts: torch.Tensor, dim: int, start: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over axis `dim`, one part after the other, so that zeros behind the last part that counts add nothing."""
    total = start
    for part in parts.unbind(dim):
        total = part if total is None else total + part
    assert total is not None
    return total


# What cannot be exact.


def refusal(model: Any, device: torch.device, own_attention: bool) -> str | None:
    """Why the logits of `model` depend on the shape of a step, as far as its class and config tell; None if not."""
    config = model.config.get_text_config(decoder=True)
    if device.type != "cpu":
        return "on a GPU it is not built yet"
    if own_attention:
        return "its attention is its own code, which adds in the order of cache rows"
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return "its experts' matrix products are as high as a step has tokens for them"
    if getattr(model, "hf_quantizer", None) is not None:
        return "its quantised matrix products are not known to be the same for every height"
    return None


def changing_heights(model: nn.Module) -> str | None:
    """The first kind of matrix product of `model` whose rows change with its height on this machine; None if none."""
    generator = torch.Generator().manual_seed(0)
    for name, weight, most in _products(model):
        rows = torch.randn(most, weight.shape[1], generator=generator).to(weight.dtype)
        whole = F.linear(rows, weight)
        for height in (each for each in _HEIGHTS if each <= most):
            first = (most - height) // 2
            if not torch.equal(F.linear(rows[first : first + height], weight), whole[first : first + height]):
                return f"{name} {tuple(weight.shape)} in {str(weight.dtype)[6:]} with {height} rows"
    return None


def _products(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
    """One weight [out, in] of every shape and type that `model` multiplies by, and the largest height of interest."""
    known = set()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, nn.Linear) or not isinstance(weight, torch.Tensor):
            continue
        if (kind := (tuple(weight.shape), weight.dtype)) not in known:
            known.add(kind)
            yield name, weight.detach(), _MOST_LOGITS if module is head else max(_HEIGHTS)
