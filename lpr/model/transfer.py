"""Asynchronous copies from host to device: a step's one synchronisation is reading its gathered results."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`; on a CPU the array's own memory."""
    return _pinned(array, device).to(device, non_blocking=True)


def copy_over(target: torch.Tensor, array: np.ndarray) -> None:
    """Write `array` to `target`, a tensor of its shape and type on any device, as `to_device` would."""
    target.copy_(_pinned(array, target.device), non_blocking=True)


def _pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """For a GPU in pinned memory, of which a copy does not wait, and which torch reuses only when it has been read."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


class Upload:
    """Words for a tensor on the device that the host writes anew in every step, in one pinned place made once."""

    def __init__(self, target: torch.Tensor) -> None:
        """Words for `target`, int32 [n] on any device; on a CPU they are written to its own memory."""
        self._target = target
        kind = target.device.type
        self._host = target if kind == "cpu" else torch.empty(target.shape, dtype=target.dtype)
        if kind == "cuda":
            self._host = self._host.pin_memory()
        self._words = self._host.numpy()
        self._left = torch.cuda.Event() if kind == "cuda" else None

    def words(self, count: int) -> np.ndarray:
        """The first `count` words, to be written; waits until the device has read the last ones."""
        if self._left is not None:
            self._left.synchronize()
        return self._words[:count]

    def send(self, count: int) -> None:
        if self._host is not self._target:
            self._target[:count].copy_(self._host[:count], non_blocking=True)
        if self._left is not None:
            self._left.record(torch.cuda.current_stream(self._target.device))
