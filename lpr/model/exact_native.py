"""Exact attention on a CPU in C++ (native/attention.h): every entry by itself, over its path in the order of positions.

No matrix product takes part, so nothing depends on how many entries a step has: an entry's scores, the sum of its
weights and its values are added lane by lane in one order that its path alone decides. With vectors of the machine's
own width that takes about as long as PyTorch's attention, which adds as its blocks happen to fall.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np
import torch

from lpr import native


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
    asked = (query.float() * scale).numpy()
    out = torch.empty(batch, num_heads, length, value.shape[-1])
    found, cap = out.numpy(), softcap or 0.0
    own_sinks = None if sinks is None else sinks.float().contiguous().numpy()
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    count = min(torch.get_num_threads(), num_kv_heads)
    edges = [num_kv_heads * part // count for part in range(count + 1)]
    for row, path in enumerate(paths):
        keys, values = _wide(key[row]), _wide(value[row])

        def work(begin: int, end: int, row: int, path: Paths, keys: np.ndarray, values: np.ndarray) -> None:
            heads = slice(begin * group, end * group)
            extra = None if own_sinks is None else own_sinks[heads]
            parts = asked[row, heads], keys[begin:end], values[begin:end]
            _attend_in_order()(*parts, path.rows, path.starts, cap, extra, found[row, heads])

        each = partial(work, row=row, path=path, keys=keys, values=values)
        if count < 2:
            each(0, num_kv_heads)
        else:
            list(_threads(count).map(each, edges[:-1], edges[1:]))
    return out.to(query.dtype)


def _wide(states: torch.Tensor) -> np.ndarray:
    """`states` in float32, the values of a row beside each other."""
    wide = states.float()
    return (wide if wide.stride(-1) == 1 else wide.contiguous()).numpy()


@lru_cache(maxsize=1)
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, thread_name_prefix="lpr-attention")


def _attend_in_order() -> Callable[..., None]:
    assert native.attend_in_order is not None
    return native.attend_in_order
