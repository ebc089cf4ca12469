"""GPU versions of tree attention, sampling, recurrent layers and what lies between matrix products, in Triton.

The `_kernel` modules launch the device code of the `_code` modules; `hook` makes attention implementations of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def jit(numbers: Sequence[str] = (), addresses: Sequence[str] = ()) -> Callable[[Any], Any]:
    """`triton.jit` for a kernel whose `numbers` and `addresses` differ from step to step.

    Triton compiles a kernel again, for a second or more, where a number becomes 1 or a multiple of 16 and an address a
    multiple of 16 bytes, or is so no longer.
    """
    import triton

    made: Callable[[Any], Any] = triton.jit(do_not_specialize=[*numbers], do_not_specialize_on_alignment=[*addresses])
    return made


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A scope that makes the GPU of `tensor` the current one, as a launch needs; on a CPU it does nothing."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
