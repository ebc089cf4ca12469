"""Amplifies recurrent layers for the self-check: as initialised they add almost nothing, which would hide errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lpr.model.recurrent.plug import key_gain


@contextmanager
def scaled(model: nn.Module, gain: float) -> Iterator[None]:
    """Context: multiply the outputs of recurrent layers, and Mamba's writes to its state, by `gain`.

    Mamba's skip connection bypasses the scan and would otherwise dominate. Applies in steps and outside of them.
    """

    def scale(module: Any, args: Any, output: Any) -> Any:
        return (output[0] * gain, *output[1:]) if isinstance(output, tuple) else output * gain

    owners = [each for each in model.modules() if any(isinstance(child, nn.Conv1d) for child in each.children())]
    handles = [module.register_forward_hook(scale) for module in owners]
    token = key_gain.set(gain)
    try:
        yield
    finally:
        key_gain.reset(token)
        for handle in handles:
            handle.remove()
