"""Linear layers with rounded weights: int8 and fp8 with a scale per output, int4 with scale and minimum per 32 inputs.

Activations stay as they are. On a GPU few rows are multiplied by the kernel for weights of checkpoints in few bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lpr.model.cpu.products import LaidOut, PrepackedLinear
from lpr.model.cpu.tiles import can_tile
from lpr.model.low_bit.coded import Coding
from lpr.model.low_bit.layers import has_kernel, multiply
from lpr.model.low_bit.tiles import GROUP, Int4Tiles, Int8Tiles
from lpr.model.rewrite.merged_linear import group_of, joined, share
from lpr.model.rewrite.sharded_layers import VocabularyHead

Form = Literal["int8", "int4", "fp8"]
FORMS: tuple[Form, ...] = get_args(Form)
_LARGEST = {"int8": 127.0, "fp8": 448.0}  # largest value of a form, which the largest weight of a row becomes


class Rounded:
    """A weight in a low-bit form, and its product in torch's operators: widened, then multiplied."""

    def __init__(self, weight: Tensor, form: Form) -> None:
        """Round `weight` [outputs, inputs], of any float dtype."""
        self.num_outputs, self.num_inputs = weight.shape
        self.form, wide = form, weight.float()
        if form == "int4":
            wide = F.pad(wide, (0, -self.num_inputs % GROUP)).unflatten(1, (-1, GROUP))
            low, high = wide.aminmax(dim=2)
            self.scale, self.low = ((high - low) / 15).clamp(min=1e-12).bfloat16(), low.bfloat16()
            steps = (wide - self.low[..., None]) / self.scale[..., None]
            values = steps.round_().clamp_(0, 15).to(torch.uint8).flatten(1)
            self.values = values[:, ::2] | values[:, 1::2] << 4
            return
        largest = _LARGEST[form]
        self.scale = (wide.abs().amax(1) / largest).clamp_(min=1e-30)
        scaled = wide / self.scale[:, None]
        self.values = scaled.round_().to(torch.int8) if form == "int8" else scaled.to(torch.float8_e4m3fn)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, Tensor))

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        if self.form != "int4":
            return (self.values.float() * self.scale[:, None]).to(dtype)
        wide = self.groups() * self.scale.float()[:, :, None] + self.low.float()[:, :, None]
        return wide.flatten(1)[:, : self.num_inputs].to(dtype)

    def groups(self) -> Tensor:
        """The values of int4, uint8 [outputs, groups, GROUP]."""
        return torch.stack([self.values & 15, self.values >> 4], 2).flatten(1).unflatten(1, (-1, GROUP))

    def multiply(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """The product [..., outputs] of `given` [..., inputs], plus `bias` [outputs]."""
        return F.linear(given, self.to_dense(given.dtype), bias)


class CodedRows:
    """A rounded weight on a GPU, whose codes a kernel multiplies by few rows."""

    def __init__(self, weight: Rounded) -> None:
        self.num_outputs, inputs = weight.num_outputs, weight.num_inputs
        if weight.form == "int4":  # the kernel's codes have the values -8 to 7
            scale = weight.scale.float()
            self.coding = Coding("int4", inputs, GROUP, has_zero=True)
            codes, zero = weight.groups().flatten(1)[:, :inputs], -weight.low.float() / scale - 8
            self.rows = self.coding.encode(codes, scale, zero)
        else:
            self.coding = Coding(weight.form, inputs, inputs)
            self.rows = self.coding.encode(weight.values, weight.scale[:, None])

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        return self.coding.to_dense(self.rows, dtype)

    def multiply(self, given: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(self.coding, self.rows, given, bias)


class LowBitPack(LaidOut):
    def __init__(
        self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], form: Form,
        group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """Round `weight` [sum of sizes, inputs]; `bias` [sum of sizes] stays; the members have `sizes` outputs."""
        packed: Any = Rounded(weight, form)
        if has_kernel(Coding(form, weight.shape[1], GROUP), weight.device):
            packed = CodedRows(packed)
        if form != "fp8" and weight.device.type == "cpu" and can_tile(weight.dtype, 2):
            bias = None if bias is None else bias.float()
            if form == "int8":
                packed = Int8Tiles(packed.values, packed.scale)
            else:
                packed = Int4Tiles(packed.groups(), packed.scale, packed.low, packed.num_inputs)
        super().__init__(packed, bias, sizes, weight.dtype, group)


class LowBitLinear(PrepackedLinear):
    """An `nn.Linear` whose weight lies in a `LowBitPack`."""

    pack: LowBitPack


class LowBitHead(VocabularyHead, LowBitLinear):
    """A `VocabularyHead`, likewise."""


def round_linear(members: Sequence[nn.Linear], form: Form) -> LowBitPack:
    """Make `members`, linear layers of the same input, low-bit layers of one pack, and return it.

    They lose their parameter `weight`. A `PackedLinear` or `PrepackedLinear` leaves its own pack.
    """
    made = LowBitHead if isinstance(members[0], VocabularyHead) else LowBitLinear
    weights = [each.weight.detach() for each in members]
    biases = [each.bias.detach() for each in members if each.bias is not None]
    bias, sizes = joined(biases) if biases else None, [len(each) for each in weights]
    pack = LowBitPack(joined(weights), bias, sizes, form, group_of(members[0]))
    for member in members:
        member._parameters.pop("weight", None)
    share(pack, members, made)
    return pack
