"""Triton kernels of tree attention, sampling, recurrent layers and elementwise operations.

The `_kernel` modules launch the device code of the `_code` modules; `hook` makes attention implementations of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def jit(numbers: Sequence[str] = (), addresses: Sequence[str] = ()) -> Callable[[Any], Any]:
    """`triton.jit` for a kernel whose `numbers` and `addresses` differ from step to step.

    Triton specialises on numbers that are 1 or multiples of 16 and on addresses that are multiples of 16 bytes, and
    would recompile, for a second or more, when this changes.
    """
    import triton

    made: Callable[[Any], Any] = triton.jit(do_not_specialize=[*numbers], do_not_specialize_on_alignment=[*addresses])
    return made


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Context: the GPU of `tensor` is the current device, as a launch needs; no effect on a CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
