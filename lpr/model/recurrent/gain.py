"""Recurrent layers made to matter: as initialised they add next to nothing, and a wrong one would not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lpr.model.recurrent.plug import key_gain


@contextmanager
def scaled(model: nn.Module, gain: float) -> Iterator[None]:
    """Multiply what recurrent layers return by `gain`, and what Mamba's write, in steps and outside of them.

    Mamba passes its inputs on beside the scan, and may write so little that only these matter.
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
