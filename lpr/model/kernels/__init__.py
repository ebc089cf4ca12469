"""Triton kernels of tree attention, sampling, recurrent layers and elementwise operations.

The `_kernel` modules launch the device code of the `_code` modules.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any, TypeVar

import torch

from lpr.config import first_line

logger = logging.getLogger(__name__)
T = TypeVar("T")


def jit(numbers: Sequence[str] = (), addresses: Sequence[str] = ()) -> Callable[[Any], Any]:
    """`triton.jit` for a kernel whose `numbers` and `addresses` differ from step to step.

    Triton specialises on numbers that are 1 or multiples of 16 and on addresses that are multiples of 16 bytes, and
    would recompile, for a second or more, when this changes.
    """
    import triton

    return triton.jit(do_not_specialize=[*numbers], do_not_specialize_on_alignment=[*addresses])


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Context: the GPU of `tensor` is the current device, as a launch needs; no effect on a CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def working(kernel: str, check: Callable[[T], None], otherwise: T, warning: str) -> T:
    """The function `kernel`, "module.name" here, if `check` raises nothing for it; else logs why and `otherwise`."""
    module, _, name = kernel.partition(".")
    try:
        found: T = getattr(import_module(f"{__name__}.{module}"), name)
        check(found)
        return found
    except Exception as failure:  # whatever a compiler or driver raises
        logger.warning("%s: %s", warning, first_line(failure))
    return otherwise
