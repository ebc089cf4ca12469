"""Keyed Gumbel noise: a pure function of (seed, position, token id), the same integers on every device."""

from __future__ import annotations

import torch

from lpr.core.noise_keys import MASK32, ROUNDS


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """`mix32` of 32-bit values held in int64, elementwise; the same integers on every device.

    Below 2^32 times 2^32 an int64 product wraps, and its low 32 bits stay right.
    """
    for shift, multiplier in ROUNDS:
        x = x ^ (x >> shift)
        x = (x * multiplier) & MASK32
    return x ^ (x >> 14)


def gumbel(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32, for int64 `keys` and token ids that broadcast against each other.

    Two hash rounds with the key folded in between decorrelate the rows of neighbouring keys. With v uniform in (0, 1),
    -log(v) is exponential; log1p keeps its small values, which decide the maximum, exact in float32.
    """
    bits = _mix32(_mix32(tokens ^ keys) ^ ((keys * 0x85EBCA6B) & MASK32))
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-uniform.clamp_max(1.0 - 2.0**-24)))
