"""The step that a thread evaluates: how masks, attention, family shims and the cache learn of it.

Neither registry of transformers hands user arguments through to a mask function, so the step travels in a thread-local.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lpr.model.inputs import StepInputs

_local = threading.local()


class step_scope:  # noqa: N801 - used as a context manager, like torch.no_grad
    """Make `inputs` the current step of this thread for the duration of one forward."""

    def __init__(self, inputs: StepInputs) -> None:
        """Scope of one forward."""
        self.inputs = inputs

    def __enter__(self) -> None:
        self.outer = current_step()
        _local.step = self.inputs

    def __exit__(self, *_: object) -> None:
        _local.step = self.outer


def current_step() -> StepInputs | None:
    """The step that this thread evaluates, or None outside a step."""
    return getattr(_local, "step", None)
