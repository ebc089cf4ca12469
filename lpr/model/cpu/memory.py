"""Zeros that the system takes from its free memory while the program goes on.

A cache of gigabytes that is written at the start delays the first answer by a second for each two or so; one that takes
its pages when they are first used makes the first prompts 1.4 times as slow.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

LEAST_BYTES = 64 << 20
"""Smaller tensors are written at once."""
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: pages are taken and their contents stay, so writers may be ahead. An older kernel
refuses it, and takes pages when they are first used."""
LONGEST_WAIT = 30.0
"""Seconds for one tensor."""
_NAME = "lpr memory"
_PIECE = 32 << 20
"""Bytes that are taken in one call. A tensor that is dropped stops its thread at the next one."""


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As torch.zeros, on the CPU."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LEAST_BYTES or sys.platform != "linux":
        return torch.zeros(*shape, dtype=dtype)
    area = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(area, dtype=dtype)
    args = (weakref.ref(area), flat.data_ptr(), num_bytes)
    threading.Thread(target=_take, args=args, name=_NAME, daemon=True).start()
    return flat.view(*shape)


def settle() -> None:
    """Wait until the pages of all tensors are taken: before that the system counts them as free."""
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join(LONGEST_WAIT)


def _take(area: weakref.ref[mmap.mmap], address: int, num_bytes: int) -> None:
    """Let the system take the pages of `area`, in order, for as long as a tensor holds it."""
    advise = ctypes.CDLL(None).madvise  # the interpreter goes on meanwhile, which mmap.madvise does not allow
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin in range(0, num_bytes, _PIECE):
        held = area()
        if held is None or advise(address + begin, min(_PIECE, num_bytes - begin), _POPULATE_WRITE):
            return
        del held
