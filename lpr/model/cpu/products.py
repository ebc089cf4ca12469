"""Matrix products with weights prepacked at load: in C++ or, without AVX2, by oneDNN.

MKL, PyTorch's default in float32, repacks a weight at every call, and is slow on AMD processors.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lpr.model.cpu.tiles import Tiles, can_tile
from lpr.model.rewrite.base import Rewrite, Setting, Stage
from lpr.model.rewrite.merged_linear import GROUPS, Pack, fit

_PACKED_ROWS = 16
"""Number of rows that oneDNN's layout is optimised for. It works for any number; a layout for 1 row is 1.5 times as
slow at 2 to 16 rows."""


def can_pack(dtype: torch.dtype, num_inputs: int) -> bool:
    """True if this machine supports prepacked weights in this dtype."""
    return can_tile(dtype, num_inputs) or has_one_dnn(dtype)


def has_one_dnn(dtype: torch.dtype) -> bool:
    """True if oneDNN supports this dtype on this machine."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


class OneDnn:
    def __init__(self, weight: Tensor) -> None:
        """Pack `weight` [outputs, inputs] in oneDNN's layout."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        dense: Tensor = self._packed.to_dense()
        return dense.to(dtype)

    def multiply(self, given: Tensor, bias: Tensor | None) -> Tensor:
        """The product [..., outputs] of `given` [..., inputs], plus `bias` [outputs]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(given, self._packed, bias, "none", [], "")
        return product


class LaidOut(Pack):
    """The weights of one or more linear layers of the same input, stored only in the layout `packed`."""

    def __init__(self, packed: Any, bias: Tensor | None, sizes: Sequence[int], dtype: torch.dtype) -> None:
        """`packed` has `multiply`, `to_dense` and `num_bytes`, as Tiles; the members have `sizes` outputs."""
        self.packed, self.bias, self.sizes, self.dtype = packed, bias, list(sizes), dtype

    @property
    def num_bytes(self) -> int:
        return int(self.packed.num_bytes)

    def multiply(self, given: Tensor) -> Tensor:
        product: Tensor = self.packed.multiply(given, self.bias)
        return product

    def weight_of(self, place: int) -> Tensor:
        """The weight [outputs, inputs] of a member, unpacked."""
        dense: Tensor = self.packed.to_dense(self.dtype)
        return dense.split(self.sizes)[place]


class Prepacked(LaidOut):
    """The weights of `nn.Linear`, as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> None:
        """Lay out `weight` [sum of sizes, inputs] with `bias` [sum of sizes]."""
        is_tiled = can_tile(weight.dtype, weight.shape[1])
        layout: Any = Tiles if is_tiled else OneDnn
        packed = weight if weight.is_meta else layout(weight)
        super().__init__(packed, bias.float() if bias is not None and is_tiled else bias, sizes, weight.dtype)


class PrepackedLinear(nn.Linear):
    """An `nn.Linear` whose weight is stored in a pack."""

    pack: LaidOut
    place: int

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.pack.weight_of(self.place)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return F.linear(input, self.weight, self.bias)
        return self.pack.part(self.place, input) if len(self.pack.sizes) > 1 else self.pack.multiply(input)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


class PrepackedProducts(Rewrite):
    """Prepacks the weights of plain `nn.Linear` layers; projections of one input share a pack."""

    name, stage = "prepacked products", Stage.FASTER

    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        return None if setting.device.type == "cpu" else "it is for a CPU"

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, list[Any]]]:
        for name, module in list(model.named_modules()):
            groups: list[list[Any]] = [[getattr(module, each, None) for each in names] for names in GROUPS]
            for members in [*groups, *([each] for each in module.children())]:
                if fit(members) and can_pack(members[0].weight.dtype, members[0].in_features):
                    yield name, members

    def apply(self, module: nn.Module, found: list[Any]) -> None:
        """Prepack the weights of some members as one pack, and free the originals."""
        weight = found[0].weight.data if len(found) == 1 else torch.cat([each.weight.data for each in found])
        bias = torch.cat([each.bias.data for each in found]) if found[0].bias is not None else None
        pack = Prepacked(weight, bias, [each.out_features for each in found])
        for place, member in enumerate(found):
            del member.weight  # an embedding keeps a tied weight
            member.__class__ = PrepackedLinear
            member.pack, member.place = pack, place
