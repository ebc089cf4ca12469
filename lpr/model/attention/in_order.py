"""Exact attention on a CPU: each entry alone, over its path in the order of positions, without matrix products.

Without the C++ extension (native/attention.h) the slow `_attend_entry` is used; its bits differ from those of C++.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from lpr import native
from lpr.model.threads import share_out


@dataclass(frozen=True)
class Paths:
    """Per entry of a sequence, the visible cache rows in the order of positions."""

    rows: np.ndarray  # int32: the cache rows of all entries, concatenated
    starts: np.ndarray  # int32 [T + 1]: offset of each entry's rows in `rows`


def find_paths(mask: Tensor) -> Paths:
    """The paths of a `mask` [T, KV] that is 0 where an entry sees a cache row.

    Rows ascend along a path: committed tokens come first, and a node comes after its parent.
    """
    visible = (mask == 0).numpy()
    starts = np.zeros(len(visible) + 1, np.int32)
    np.cumsum(visible.sum(1), out=starts[1:])
    return Paths(np.nonzero(visible)[1].astype(np.int32), starts)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    paths: Sequence[Paths],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of `query` [B, Hq, T, D] over `key`, `value` [B, Hk, KV, D(v)], [B, Hq, T, Dv] in `query`'s dtype.

    `paths` has one element per sequence. Computed in float32 and rounded once; an entry that sees nothing gets zeros.
    """
    asked = query.float() * scale
    out = torch.zeros(*query.shape[:3], value.shape[-1])
    own_sinks = None if sinks is None else sinks.float().contiguous()
    for row, path in enumerate(paths):
        states = asked[row], _wide(key[row]), _wide(value[row])
        if native.attend_in_order is None:
            for entry, (start, end) in enumerate(zip(path.starts[:-1], path.starts[1:], strict=True)):
                if end > start:
                    out[row, :, entry] = _attend_entry(entry, *states, path.rows[start:end], softcap, own_sinks)
            continue
        arrays = [each.numpy() for each in states]
        extra = None if own_sinks is None else own_sinks.numpy()
        share_out(partial(_attend_heads, arrays, path, softcap or 0.0, extra, out[row].numpy()), key.shape[1])
    return out.to(query.dtype)


def _attend_heads(
    states: Sequence[np.ndarray], path: Paths, softcap: float, sinks: np.ndarray | None, out: np.ndarray, heads: slice
) -> None:
    assert native.attend_in_order is not None
    query, key, value = states
    group = len(query) // len(key)
    own = slice(heads.start * group, heads.stop * group)
    extra = None if sinks is None else sinks[own]
    native.attend_in_order(query[own], key[heads], value[heads], path.rows, path.starts, softcap, extra, out[own])


def _attend_entry(
    entry: int, query: Tensor, key: Tensor, value: Tensor, rows: np.ndarray, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """[Hq, Dv] for one entry of `query` [Hq, T, D]. The operators' shapes depend only on the length of its path."""
    path = torch.from_numpy(rows)
    keys, values = key[:, path][:, None], value[:, path][:, None]
    scores = (query[:, entry].reshape(len(key), -1, 1, query.shape[2]) * keys).sum(-1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    highest = scores.amax(-1, keepdim=True)
    if sinks is not None:
        highest = torch.maximum(highest, sinks.view(*scores.shape[:2], 1))
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.view(*scores.shape[:2], 1) - highest)
    return ((weights[..., None] * values).sum(2) / total).flatten(0, 1)


def _wide(states: Tensor) -> Tensor:
    wide = states.float()
    return wide if wide.stride(-1) == 1 else wide.contiguous()
