"""torch modes of the caller that would change a step's tensors or results."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext

T = TypeVar("T")
_DEVICES = ("cpu", "cuda")


def autocasts() -> bool:
    return any(map(torch.is_autocast_enabled, _DEVICES))


@contextmanager
def own_modes() -> Iterator[None]:
    """Context without inference mode, autocast and a default device.

    Tensors made in inference mode cannot be written outside of it, and an engine outlives the caller's mode.
    """
    with ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        for kind in filter(torch.is_autocast_enabled, _DEVICES):
            modes.enter_context(torch.autocast(kind, enabled=False))
        modes.enter_context(_without_default_device())
        yield


@contextmanager
def _without_default_device() -> Iterator[None]:
    """Context without `torch.device` contexts: the outermost one would override one entered here."""
    found = _exchange([])
    _exchange([mode for mode in found if not isinstance(mode, DeviceContext)])
    try:
        yield
    finally:
        _exchange(found)


def _exchange(modes: list[Any]) -> list[Any]:
    """Replace this thread's function modes by `modes`, the outermost first; returns the previous ones."""
    before = [_pop_mode() for _ in range(_len_torch_function_stack())][::-1]
    for mode in modes:
        _push_mode(mode)
    return before


def in_own_modes(function: Callable[..., T]) -> Callable[..., T]:
    """Decorator: runs the function in `own_modes`, if the caller's modes differ."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> T:
        if not (torch.is_inference_mode_enabled() or autocasts() or _len_torch_function_stack()):
            return function(*args, **kwargs)
        with own_modes():
            return function(*args, **kwargs)

    return call
