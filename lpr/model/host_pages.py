"""Pages of a KV cache in host memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20  # approximate size of an allocation, made when its first page is needed
NUM_TIMED = 8  # pages whose copies are timed


class HostPages:
    """K/V of swapped-out pages; for a GPU in pinned memory, so that copies are asynchronous."""

    def __init__(self, pools: Sequence[Tensor], page_size: int, slab_bytes: int = SLAB_BYTES) -> None:
        """Room for pages of `pools`, tensors [layers, rows, heads, dim] of the cache, in pieces of `slab_bytes`."""
        self._pools, self._page_size = pools, page_size
        page_bytes = sum(pool[:, :page_size].numel() * pool.element_size() for pool in pools)
        self._per_slab = max(1, slab_bytes // page_bytes)
        self._slabs: dict[int, list[Tensor]] = {}  # by number, per pool [pages, layers, rows of a page, heads, dim]

    def store(self, page: int, host_page: int) -> None:
        for pool, stored in zip(self._pools, self._stored(host_page), strict=True):
            stored.copy_(self._rows(pool, page), non_blocking=True)

    def load(self, host_page: int, page: int) -> None:
        for pool, stored in zip(self._pools, self._stored(host_page), strict=True):
            self._rows(pool, page).copy_(stored, non_blocking=True)

    def _rows(self, pool: Tensor, page: int) -> Tensor:
        return pool[:, page * self._page_size : (page + 1) * self._page_size]

    def _stored(self, host_page: int) -> list[Tensor]:
        number, place = divmod(host_page, self._per_slab)
        if number not in self._slabs:
            self._slabs[number] = [self._slab(pool) for pool in self._pools]
        return [slab[place] for slab in self._slabs[number]]

    def _slab(self, pool: Tensor) -> Tensor:
        shape = self._per_slab, len(pool), self._page_size, *pool.shape[2:]
        return torch.empty(shape, dtype=pool.dtype, pin_memory=pool.device.type == "cuda")


def swap_ms(pools: Sequence[Tensor], page_size: int) -> float:
    """Measured milliseconds to copy one of the first pages to host memory and back."""
    count, device = max(1, min(NUM_TIMED, (pools[0].shape[1] - 1) // page_size)), pools[0].device
    if device.type == "cpu":  # the cache's memory may not be populated yet
        pools = [pool.new_empty(len(pool), count * page_size, *pool.shape[2:]) for pool in pools]
    pages, took = HostPages(pools, page_size, slab_bytes=0), []
    for _ in range(3):  # the first iteration allocates
        _wait_for(device)
        began = time.perf_counter()
        for page in range(count):
            pages.store(page, page)
        for page in range(count):
            pages.load(page, page)
        _wait_for(device)
        took.append((time.perf_counter() - began) * 1e3 / count)
    return min(took)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
