"""Weights of low-bit checkpoints in one form, whatever format they come in, and nothing rounded again.

A weight is a code, less a zero point if its format has one, times a scale. An output is one row of bytes: its scales,
its zero points and its codes. So projections of one input are laid below each other, experts stacked and outputs
divided among ranks as rows of any other weight are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Kind = Literal["int8", "fp8", "int4", "fp4"]
BITS: dict[Kind, int] = {"int8": 8, "fp8": 8, "int4": 4, "fp4": 4}
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES: dict[Kind, tuple[float, ...]] = {
    "int4": tuple(float(code - 8) for code in range(16)),
    "fp4": (*FP4, *(-each for each in FP4)),
}
"""The values of the codes 0 to 15. Those of int8 and fp8 (e4m3) are torch's own."""
_TOGETHER = 8  # inputs to a multiple of which a row is filled up


@dataclass(frozen=True)
class Coding:
    kind: Kind
    num_inputs: int
    group: int  # inputs that share a scale
    has_zero: bool = False  # True if each group has a zero point, too

    @property
    def num_groups(self) -> int:
        return -(-self.num_inputs // self.group)

    @property
    def padded(self) -> int:
        """Inputs of a row with those that fill it up."""
        return -(-self.num_inputs // _TOGETHER) * _TOGETHER

    @property
    def row_bytes(self) -> int:
        """Bytes of a row: float32 for scales and zero points, and the codes."""
        return 4 * self.num_groups * (1 + self.has_zero) + self.padded * BITS[self.kind] // 8

    def encode(self, codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
        """Rows, uint8 [outputs, row_bytes].

        `codes` [outputs, inputs]: int8, float8_e4m3fn, or uint8 of 0 to 15. `scale` and `zero`: [outputs, groups].
        """
        more, filled = self.padded - self.num_inputs, 8 if self.kind == "int4" else 0
        data = F.pad(as_bytes(codes), (0, more), value=filled)
        if BITS[self.kind] == 4:
            data = data[:, ::2] | data[:, 1::2] << 4
        scales = [scale] if zero is None else [scale, zero]
        return torch.cat([*(as_bytes(each.float()) for each in scales), data], 1)

    def scales(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points [..., outputs, groups] of `rows` [..., outputs, row_bytes]."""
        size = 4 * self.num_groups * (1 + self.has_zero)
        parts = rows[..., :size].contiguous().view(torch.float32).split(self.num_groups, -1)
        return parts[0], parts[1] if self.has_zero else None

    def codes(self, rows: Tensor) -> Tensor:
        """The codes, uint8 [..., outputs, padded], of `rows`: those of 4 bits are 0 to 15."""
        data = rows[..., self.row_bytes - self.padded * BITS[self.kind] // 8 :]
        return torch.stack([data & 15, data >> 4], -1).flatten(-2) if BITS[self.kind] == 4 else data

    def part(self, rows: Tensor, first: int, count: int) -> tuple[Coding, Tensor]:
        """The `count` inputs from `first` on of `rows` [outputs, row_bytes], in groups of a size that divides both."""
        group = count if self.num_groups == 1 else math.gcd(self.group, math.gcd(first, count))
        groups = torch.arange(first, first + count, group, device=rows.device) // self.group
        scale, zero = (None if each is None else each[:, groups] for each in self.scales(rows))
        assert scale is not None
        made = replace(self, num_inputs=count, group=group)
        return made, made.encode(self.codes(rows)[:, first : first + count], scale, zero)

    def to_dense(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """The weight [..., outputs, inputs], computed in float32."""
        codes = self.codes(rows)[..., : self.num_inputs]
        if self.kind in VALUES:
            wide = torch.tensor(VALUES[self.kind], device=rows.device)[codes.int()]
        else:
            wide = codes.contiguous().view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn).float()
        scale, zero = self.scales(rows)
        if zero is not None:
            wide -= self._spread(zero)
        return wide.mul_(self._spread(scale)).to(dtype)

    def _spread(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.group, -1)[..., : self.num_inputs]


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes [..., n * size] of a copy of `tensor` [..., n]: dimensions of 1 may have strides in the way."""
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)
