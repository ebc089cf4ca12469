"""The parts of a decoder layer between its matrix products, in C++ (native/elementwise.h).

Tensors are float32 or bfloat16 with their last dimension contiguous; the callers see to it (lpr.model.cpu.modules).
In bfloat16 the results round where the modules of transformers round.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from lpr import native
from lpr.model.threads import team_size

DTYPES = (torch.float32, torch.bfloat16)
_ALONE = 1 << 16
"""Values up to which a part runs on the calling thread."""


class Weighing(IntEnum):
    """How an RMS norm applies its weight."""

    ROUNDED = 0
    """weight * x, with x rounded to its dtype first (Llama)."""
    ONE_PLUS = 1
    """(1 + weight) * x in float32 (Gemma)."""
    WIDE = 2
    """weight * x in float32 (OLMo 2)."""


class Activation(IntEnum):
    """The activation of a gate."""

    SILU = 0
    GELU_TANH = 1


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, weighing: int, added: Tensor | None = None) -> Tensor:
    """The norm of `states` [..., D], contiguous; with `added`, `states` becomes the sum of both first, in place."""
    out = torch.empty_like(states)
    width = weight.shape[0]
    count = states.numel() // width
    assert native.rms_norm is not None
    native.rms_norm(
        states.data_ptr(), 0 if added is None else added.data_ptr(), weight.data_ptr(), out.data_ptr(), count, 1, width,
        width, width, epsilon, weighing, states.dtype is torch.bfloat16, _threads(count * width),
    )  # fmt: skip
    return out


def norm_heads(states: Tensor, weight: Tensor, epsilon: float, weighing: int, first: int, heads: int) -> None:
    """Norm `heads` heads of `states` [N, ...], contiguous, from value `first` of a row on, in place."""
    width, stride = weight.shape[0], states.shape[-1]
    count = states.numel() // stride
    start = states.data_ptr() + first * states.element_size()
    assert native.rms_norm is not None
    native.rms_norm(
        start, 0, weight.data_ptr(), start, count, heads, width, stride, stride, epsilon, weighing,
        states.dtype is torch.bfloat16, _threads(count * heads * width),
    )  # fmt: skip


def rotate(states: Tensor, cosines: Tensor, sines: Tensor, heads: int) -> None:
    """Rotary embedding of the first `heads` heads of each row of `states` [..., D * more], contiguous, in place.

    `cosines` and `sines` [..., D] are contiguous and have as many rows.
    """
    width, stride = cosines.shape[-1], states.shape[-1]
    count = states.numel() // stride
    assert native.rotate is not None
    native.rotate(
        states.data_ptr(), cosines.data_ptr(), sines.data_ptr(), count, heads, width, stride,
        states.dtype is torch.bfloat16, _threads(count * heads * width),
    )  # fmt: skip


def gate(states: Tensor, activation: int) -> Tensor:
    """activation(states[..., :D]) * states[..., D:] of `states` [..., 2 * D], contiguous: [..., D]."""
    width = states.shape[-1] // 2
    out = states.new_empty(*states.shape[:-1], width)
    assert native.gate is not None
    native.gate(
        states.data_ptr(), out.data_ptr(), out.numel() // width, width, activation, states.dtype is torch.bfloat16,
        _threads(out.numel()),
    )  # fmt: skip
    return out


def _threads(num_values: int) -> int:
    return 1 if num_values <= _ALONE else team_size()
