"""Modules of a model whose weights a checkpoint stores in few bits, and their products.

As they are loaded they widen a weight at each call; on a GPU few rows are multiplied by a kernel that reads the codes.
On a CPU an engine's own model gets them laid out for products in C++ (native/coded_products.h). Without AVX2 or Triton
they are widened once, and experts on a GPU, too.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lpr.model.cpu.products import LaidOut, PrepackedLinear
from lpr.model.cpu.tiles import PANEL, Panels, can_tile
from lpr.model.fused.elementwise import is_available
from lpr.model.low_bit.coded import BITS, VALUES, Coding, as_bytes
from lpr.model.low_bit.formats import Coded
from lpr.model.rewrite.base import Rewrite, Setting, Stage
from lpr.model.rewrite.merged_linear import inputs_of, joined, share
from lpr.model.rewrite.sharded_layers import ReducedLinear, summed

EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters [experts, outputs, inputs] of modules of experts, as transformers names them."""
_KINDS = {"int8": 0, "fp8": 1, "int4": 2, "fp4": 2}


class CodedLinear(nn.Linear):
    """An `nn.Linear` whose parameter `weight` are the rows of a `Coding`."""

    coding: Coding
    order: Tensor | None
    dtype: torch.dtype  # of its products

    def forward(self, input: Tensor) -> Tensor:
        return self._product(input, self.bias)

    def _product(self, input: Tensor, bias: Tensor | None) -> Tensor:
        return multiply(self.coding, self.weight, input if self.order is None else input[..., self.order], bias)

    def dense(self) -> Tensor:
        found = self.coding.to_dense(self.weight, self.dtype)
        return found if self.order is None else found[:, self.order.argsort()]


class ReducedCodedLinear(CodedLinear):
    """One that is divided along its input: the sum of the ranks' products."""

    group: dist.ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        return summed(self._product(input, None), self.group, self.bias)


def multiply(coding: Coding, rows: Tensor, given: Tensor, bias: Tensor | None) -> Tensor:
    """The product [..., outputs] of `given` [..., inputs], plus `bias` [outputs]: of few rows on a GPU by the codes."""
    if has_kernel(coding, rows.device) and given.numel() <= _kernels().MOST_ROWS * coding.num_inputs:
        return _kernels().multiply(coding, rows, given, bias)
    return F.linear(given, coding.to_dense(rows, given.dtype), bias)


def has_kernel(coding: Coding, device: torch.device) -> bool:
    """True if few rows are multiplied by the codes of a weight on a GPU."""
    return device.type == "cuda" and is_available(device) and _kernels().block_of(coding) > 0


@cache
def _kernels() -> Any:
    return import_module("lpr.model.kernels.coded_kernel")


class CodedTiles(Panels):
    """A weight in panels of 32 outputs, whose codes are widened in registers: products are as those of floats."""

    bits = 1

    def __init__(self, coding: Coding, rows: Tensor) -> None:
        """Lay out `rows` [outputs, row_bytes], for processors with `can_tile`."""
        self.coding, num_outputs = coding, len(rows)
        rows = F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
        scale, zero = coding.scales(rows)
        scales = [each.unflatten(0, (-1, PANEL)) for each in ((scale,) if zero is None else (scale, -zero * scale))]
        panels = as_bytes(torch.cat([each.transpose(1, 2).flatten(1) for each in scales], 1))
        codes = rows[:, coding.row_bytes - coding.padded * BITS[coding.kind] // 8 :].contiguous()
        if BITS[coding.kind] == 4:  # words of 8 inputs, of 32 outputs together
            words = codes.view(torch.int32).unflatten(0, (-1, PANEL)).transpose(1, 2)
        else:  # bytes of an input, of 32 outputs together
            words = codes.unflatten(0, (-1, PANEL)).transpose(1, 2)
        super().__init__(torch.cat([panels, as_bytes(words).flatten(1)], 1), num_outputs, coding.num_inputs)
        table = VALUES.get(coding.kind, (0.0,) * 16)
        sizes = _KINDS[coding.kind], coding.group, coding.num_groups, coding.has_zero, self._panels.shape[1]
        self.aside = torch.frombuffer(bytearray(struct.pack("5q16f", *sizes, *table)), dtype=torch.uint8)

    def __reduce__(self) -> tuple[type[CodedTiles], tuple[Coding, Tensor]]:
        return CodedTiles, (self.coding, self.rows())

    def rows(self) -> Tensor:
        coding = self.coding
        size = 4 * coding.num_groups * (1 + coding.has_zero) * PANEL
        panels, words = self._panels[:, :size].contiguous(), self._panels[:, size:].contiguous()
        scales = panels.view(torch.float32).unflatten(1, (-1, PANEL)).transpose(1, 2).contiguous()
        if coding.has_zero:  # they are whole numbers
            scale, least = scales.split(coding.num_groups, 2)
            scales = torch.cat([scale, (-least / scale).round_().nan_to_num_(0.0)], 2)
        found = as_bytes(scales)
        together = words.view(torch.int32) if BITS[coding.kind] == 4 else words
        codes = as_bytes(together.unflatten(1, (-1, PANEL)).transpose(1, 2))
        return torch.cat([found, codes], 2).flatten(0, 1)[: self.num_outputs]

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        return self.coding.to_dense(self.rows(), dtype)


class Reordered:
    """A weight whose columns are for the inputs in another order."""

    def __init__(self, order: Tensor, tiles: CodedTiles) -> None:
        self.order, self.tiles = order, tiles

    @property
    def num_bytes(self) -> int:
        return self.tiles.num_bytes + self.order.nbytes

    def to_dense(self, dtype: torch.dtype) -> Tensor:
        return self.tiles.to_dense(dtype)[:, self.order.argsort()]

    def multiply(self, given: Tensor, bias: Tensor | None) -> Tensor:
        return self.tiles.multiply(given[..., self.order], bias)


class CodedPack(LaidOut):
    """The weights of one or more layers of the same input, laid out together."""

    def __init__(
        self, coding: Coding, rows: Tensor, bias: Tensor | None, sizes: Sequence[int], dtype: torch.dtype,
        order: Tensor | None = None, group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        """Lay out `rows` [sum of sizes, row_bytes]; the members have `sizes` outputs, and products are in `dtype`."""
        tiles = CodedTiles(coding, rows)
        packed = tiles if order is None else Reordered(order, tiles)
        super().__init__(packed, bias.float() if bias is not None else None, sizes, dtype, group)


class PackedCodedLinear(PrepackedLinear):
    """A `CodedLinear` whose weight lies in a `CodedPack`."""


class CodedExperts:
    """The forward of a module of experts with weights of few bits: each expert that a token has chosen."""

    def __init__(
        self, module: Any, codings: dict[str, Coding], dtype: torch.dtype,
        packs: Mapping[str, Sequence[LaidOut]] | None = None,
    ) -> None:  # fmt: skip
        """`packs` are, by parameter, the weights of experts that are laid out; `codings` tell how others are coded."""
        self._module: Any = weakref.ref(module)  # in a cycle, a dropped model would keep its weights
        self.codings, self.dtype, self.packs = codings, dtype, dict(packs or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return CodedExperts, (self._module(), self.codings, self.dtype, self.packs)

    @property
    def num_bytes(self) -> int:
        return sum(each.num_bytes for packs in self.packs.values() for each in packs)

    def lay_out(self) -> None:
        """Lay the weights out for products in C++, and free the parameters."""
        module = self._module()
        for name, coding in self.codings.items():
            rows, bias = module._parameters.pop(name), self._bias(name)
            self.packs[name] = [
                CodedPack(coding, each.detach(), None if bias is None else bias[expert], [len(each)], self.dtype)
                for expert, each in enumerate(rows)
            ]

    def widen(self) -> None:
        """Put dense parameters [experts, outputs, inputs] in the place of the rows."""
        module = self._module()
        for name, coding in self.codings.items():
            dense = coding.to_dense(getattr(module, name).detach(), self.dtype)
            wide = dense.transpose(1, 2).contiguous() if module.is_transposed else dense
            setattr(module, name, nn.Parameter(wide, requires_grad=False))
        del module.forward

    def _bias(self, name: str) -> Tensor | None:
        found = getattr(self._module(), f"{name}_bias", None)
        return None if found is None else found.detach()

    def _multiply(self, name: str, expert: int, given: Tensor) -> Tensor:
        if name in self.packs:
            return self.packs[name][expert].multiply(given)
        bias, rows = self._bias(name), getattr(self._module(), name)[expert]
        return F.linear(given, self.codings[name].to_dense(rows, given.dtype), None if bias is None else bias[expert])

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum [tokens, D] over the experts `top_k_index` [tokens, k] of each token, by `top_k_weights`."""
        result, module = torch.zeros_like(hidden_states), self._module()
        first, activate = ("gate_up_proj", module._apply_gate) if module.has_gate else ("up_proj", module.act_fn)
        for expert in top_k_index.unique().tolist():
            tokens, places = (top_k_index == expert).nonzero(as_tuple=True)
            inner = activate(self._multiply(first, expert, hidden_states[tokens]))
            found = self._multiply("down_proj", expert, inner) * top_k_weights[tokens, places, None]
            result.index_add_(0, tokens, found.to(result.dtype))
        return result


def may_be_coded(module: Any, name: str) -> bool:
    """True for a parameter that a checkpoint may store in few bits."""
    if name == "weight":
        return isinstance(module, nn.Linear)
    is_known = hasattr(module, "_apply_gate") and name in EXPERTS and getattr(module, name, None) is not None
    return is_known and not module.has_post_expert_norm and getattr(module, name).dim() == 3


def logical_shape(module: Any, name: str) -> tuple[int, ...]:
    """The shape [..., outputs, inputs] of the weight that `may_be_coded`."""
    shape = tuple(getattr(module, name).shape)
    is_turned = name != "weight" and module.is_transposed
    return (*shape[:-2], shape[-1], shape[-2]) if is_turned else shape


def hold(module: Any, name: str, coded: Coded, dtype: torch.dtype) -> None:
    """Let a module compute by a weight whose rows its parameter `name` already has; `dtype` is that of its products."""
    if name == "weight":
        module.__class__ = CodedLinear
        module.coding, module.dtype = coded.coding, dtype
        module.register_buffer("order", coded.order, persistent=coded.order is not None)
        return
    if not isinstance(vars(module).get("forward"), CodedExperts):
        module.forward = CodedExperts(module, {}, dtype)
    module.forward.codings[name] = coded.coding


def divide(module: Any, style: str, rank: int, group: dist.ProcessGroup) -> None:
    """Let a layer whose rows are a rank's part compute by them: the sum of all ranks, or outputs of its own."""
    if style == "rowwise":
        module.__class__, module.group = ReducedCodedLinear, group
    elif module.bias is not None:
        count = len(module.weight)
        mine = module.bias.detach()[rank * count : (rank + 1) * count].clone()
        module.bias = nn.Parameter(mine, requires_grad=False)


def coded_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules of `model` with weights in few bits, by name, laid out or not."""
    for name, module in model.named_modules():
        is_linear = isinstance(module, CodedLinear | PackedCodedLinear)
        if is_linear or isinstance(vars(module).get("forward"), CodedExperts):
            yield name, module


class CodedProducts(Rewrite):
    """Weights in few bits are laid out for products in C++, those of projections of one input together."""

    name, stage = "low-bit products", Stage.FASTER

    def match(self, model: nn.Module, setting: Setting) -> Iterator[tuple[str, list[Any]]]:
        for name, module in list(model.named_modules()):
            if isinstance(vars(module).get("forward"), CodedExperts):
                yield name, []
            for members in inputs_of(module):
                if _fit(members):
                    yield name, members

    def apply(self, module: Any, found: list[Any]) -> None:
        if not found:
            experts: CodedExperts = module.forward
            experts.lay_out() if _is_tiled(experts.dtype, next(module.parameters()).device) else experts.widen()
            return
        first = found[0]
        if not _is_tiled(first.dtype, first.weight.device):
            for each in found:
                each.weight = nn.Parameter(each.dense(), requires_grad=False)
                del each.coding, each.dtype, each.order
                each.__class__ = ReducedLinear if isinstance(each, ReducedCodedLinear) else nn.Linear
            return
        rows = joined([each.weight.data for each in found])
        bias = torch.cat([each.bias.data for each in found]) if first.bias is not None else None
        sizes, group = [len(each.weight) for each in found], getattr(first, "group", None)
        pack = CodedPack(first.coding, rows, bias, sizes, first.dtype, first.order, group)
        for member in found:
            del member.weight, member.coding, member.dtype, member.order
        share(pack, found, PackedCodedLinear)


def _is_tiled(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and can_tile(dtype, 2)


def _fit(members: Sequence[Any]) -> bool:
    if not all(isinstance(each, CodedLinear) for each in members):
        return False
    if has_kernel(members[0].coding, members[0].weight.device):
        return False
    if len(members) > 1 and any(type(each) is not CodedLinear or each.order is not None for each in members):
        return False
    return len({(each.coding, each.bias is None, each.dtype) for each in members}) == 1
