"""Moves of KV cache rows by a commit, in all layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from lpr.config import first_line
from lpr.model.transfer import to_device

logger = logging.getLogger(__name__)
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
    try:
        kernel: Mover = import_module("lpr.model.kernels.moves_kernel").move_rows
        pool = torch.arange(2 * 90 * 5, dtype=torch.int32, device=device).view(2, 90, 1, 5)
        expected, target = pool.clone(), torch.arange(70, device=device)
        for move, each in ((by_operators, expected), (kernel, pool)):
            move(each, target + 7, target)
        if not torch.equal(pool, expected):
            raise RuntimeError("it moved other rows")
        return kernel
    except Exception as failure:  # whatever a compiler or driver raises
        logger.warning("the kernel that moves K/V does not work here, commits take longer: %s", first_line(failure))
    return by_operators
