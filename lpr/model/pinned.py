"""Exact mode's matrix products, at heights (rows) that agree: a library chooses its kernel by the shape.

All products on a GPU have one height. On a CPU lpr.model.exact.check finds the heights: with AVX2 a float32 row has the
same bits in any product of four rows or more, with AMX a bfloat16 row in those of one to 32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from lpr.model.exact.check import MOST_LOGITS
from lpr.model.step_scope import current_step

HEIGHT = 64
"""Rows of every product on a GPU, which reads weights for about as long as it multiplies 64 rows by them."""


def pin_heights(model: nn.Module) -> None:
    """Make `model` multiply by its weights at the heights of a step in exact mode; otherwise nothing changes."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D) and not isinstance(module.forward, partial):
            limit = MOST_LOGITS if module is head else None
            module.forward = partial(_in_pieces, module.forward, limit=limit)  # type: ignore[method-assign]


def _in_pieces(
    multiply: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, limit: int | None = None
) -> torch.Tensor:
    """`multiply` of `states` [..., D], in pieces of as many rows as agree, and of `limit` at most."""
    step, count = current_step(), states.shape[:-1].numel()
    if step is None or step.heights is None:
        return multiply(states)
    fewest, most = step.heights.fewest, min(step.heights.most, limit or step.heights.most)
    if fewest <= count <= most:
        return multiply(states)
    pieces = list(states.flatten(0, -2).split(most))
    if len(pieces[-1]) < fewest:
        pieces[-1] = F.pad(pieces[-1], (0, 0, 0, fewest - len(pieces[-1])))
    return torch.cat([multiply(piece) for piece in pieces])[:count].unflatten(0, states.shape[:-1])
