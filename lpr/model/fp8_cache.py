"""K/V in 8 bits: each number is the nearest of E4M3, without scales. Pools hold bytes, which any copy knows."""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn


def as_stored(states: Tensor, pool: Tensor) -> Tensor:
    """K or V as `pool` keeps them: as they are, or in FP8 as bytes (what exceeds 448 becomes 448)."""
    if pool.dtype is not torch.uint8:
        return states
    most = torch.finfo(FP8).max
    return states.clamp(-most, most).to(FP8).view(torch.uint8)


def as_read(pool: Tensor) -> Tensor:
    """A pool with the type of its numbers."""
    return pool.view(FP8) if pool.dtype is torch.uint8 else pool
