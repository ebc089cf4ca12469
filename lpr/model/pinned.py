"""Matrix products of one fixed height: what exact mode asks of a GPU, whose libraries take a kernel by the shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from lpr.model.attention import current_step

HEIGHT = 64
"""Rows of every product. A GPU reads weights for about as long as it multiplies 64 rows by them."""


def pin_heights(model: nn.Module) -> None:
    """Let `model` multiply HEIGHT rows at a time by its weights, in steps; outside of steps nothing changes."""
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(module.forward, partial):
            module.forward = partial(_in_pieces, module.forward)  # type: ignore[method-assign]


def _in_pieces(multiply: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """`multiply` of `states` [..., D], HEIGHT rows by HEIGHT rows."""
    rows = states.flatten(0, -2)
    if current_step() is None or len(rows) == HEIGHT:
        return multiply(states)
    padded = F.pad(rows, (0, 0, 0, -len(rows) % HEIGHT))
    found = torch.cat([multiply(piece) for piece in padded.split(HEIGHT)])[: len(rows)]
    return found.unflatten(0, states.shape[:-1])
