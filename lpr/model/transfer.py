"""Copies from host to device for which nobody waits: a step's one synchronisation is reading its gathered results."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`; on a CPU the array's own memory.

    A copy from pageable memory would wait for all work that the device has still to do. The pinned copy comes from
    torch's caching allocator, which gives its memory to nobody else before the device has read it.
    """
    host = torch.from_numpy(array)
    if device.type == "cpu":
        return host
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def copy_over(target: torch.Tensor, array: np.ndarray) -> None:
    """Write `array` to `target`, a tensor of its shape and type on any device, as `to_device` would."""
    host = torch.from_numpy(array)
    if target.device.type == "cuda":
        host = host.pin_memory()
    target.copy_(host, non_blocking=True)
