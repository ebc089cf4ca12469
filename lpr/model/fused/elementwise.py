"""The parts of a decoder layer between its matrix products: in C++ (native/elementwise.h), on a GPU Triton kernels.

Tensors have DTYPES and a contiguous last dimension; the callers ensure this (lpr.model.fused.modules). In half
precision results are rounded where the modules of transformers round.
"""

from enum import IntEnum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lpr import native
from lpr.model.threads import team_size

DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
"""By the type of device."""
_ALONE = 1 << 16  # most values of an operation that runs on the calling thread alone


class Weighing(IntEnum):
    """How an RMS norm applies its weight."""

    ROUNDED = 0  # weight * x, with x rounded to its dtype first (Llama)
    ONE_PLUS = 1  # (1 + weight) * x in float32 (Gemma)
    WIDE = 2  # weight * x in float32 (OLMo 2)


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1


def is_available(device: torch.device) -> bool:
    """True if the functions below work on `device`."""
    return native.rms_norm is not None if device.type == "cpu" else device.type == "cuda" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


@cache
def _kernels() -> Any:
    return import_module("lpr.model.kernels.elementwise_kernel")


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, weighing: int, added: Tensor | None = None) -> Tensor:
    """The norm of `states` [..., D], contiguous; with `added`, `states` becomes the sum of both first, in place."""
    if states.is_cuda:
        return _kernels().rms_norm(states, weight, epsilon, weighing, added)
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
    if states.is_cuda:
        _kernels().norm_heads(states, weight, epsilon, weighing, first, heads)
        return
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
    if states.is_cuda:
        _kernels().rotate(states, cosines, sines, heads)
        return
    width, stride = cosines.shape[-1], states.shape[-1]
    count = states.numel() // stride
    assert native.rotate is not None
    native.rotate(
        states.data_ptr(), cosines.data_ptr(), sines.data_ptr(), count, heads, width, stride,
        states.dtype is torch.bfloat16, _threads(count * heads * width),
    )  # fmt: skip


def place(
    states: Tensor, cosines: Tensor, sines: Tensor, num_queries: int, rows: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Rotate the first `num_queries` heads of each row of `states` [..., all heads * D] in place, on a GPU.

    The heads of keys, rotated, and those of values, which follow, go to `rows` [number of rows] int64 of `keys` and
    `values` [rows of the cache, heads, D].
    """
    _kernels().place(states, cosines, sines, num_queries, rows, keys, values)


def gate(states: Tensor, activation: int) -> Tensor:
    """activation(states[..., :D]) * states[..., D:] of `states` [..., 2 * D], contiguous: [..., D]."""
    if states.is_cuda:
        return _kernels().gate(states, activation)
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
