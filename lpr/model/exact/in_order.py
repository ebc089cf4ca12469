"""Exact attention on a CPU in C++ (native/attention.h): every entry by itself, over its path in the order of positions.

No matrix product takes part, so nothing depends on how many entries a step has: an entry's scores, the sum of its
weights and its values are added lane by lane in one order that its path alone decides. With vectors of the machine's
own width that takes about as long as PyTorch's attention, which adds as its blocks happen to fall.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from lpr import native
from lpr.model.threads import share_out


@dataclass(frozen=True)
class Paths:
    """Of each entry of a sequence, the cache rows that it sees, in the order of positions."""

    rows: np.ndarray
    """int32: of all entries, one after the other."""
    starts: np.ndarray
    """int32 [T + 1]: where those of an entry begin."""


def attends(device: torch.device) -> bool:
    """Is the extension there, for a model on `device`?"""
    return native.attend_in_order is not None and device.type == "cpu"


def find_paths(mask: torch.Tensor) -> Paths:
    """By `mask` [T, KV], 0 where an entry sees a cache row.

    Along a path rows ascend: a node is evaluated behind its parent, and both behind what is committed.
    """
    visible = (mask == 0).numpy()
    starts = np.zeros(len(visible) + 1, np.int32)
    np.cumsum(visible.sum(1), out=starts[1:])
    return Paths(np.nonzero(visible)[1].astype(np.int32), starts)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    paths: Sequence[Paths],
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `query` [B, Hq, T, D] over `key`, `value` [B, Hk, KV, D(v)], [B, Hq, T, Dv] in `query`'s dtype.

    `paths` has one element per sequence. Computed in float32 and rounded once; an entry that sees nothing gets zeros.
    """
    batch, num_heads, length, _ = query.shape
    asked, out = (query.float() * scale).numpy(), torch.empty(batch, num_heads, length, value.shape[-1])
    own_sinks = None if sinks is None else sinks.float().contiguous().numpy()
    for row, path in enumerate(paths):
        states = asked[row], _wide(key[row]), _wide(value[row])
        share_out(partial(_attend_heads, *states, path, softcap or 0.0, own_sinks, out[row].numpy()), key.shape[1])
    return out.to(query.dtype)


def _attend_heads(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    path: Paths,
    softcap: float,
    sinks: np.ndarray | None,
    out: np.ndarray,
    heads: slice,
) -> None:
    """Write the part of `out` [Hq, T, Dv] that the `heads` of K and V answer."""
    assert native.attend_in_order is not None
    group = len(query) // len(key)
    own = slice(heads.start * group, heads.stop * group)
    extra = None if sinks is None else sinks[own]
    native.attend_in_order(query[own], key[heads], value[heads], path.rows, path.starts, softcap, extra, out[own])


def _wide(states: torch.Tensor) -> np.ndarray:
    """`states` in float32, the values of a row beside each other."""
    wide = states.float()
    return (wide if wide.stride(-1) == 1 else wide.contiguous()).numpy()
