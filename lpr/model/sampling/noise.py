"""Keyed Gumbel noise: a pure function of (seed, position, token id), the same integers on every device."""

from __future__ import annotations

import numpy as np
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
    return _gumbel_of_uniform(uniform)


def _gumbel_of_uniform(uniform: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log1p(-uniform.clamp_max(1.0 - 2.0**-24)))


LARGEST_NOISE = 22.9
"""No noise is above: that of the smallest hash, -log(-log1p(-2^-33)), is 22.87."""
RARE_NOISE = 6.0
RARE_BITS = np.uint32((1.0 - np.exp(-np.exp(-RARE_NOISE))) * 2.0**32 * 1.001)
"""A noise of RARE_NOISE or more has a hash of at most RARE_BITS, as one token in 400."""


def bits_of_pairs(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The hash [n] uint32 that the noise of tokens [n] with keys [n] (or one key [1]) is made of; smaller is more.

    numpy multiplies uint32 with wrapping, which torch does not have: a third of the time that int64 words take.
    """
    bits, spare = tokens ^ keys, np.empty_like(tokens)
    _mix32_in_place(bits, spare)
    bits ^= keys * np.uint32(0x85EBCA6B)
    _mix32_in_place(bits, spare)
    return bits


def gumbel_of_pairs(keys: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """`gumbel`, bit for bit, of tokens [n] uint32 with keys [n] uint32, or all with one key [1]."""
    uniform = (bits_of_pairs(keys, tokens).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return _gumbel_of_uniform(torch.from_numpy(uniform)).numpy()


def _mix32_in_place(words: np.ndarray, spare: np.ndarray) -> None:
    for shift, multiplier in ROUNDS:
        words ^= np.right_shift(words, np.uint32(shift), out=spare)
        words *= np.uint32(multiplier)
    words ^= np.right_shift(words, np.uint32(14), out=spare)
