"""The modes of torch that a program may be in, and that would change what a step makes or computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.utils import _device

T = TypeVar("T")
_DEVICES = ("cpu", "cuda")


def autocasts() -> bool:
    """True within `torch.autocast`."""
    return any(map(torch.is_autocast_enabled, _DEVICES))


@contextmanager
def own_modes() -> Iterator[None]:
    """Leave inference mode, autocast and a default device.

    Tensors of inference mode cannot be written outside of it, and an engine lives longer than a caller's mode.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        for kind in filter(torch.is_autocast_enabled, _DEVICES):
            modes.enter_context(torch.autocast(kind, enabled=False))
        if _device.CURRENT_DEVICE is not None:
            modes.enter_context(torch.device("cpu"))
        yield


def in_own_modes(function: Callable[..., T]) -> Callable[..., T]:
    """A function that runs in `own_modes`, which are entered only where the caller's are others."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        if not (torch.is_inference_mode_enabled() or autocasts() or _device.CURRENT_DEVICE is not None):
            return function(*args, **kwargs)
        with own_modes():
            return function(*args, **kwargs)

    return call
