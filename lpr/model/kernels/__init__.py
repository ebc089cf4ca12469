"""GPU versions of tree attention and sampling, in Triton.

The `_kernel` modules launch the device code of the `_code` modules; `hook` makes attention implementations of them.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A scope that makes the GPU of `tensor` the current one, as a launch needs; on a CPU it does nothing."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
