"""GPU versions of tree attention and sampling, in Triton.

`attention_kernel`, `exact_kernel` and `sampling_kernel` launch the device code of the `_code` modules. `hook` makes
attention implementations of transformers of them. `sampling.specification` specifies sampling.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A scope that makes the GPU of `tensor` the current one, as a launch needs; on a CPU it does nothing."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
