"""A low-bit copy of a model: its linear layers rounded to 8 or 4 bits, all else shared with it.

The copy reads a fraction of the bytes, so a pass takes a fraction of a step's time. It has the model's architecture, so
it works on the model's own K/V cache: it reads the K/V of committed tokens, and writes rows that the model overwrites.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from lpr.model.cpu.products import PrepackedHead, PrepackedLinear
from lpr.model.exact.check import PinnedProducts
from lpr.model.exact.functions import FixedExperts
from lpr.model.low_bit.coded import BITS
from lpr.model.low_bit.layers import CodedExperts, PackedCodedLinear, coded_modules
from lpr.model.low_bit.products import FORMS, Form, LowBitPack, round_linear
from lpr.model.rewrite.base import OwnForward, Setting, carry_out, done_to, undo
from lpr.model.rewrite.merged_linear import LINEAR, Pack, PackedLinear, inputs_of, is_plain
from lpr.model.rewrite.table import FUSED, undo_forwards

_KINDS = (*LINEAR, PackedLinear, PrepackedLinear, PrepackedHead, PackedCodedLinear)


class LowBitCopy(nn.Module):
    """A model's low-bit copy, called as the model is and with its cache; it returns the same kind of output."""

    def __init__(self, model: Any, form: Form, num_bytes: int) -> None:
        super().__init__()
        self.model = model  # the copy as a model of the original's class
        self.form = form
        self.num_bytes = num_bytes  # bytes of memory that the model itself does not have

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


def why_no_copy_in(model: nn.Module, form: str) -> str | None:
    """Why a copy in `form` would read no fewer bytes than a model whose checkpoint is low-bit; None if it would."""
    for _, module in coded_modules(model):
        if not isinstance(module, PackedCodedLinear):
            return "its low-bit weights are not laid out as those of linear layers on a CPU"
        packed = module.pack.packed
        bits = BITS[getattr(packed, "tiles", packed).coding.kind]
        if form != "int4" or bits == 4:
            return f"its own weights have {bits} bits"
    return None


@torch.no_grad()
def make_copy(model: PreTrainedModel, form: Form, fuse: bool = True) -> LowBitCopy:
    """The copy of `model`, which stays as it is, in `form`; with known layers as few calls, unless not `fuse`.

    `model` may have been accelerated (lpr.model.fused); its weights are unpacked one group at a time. A rank that has
    a part of the model gets that part of the copy, with the same collectives.
    """
    if form not in FORMS:
        raise ValueError(f"form {form!r} is none of {', '.join(FORMS)}")
    shared = {id(each): each for each in _shared(model)}
    twin = copy.deepcopy(model, dict(shared))
    undo_forwards(twin)
    _undo_exact(twin)
    num_bytes, head = 0, twin.get_output_embeddings()
    for module in list(twin.modules()):
        if can_round_experts(module):
            held: Any = module._parameters
            weights = {name: held.pop(name).detach() for name in (_first_of(module), "down_proj")}
            packs = {
                name: [LowBitPack(each, None, [len(each)], form) for each in found] for name, found in weights.items()
            }
            module.forward = experts = CodedExperts(module, {}, weights["down_proj"].dtype, packs)
            num_bytes += experts.num_bytes
        for members in inputs_of(module):
            if _can_round(members):
                fine = form == "int4" and members[0] is head
                num_bytes += round_linear(members, "int8" if fine else form).num_bytes
    if fuse:
        setting = Setting(model.device)
        for each in FUSED:
            if each.why_not(twin, setting) is None:
                carry_out(each, twin, setting)
    return LowBitCopy(twin, form, num_bytes)


def _undo_exact(twin: nn.Module) -> None:
    """Undo what exact mode has changed, or nothing would be rounded; packs are the model's own and stay."""
    undo(FixedExperts(), twin)
    for name in done_to(twin).pop(PinnedProducts.name, ()):
        if not isinstance(module := twin.get_submodule(name), PrepackedLinear):
            vars(module).pop("forward", None)


def _shared(model: nn.Module) -> Iterator[Any]:
    """What the copy has in common with the model: tensors, packed weights, configs and forwards that will be undone."""
    for module in model.modules():
        for each in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()):
            is_shared = isinstance(each, (torch.Tensor, Pack, dist.ProcessGroup))
            is_shared = is_shared or isinstance(getattr(each, "plain", None), OwnForward)
            if is_shared or hasattr(each, "_attn_implementation_internal"):
                yield each


def can_round_experts(module: Any) -> bool:
    """True for experts on a CPU that are two products without bias and what lies between them."""
    if not hasattr(module, "_apply_gate") or "forward" in vars(module) or module._is_expert_parallel:
        return False
    is_simple = not (module.has_bias or module.is_transposed or module.has_post_expert_norm)
    names = {_first_of(module), "down_proj"}
    if not is_simple or set(module._parameters) != names or module._forward_hooks or module._forward_pre_hooks:
        return False
    weights = [module._parameters[each] for each in names]
    return all(type(each) is nn.Parameter and each.dim() == 3 and each.device.type == "cpu" for each in weights)


def _first_of(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _can_round(members: Sequence[Any]) -> bool:
    if not all(type(each) in _KINDS and is_plain(each) for each in members):
        return False
    return len({(each.in_features, each.bias is None) for each in members}) == 1
