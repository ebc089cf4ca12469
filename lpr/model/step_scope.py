"""The step that a thread evaluates: how masks, attention, family shims and the cache learn of it.

Neither registry of transformers hands user arguments through to a mask function, so the step travels in a thread-local.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lpr.model.inputs import StepInputs

_local = threading.local()


@contextmanager
def step_scope(inputs: StepInputs) -> Iterator[None]:
    """Make `inputs` the current step of this thread for the duration of one forward."""
    outer = current_step()
    _local.step = inputs
    try:
        yield
    finally:
        _local.step = outer


def current_step() -> StepInputs | None:
    """The step that this thread evaluates, or None outside a step."""
    return getattr(_local, "step", None)
