"""The operations between a decoder layer's matrix products as Triton kernels, one launch each.

The functions are those of lpr.model.fused.elementwise, on a GPU or interpreted.
"""

import torch
import triton
from torch import Tensor

from lpr.model.kernels import device_of
from lpr.model.kernels.elementwise_code import gate_rows, normalise, place_heads, rotate_heads

_HEADS = 8  # heads that a program rotates
_GATED = 1024  # values that a program gates


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, weighing: int, added: Tensor | None = None) -> Tensor:
    out = torch.empty_like(states)
    width = weight.shape[0]
    _normalise(states, added, weight, out, states.numel() // width, 1, width, epsilon, weighing)
    return out


def norm_heads(states: Tensor, weight: Tensor, epsilon: float, weighing: int, first: int, heads: int) -> None:
    part = states.flatten(0, -2)[:, first:]
    _normalise(part, None, weight, part, len(part), heads, states.shape[-1], epsilon, weighing)


def _normalise(
    states: Tensor, added: Tensor | None, weight: Tensor, out: Tensor, count: int, heads: int, stride: int,
    epsilon: float, weighing: int,
) -> None:  # fmt: skip
    width = weight.shape[0]
    block = triton.next_power_of_2(width)
    if not count:
        return
    with device_of(states):
        normalise[count, heads](
            states, states if added is None else added, weight, out, stride, stride, epsilon,
            WIDTH=width, BLOCK=block, WEIGHING=weighing, HAS_ADDED=added is not None,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip


def rotate(states: Tensor, cosines: Tensor, sines: Tensor, heads: int) -> None:
    width, stride = cosines.shape[-1], states.shape[-1]
    count = states.numel() // stride
    if not count:
        return
    with device_of(states):
        rotate_heads[count, triton.cdiv(heads, _HEADS)](
            states, cosines, sines, stride, heads, HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2),
            HEADS=_HEADS, num_warps=4,
        )  # fmt: skip


def place(
    states: Tensor, cosines: Tensor, sines: Tensor, num_queries: int, rows: Tensor, keys: Tensor, values: Tensor
) -> None:
    width, stride, num_keys = cosines.shape[-1], states.shape[-1], keys.shape[1]
    count = states.numel() // stride
    if not count:
        return
    with device_of(states):
        place_heads[count, triton.cdiv(num_queries + 2 * num_keys, _HEADS)](
            states, cosines, sines, rows, keys, values, stride, *keys.stride()[:2], *values.stride()[:2],
            num_queries, num_keys, HALF=width // 2, BLOCK=triton.next_power_of_2(width // 2), HEADS=_HEADS, num_warps=4,
        )  # fmt: skip


def gate(states: Tensor, activation: int) -> Tensor:
    width = states.shape[-1] // 2
    out = states.new_empty(*states.shape[:-1], width)
    count = out.numel() // width
    if count:
        with device_of(states):
            gate_rows[count, triton.cdiv(width, _GATED)](
                states, out, width, ACTIVATION=activation, BLOCK=_GATED, num_warps=4
            )
    return out
