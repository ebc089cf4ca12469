"""Pages of a KV cache in host memory."""

import time
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

SLAB_BYTES = 64 << 20  # largest allocation
NUM_TIMED = 8  # pages whose copies are timed


class HostPages:
    """K/V of swapped-out pages; for a GPU in pinned memory, so that copies are asynchronous.

    Slabs are allocated when their first page is needed, or by `take`, as pinning memory stalls the GPU.
    """

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

    def take(self, count: int) -> None:
        """For a GPU, allocate the slabs of the first `count` pages now."""
        for number in range(-(-count // self._per_slab) if self._pools[0].device.type == "cuda" else 0):
            self._slab(number)

    def _stored(self, host_page: int) -> list[Tensor]:
        number, place = divmod(host_page, self._per_slab)
        return [part[place] for part in self._slab(number)]

    def _slab(self, number: int) -> list[Tensor]:
        if number not in self._slabs:
            shapes = [(self._per_slab, len(pool), self._page_size, *pool.shape[2:]) for pool in self._pools]
            sizes = [prod(shape) * pool.element_size() for shape, pool in zip(shapes, self._pools, strict=True)]
            # At once: torch rounds each piece of pinned memory up to a power of two.
            whole = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._pools[0].device.type == "cuda")
            parts = zip(whole.split(sizes), shapes, self._pools, strict=True)
            self._slabs[number] = [part.view(pool.dtype).view(shape) for part, shape, pool in parts]
        return self._slabs[number]


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
