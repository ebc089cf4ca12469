"""Linear layers whose weights are laid out at load for products in C++; projections of one input share a layout."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lpr.model.cpu.tiles import Tiles, can_tile
from lpr.model.rewrite.base import Rewrite, Setting, Stage
from lpr.model.rewrite.merged_linear import Pack, fit, group_of, inputs_of, joined, share
from lpr.model.rewrite.sharded_layers import ReducedLinear, VocabularyHead, summed


class LaidOut(Pack):
    """The weights of one or more linear layers of the same input, stored only in the layout `packed`."""

    def __init__(
        self, packed: Any, bias: Tensor | None, sizes: Sequence[int], dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """`packed` has `multiply`, `to_dense` and `num_bytes`, as Tiles; the members have `sizes` outputs."""
        self.packed, self.sizes, self.dtype, self.group = packed, list(sizes), dtype, group
        self.bias = bias.to(dtype) if bias is not None and group is not None else bias

    @property
    def num_bytes(self) -> int:
        return int(self.packed.num_bytes)

    def multiply(self, given: Tensor) -> Tensor:
        return self.packed.multiply(given, self.own_bias)

    def weight_of(self, place: int) -> Tensor:
        """The weight [outputs, inputs] of a member, unpacked."""
        return self.packed.to_dense(self.dtype).split(self.sizes)[place]


class Prepacked(LaidOut):
    def __init__(
        self, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], group: dist.ProcessGroup | None = None
    ) -> None:
        """Lay out `weight` [sum of sizes, inputs] with `bias` [sum of sizes]."""
        packed = weight if weight.is_meta else Tiles(weight)
        super().__init__(packed, bias.float() if bias is not None else None, sizes, weight.dtype, group)


class PrepackedLinear(nn.Linear):
    """An `nn.Linear` whose weight is stored in a pack."""

    pack: LaidOut
    place: int
    tied: weakref.ref[nn.Parameter]  # the weight as a parameter, alive only if an embedding shares it

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.pack.weight_of(self.place)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            product = F.linear(input, self.weight, self.bias if self.pack.group is None else None)
            return product if self.pack.group is None else summed(product, self.pack.group, self.bias)
        return self.pack.part(self.place, input) if len(self.pack.sizes) > 1 else self.pack.whole(input)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        super()._save_to_state_dict(destination, prefix, keep_vars)


class PrepackedHead(VocabularyHead, PrepackedLinear):
    """A `VocabularyHead`, likewise."""


class PrepackedProducts(Rewrite):
    """Prepacks the weights of linear layers and of ranks' parts of them; projections of one input share a pack."""

    name, stage = "prepacked products", Stage.FASTER

    def why_not(self, model: nn.Module, setting: Setting) -> str | None:
        return None if setting.device.type == "cpu" else "it is for a CPU"

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, list[Any]]]:
        for name, module in list(model.named_modules()):
            for members in inputs_of(module):
                if fit(members) and can_tile(members[0].weight.dtype, members[0].weight.shape[1]):
                    yield name, members

    def apply(self, module: nn.Module, found: list[Any]) -> None:
        bias = joined([each.bias.data for each in found]) if found[0].bias is not None else None
        sizes = [len(each.weight) for each in found]  # a part has fewer than out_features
        pack = Prepacked(joined([each.weight.data for each in found]), bias, sizes, group_of(found[0]))
        for member in found:
            member.tied = weakref.ref(member.weight)
            del member.weight  # an embedding keeps a tied weight
        share(pack, found, PrepackedHead if isinstance(found[0], VocabularyHead) else PrepackedLinear)

    def undo(self, module: nn.Module) -> None:
        members: list[Any] = [each for each in module.children() if isinstance(each, PrepackedLinear)]
        for member in members:
            weight, bias = member.tied(), member._parameters.pop("bias")
            if weight is None:
                weight = nn.Parameter(member.weight.clone(), requires_grad=False)
            is_head, is_part = isinstance(member, VocabularyHead), member.pack.group is not None
            del member.pack, member.place, member.tied
            member.__class__ = VocabularyHead if is_head else ReducedLinear if is_part else nn.Linear
            member.register_parameter("weight", weight)
            member.register_parameter("bias", bias)
