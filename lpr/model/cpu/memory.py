"""Host memory for tensors that every step reads: weights, and the K/V cache.

Tensors are in *huge pages* of 2 MiB if the system has them: a step reads all weights, and with pages of 4 KiB its
65,000 TLB misses take a fifth of the time.

Writing a cache at the start delays the first answer by about a second per 2 GB. Leaving its pages to be faulted in at
first use makes the first prompts 1.4 times as slow. So `zeros` populates the pages in a background thread.
"""

import contextlib
import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_BYTES = 64 << 20  # smaller tensors are written at once
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14): faults pages in without changing their contents, so other threads may write
meanwhile. Older kernels reject it; pages are then faulted in at first use."""
LONGEST_WAIT = 30.0  # seconds for one tensor
_HUGE = 2 << 20  # bytes of a huge page
_BLOCK = 32 << 20  # bytes of a block that smaller tensors share
_ALIGNED = 64  # bytes of a cache line, at which tensors begin
_NAME = "lpr memory"
_PIECE = 32 << 20  # Bytes populated per call. The thread of a freed tensor stops at the next call.


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch.zeros, on the CPU."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LEAST_BYTES or sys.platform != "linux":
        return torch.zeros(*shape, dtype=dtype)
    area, flat = _area(num_bytes)
    args = (weakref.ref(area), flat.data_ptr(), num_bytes)
    threading.Thread(target=_take, args=args, name=_NAME, daemon=True).start()
    return flat.view(dtype).view(*shape)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A contiguous copy of `tensor`, which is on the CPU."""
    if sys.platform != "linux":
        return tensor.contiguous()
    place = _blocks.take(tensor.numel() * tensor.itemsize)
    return place.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def wait_for_pages() -> None:
    """Wait until the pages of all tensors are populated: until then the system counts them as free."""
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join(LONGEST_WAIT)


def _take(area: weakref.ref[mmap.mmap], address: int, num_bytes: int) -> None:
    """Populate the pages of `area`, in order, as long as a tensor holds it."""
    advise = ctypes.CDLL(None).madvise  # releases the GIL, unlike mmap.madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin in range(0, num_bytes, _PIECE):
        held = area()
        if held is None or advise(address + begin, min(_PIECE, num_bytes - begin), _POPULATE_WRITE):
            return
        del held


class _Blocks:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Allocate bytes, aligned to a cache line."""
        size = -(-num_bytes // _ALIGNED) * _ALIGNED
        with self._lock:
            if size > len(self._rest):
                _, block = _area(max(size, _BLOCK))
                if size >= _BLOCK:
                    return block[:num_bytes]
                self._rest = block
            taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken


_blocks = _Blocks()


def _area(num_bytes: int) -> tuple[mmap.mmap, Tensor]:
    """A zero tensor (uint8 [num_bytes]) in a new mapping, and the mapping, which lives as long as the tensor."""
    area = mmap.mmap(-1, num_bytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages refuses
        area.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(area, dtype=torch.uint8)
    begin = -flat.data_ptr() % _HUGE
    return area, flat[begin : begin + num_bytes]
