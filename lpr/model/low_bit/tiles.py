"""Weights of 8 and 4 bits in panels of 32 outputs, for products in C++ (native/low_bit_products.h, int4_products.h)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lpr.model.cpu.tiles import PANEL, Panels

GROUP = 32  # inputs that share a scale and a minimum in int4


class Int8Tiles(Panels):
    """A weight of int8, with a scale per output."""

    bits = 8

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.aside.nbytes

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        """Lay out `values` [outputs, inputs] of int8 with `scale` [outputs]; for processors with `can_tile`."""
        whole = F.pad(values, (0, -values.shape[1] % 4, 0, -len(values) % PANEL))
        super().__init__(whole.view(torch.int16).unflatten(0, (-1, PANEL)).transpose(1, 2), *values.shape)
        self.aside: Tensor = scale.float().contiguous()

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        whole = self._panels.transpose(1, 2).contiguous().view(torch.int8).flatten(0, 1)
        values = whole[: self.num_outputs, : self.num_inputs]
        return (values.float() * self.aside[:, None]).to(dtype)


class Int4Tiles(Panels):
    """A weight of 4 bits, with a scale and a minimum per output and GROUP inputs."""

    bits = 4

    def __init__(self, values: Tensor, scale: Tensor, low: Tensor, num_inputs: int) -> None:
        """Lay out `values` [outputs, groups, 32] of 0 to 15 with `scale` and `low` [outputs, groups] in bfloat16."""
        num_outputs, more = len(values), -len(values) % PANEL
        halves = F.pad(values, (0, 0, 0, 0, 0, more)).unflatten(0, (-1, 2, 16)).unflatten(4, (8, 4))
        first, second = halves.permute(1, 0, 3, 4, 2, 5)  # [panels, groups, fours of inputs, 16 outputs, 4]
        scales = [F.pad(each, (0, 0, 0, more)).unflatten(0, (-1, PANEL)).transpose(1, 2) for each in (scale, low)]
        scale_bytes = torch.cat(scales, 2).contiguous().view(torch.uint8)
        super().__init__(torch.cat([scale_bytes, (first | second << 4).flatten(2)], 2), num_outputs, num_inputs)

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        scales, both = self._panels.split([4 * PANEL, PANEL * GROUP // 2], 2)
        scale, low = scales.contiguous().view(torch.bfloat16).float().transpose(1, 2).split(PANEL, 1)
        fours = both.unflatten(2, (8, 16, 4)).permute(0, 3, 1, 2, 4)  # [panels, 16 outputs, groups, fours, 4]
        values = torch.cat([fours & 15, fours >> 4], 1).flatten(3)
        whole = (values * scale[..., None] + low[..., None]).flatten(2).flatten(0, 1)
        return whole[: self.num_outputs, : self.num_inputs].to(dtype)
