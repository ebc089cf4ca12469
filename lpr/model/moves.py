"""Moves of KV cache rows by a commit, in all layers."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from lpr.model.kernels import working
from lpr.model.transfer import to_device

Mover = Callable[[Tensor, Tensor, Tensor], None]


def move_rows(pools: Sequence[Tensor], rows: np.ndarray) -> None:
    """Copy the rows `rows[0]` to `rows[1]` (int64 [2, n]) in every layer of `pools` [layers, rows, heads, dim].

    A move may write a row that an earlier one reads, but none that a later one reads.
    """
    device = pools[0].device
    source, target = to_device(rows, device)
    move = gpu_mover(device) if device.type == "cuda" else by_operators
    for pool in pools:
        move(pool, source, target)


def by_operators(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy the rows `source` [n] of a pool to `target` [n], in every layer; all are read first."""
    pool.index_copy_(1, target, pool.index_select(1, source))


@lru_cache
def gpu_mover(device: torch.device) -> Mover:
    """The function that moves rows on a GPU: the kernel, if it works here; the first call compiles and tries it."""

    def check(move: Mover) -> None:
        pool = torch.arange(2 * 90 * 5, dtype=torch.int32, device=device).view(2, 90, 1, 5)
        expected, target = pool.clone(), torch.arange(70, device=device)
        by_operators(expected, target + 7, target)
        move(pool, target + 7, target)
        if not torch.equal(pool, expected):
            raise RuntimeError("it moved other rows")

    warning = "the kernel that moves K/V does not work here, commits take longer"
    return working("moves_kernel.move_rows", check, by_operators, warning)
