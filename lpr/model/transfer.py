"""Asynchronous copies from host to device: a step's one synchronisation is reading its gathered results."""

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`; on a CPU the array's own memory."""
    return _pinned(array, device).to(device, non_blocking=True)


def copy_over(target: torch.Tensor, array: np.ndarray) -> None:
    """Write `array` to `target`, a tensor of its shape and type on any device, as `to_device` would."""
    target.copy_(_pinned(array, target.device), non_blocking=True)


def _pinned(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """`array` as a tensor; for a GPU in pinned memory, which copies asynchronously and is reused after the copy."""
    host = torch.from_numpy(array)
    return host.pin_memory() if device.type == "cuda" else host


class Upload:
    """A pinned host buffer for a device tensor that is written in every step."""

    def __init__(self, target: torch.Tensor) -> None:
        """A buffer for `target`, int32 [n] on any device; on a CPU it is the target's own memory."""
        self._target = target
        kind = target.device.type
        self._host = target if kind == "cpu" else torch.empty(target.shape, dtype=target.dtype)
        if kind == "cuda":
            self._host = self._host.pin_memory()
        self._words = self._host.numpy()
        self._left = torch.cuda.Event() if kind == "cuda" else None

    def words(self, count: int) -> np.ndarray:
        """The first `count` words, to be written by the caller; waits for the previous copy to the device."""
        if self._left is not None:
            self._left.synchronize()
        return self._words[:count]

    def send(self, count: int) -> None:
        if self._host is not self._target:
            self._target[:count].copy_(self._host[:count], non_blocking=True)
        if self._left is not None:
            self._left.record(torch.cuda.current_stream(self._target.device))
