"""Recurrent layers made to matter: as initialised they add next to nothing to logits, and a wrong one would not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def scaled(model: nn.Module, gain: float) -> Iterator[None]:
    """Multiply what layers with a convolution return by `gain`, in steps and outside of them."""

    def scale(module: Any, args: Any, output: Any) -> Any:
        return (output[0] * gain, *output[1:]) if isinstance(output, tuple) else output * gain

    owners = [module for module in model.modules() if any(isinstance(child, nn.Conv1d) for child in module.children())]
    handles = [module.register_forward_hook(scale) for module in owners]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
